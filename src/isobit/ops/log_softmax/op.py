"""The log-softmax operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.log_softmax import portable
from isobit.ops.registration import declare, portable_operator
from isobit.ops.softmax.op import along_axis, register_formulas


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """(x − max) − log Σ exp(x − max) along `dim`, with bits that depend on that row of x alone.

    The sum is over pairs (max, sum), as isobit.linear_logprob's is: the two agree to the bit on fp32 logits.
    """
    return along_axis("log_softmax", x, dim)


@portable_operator("portable_log_softmax")
def portable_log_softmax(x: Tensor) -> Tensor:
    """y over the last axis."""
    return portable.log_softmax(x)


@portable_operator("portable_log_softmax_backward")
def portable_log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """dx over the last axis."""
    return portable.log_softmax_backward(grad, y)


declare("log_softmax", register_formulas)
