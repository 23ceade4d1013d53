"""The log-softmax operator: the public function and its torch operators; the formulas are those of softmax."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.log_softmax import portable
from isobit.ops.registration import declare, portable_operator
from isobit.ops.softmax.op import along_axis, register_formulas


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Log-softmax along an axis, in which each row depends on that row of x and on nothing else in the batch.

    Sums the same pairs (maximum, sum) as isobit.linear_logprob, so that the two are equal bit for bit on fp32 logits.

    Args:
        x: Any shape, in fp32, bf16 or fp16. Summed in fp32 and rounded once.
        dim: The axis to normalize.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If x is not a supported tensor, or has no such axis.

    Example:
        >>> x = torch.randn(8, 1000)
        >>> torch.equal(isobit.log_softmax(x)[:1], isobit.log_softmax(x[:1]))
        True
    """
    return along_axis("log_softmax", x, dim)


@portable_operator("portable_log_softmax")
def portable_log_softmax(x: Tensor) -> Tensor:
    return portable.log_softmax(x)


@portable_operator("portable_log_softmax_backward")
def portable_log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    return portable.log_softmax_backward(grad, y)


declare("log_softmax", register_formulas, triton="isobit.ops.log_softmax.triton")
