"""Checks of a training run: its configuration before it starts, and the agreement of its ranks while it runs."""

from isobit.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
