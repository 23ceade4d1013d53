"""Checks of a training run: its configuration, its steps and the agreement of its ranks while it runs, its log."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
