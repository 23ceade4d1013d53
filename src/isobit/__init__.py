"""Bitwise-consistent training and inference for PyTorch, with the proof attached."""

from isobit.foundation.lazy import attach

__version__ = "0.2.0"

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
