"""Reveal the order in which a function adds numbers, and compare it between configurations."""

from isobit.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
