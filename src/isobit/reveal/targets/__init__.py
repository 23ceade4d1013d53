"""Targets: sums inside torch functions, wrapped so that `isobit.reveal` can write their terms and read the sum.

Every target takes the number of terms `k` first, then the shape of the call, so that one factory can be certified over
many configurations.
"""

from isobit.reveal.targets.products import (
    attention,
    bias_grad,
    embedding_grad,
    input_grad,
    linear,
    matmul,
    weight_grad,
)
from isobit.reveal.targets.ranks import Ranks
from isobit.reveal.targets.sums import layer_norm, log_softmax, mean, of, rms_norm, softmax, sum

__all__ = [
    "Ranks",
    "attention",
    "bias_grad",
    "embedding_grad",
    "input_grad",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "mean",
    "of",
    "rms_norm",
    "softmax",
    "sum",
    "weight_grad",
]
