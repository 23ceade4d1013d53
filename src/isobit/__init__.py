"""Bitwise-consistent training and inference for PyTorch, with the proof attached."""

from isobit import bits, nn, targets
from isobit.errors import ArgumentError, CutError, EngineError, IsobitError, RevealError, UnsupportedError
from isobit.nn import freeze
from isobit.ops.linear.op import linear
from isobit.order.certify import Certificate
from isobit.order.cut import Cut
from isobit.order.reveal import Tree
from isobit.order.samples import Samples
from isobit.targets.accept import certify, reveal

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Certificate",
    "Cut",
    "CutError",
    "EngineError",
    "IsobitError",
    "RevealError",
    "Samples",
    "Tree",
    "UnsupportedError",
    "bits",
    "certify",
    "freeze",
    "linear",
    "nn",
    "reveal",
    "targets",
]
