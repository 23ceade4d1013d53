"""Checks of a training configuration before a run, and of its ranks during it."""

from isobit.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
