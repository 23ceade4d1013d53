"""Adapters that let sums inside torch functions be probed: they write terms, call, and read the sum."""

from isobit.reveal.targets.attention import attention, embedding_grad
from isobit.reveal.targets.products import bias_grad, input_grad, linear, matmul, weight_grad
from isobit.reveal.targets.ranks import Ranks
from isobit.reveal.targets.rows import layer_norm, log_softmax, rms_norm, softmax
from isobit.reveal.targets.sums import mean, of, sum

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
