"""The embedding operator: the public function, its torch operators and the gradient of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.embedding import portable
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.share import described_dtype, marking_partials
from isobit.order.samples import Samples

ID_DTYPES = (torch.int64, torch.int32)
NO_PADDING = -1


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    samples: Samples | Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up rows of an embedding table, with a gradient that does not depend on batch layout or threads.

    The gradient of the table is dense and summed over the samples in fp32: per row, the tokens with its id are added
    from left to right within a leaf of 256 tokens, leaves and samples from left to right within a segment, and segments
    by the tree. Everything without the id adds +0, which changes no bits since no partial sum is −0.

    Args:
        ids: Row numbers of any shape, int64 or int32.
        weight: The table, [V, H], in fp32, bf16 or fp16.
        samples: The tokens of each sample, as `Samples` or cumulative lengths (`cu_seqlens`). By default ids [B, T] are
            B samples.
        padding_idx: A row whose gradient is zero, or None.

    Returns:
        Tensor of shape [..., H] in the dtype of weight.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or an id is not a row of weight.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> table = torch.arange(6.0).reshape(3, 2)
        >>> isobit.embedding(torch.tensor([2, 0]), table)
        tensor([[4., 5.],
                [0., 1.]])
    """
    check_tensors(WITH_GPU, weight=weight)
    padding = check_embedding(ids, weight, padding_idx)
    spans, of = describe(samples, ids.unsqueeze(-1), weight)
    given = (ids, weight, spans, padding, of)
    try:
        found = launch("embedding", (ids.numel(), *weight.shape), *given, dtype=weight.dtype)
    except IndexError as error:
        raise ArgumentError(
            expected=f"ids from 0 to {len(weight) - 1}, as weight is {list(weight.shape)}",
            received=f"ids from {int(ids.min())} to {int(ids.max())}",
            remedy="pass ids of this table's rows",
        ) from error
    return marking_partials(found)


def check_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> int:
    """Return the row of the padding, −1 for none; raise unless ids, weight and padding_idx fit together."""
    if not isinstance(ids, Tensor) or ids.dtype not in ID_DTYPES or ids.layout != torch.strided:
        received = f"{ids.dtype} {ids.layout}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError(
            expected="ids as an int64 or int32 tensor", received=received, remedy="pass ids.long()"
        )
    if ids.device != weight.device:
        received = f"ids on {ids.device}, weight on {weight.device}"
        raise ArgumentError(
            expected="one device", received=received, remedy="bring them to one device"
        )
    if weight.dim() != 2:
        refuse_shape("weight", weight, "[V, H]", "pass a table with one row per id")
    if padding_idx is None:
        return NO_PADDING
    if not isinstance(padding_idx, int) or not -len(weight) <= padding_idx < len(weight):
        raise ArgumentError(
            expected=f"padding_idx from {-len(weight)} to {len(weight) - 1}",
            received=f"{padding_idx!r}",
            remedy="name a row of weight, or None",
        )
    return padding_idx % len(weight)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight, spans, ctx.padding, ctx.of = inputs
    ctx.vocabulary = weight.shape[0]
    ctx.save_for_backward(ids, spans)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_weight_grad`."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_weight_grad")
        dweight = operator(grad, ids, spans, ctx.vocabulary, ctx.padding, ctx.of)
        return None, dweight, None, None, None

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def fake(
        grad: Tensor, ids: Tensor, spans: Tensor | None, vocabulary: int, padding: int, of: int = 0
    ) -> Tensor:
        return grad.new_empty(
            (vocabulary, grad.shape[-1]), dtype=described_dtype(grad.dtype, spans, of)
        )

    register_operator(
        "embedding",
        prefix,
        lambda ids, weight, *_: weight.new_empty((*ids.shape, weight.shape[1])),
        backward_with(prefix),
        setup_context,
    )
    register_operator("embedding", f"{prefix}_weight_grad", fake)


@portable_operator("portable_embedding")
def portable_embedding(
    ids: Tensor, weight: Tensor, spans: Tensor | None, padding: int, of: int = 0
) -> Tensor:
    """Look up rows; index_select raises IndexError for an id that is not in the table."""
    return portable.embedding(ids, weight)


@portable_operator("portable_embedding_weight_grad")
def portable_weight_grad(
    grad: Tensor, ids: Tensor, spans: Tensor | None, vocabulary: int, padding: int, of: int = 0
) -> Tensor:
    return portable.embedding_weight_grad(
        grad, ids, whole_samples(grad, spans, of), vocabulary, padding
    )


declare("embedding", register_formulas, triton="isobit.ops.embedding.triton")
