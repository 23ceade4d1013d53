"""Bitwise-consistent training and inference for PyTorch, with the proof attached."""

from isobit import bits, nn
from isobit.errors import ArgumentError, CutError, EngineError, IsobitError, UnsupportedError
from isobit.nn import freeze
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.samples import Samples

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Cut",
    "CutError",
    "EngineError",
    "IsobitError",
    "Samples",
    "UnsupportedError",
    "bits",
    "freeze",
    "linear",
    "nn",
]
