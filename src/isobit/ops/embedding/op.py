"""The embedding: its torch operators, the gradient of its table, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.embedding import portable
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.share import as_partial, described_dtype, share_in_force
from isobit.order.samples import Samples

ID_DTYPES = (torch.int64, torch.int32)
NO_PADDING = -1


def embedding(
    ids: Tensor, weight: Tensor, *, samples: Samples | None = None, padding_idx: int | None = None
) -> Tensor:
    """The rows of weight [V, H] that ids [...] name, as [..., H].

    The table's gradient is dense, [V, H], and sums over the samples (by default ids [B, T] are B samples): for each
    row, the tokens of a leaf of 256 that have its id are folded left from +0, leaves and samples are folded left in
    their segment, segments are merged by the tree; whatever lacks the id adds +0, which changes no bit, since no
    partial sum is −0. fp32 whatever the dtype, one rounding. The row of `padding_idx` has gradient zero.
    """
    check_tensors(weight=weight)
    padding = check_embedding(ids, weight, padding_idx)
    spans, of = describe(samples, ids.unsqueeze(-1), weight)
    given = (ids, weight, spans, padding, of)
    try:
        return launch("embedding", (ids.numel(), *weight.shape), *given, dtype=weight.dtype)  # type: ignore[no-any-return]
    except IndexError as error:
        raise ArgumentError(
            expected=f"ids from 0 to {len(weight) - 1}, as weight is {list(weight.shape)}",
            received=f"ids from {int(ids.min())} to {int(ids.max())}",
            remedy="pass ids of this table's rows",
        ) from error


def check_embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> int:
    """Ids, a table, and the row that padding has (−1: none), or a refusal."""
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
        refuse_shape("weight", weight, "[V, H]", "pass a table, a row an id")
    if padding_idx is None:
        return NO_PADDING
    if not isinstance(padding_idx, int) or not -len(weight) <= padding_idx < len(weight):
        raise ArgumentError(
            expected=f"padding_idx from {-len(weight)} to {len(weight) - 1}",
            received=f"{padding_idx!r}",
            remedy="name a row of weight, or None",
        )
    return padding_idx % len(weight)


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight, spans, ctx.padding, ctx.of = inputs
    ctx.vocabulary, ctx.share = weight.shape[0], share_in_force()
    ctx.save_for_backward(ids, spans)


def backward_with(prefix: str) -> Any:
    """The gradient, by the operator `isobit::<prefix>_weight_grad`."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_weight_grad")
        found = operator(grad, ids, spans, ctx.vocabulary, ctx.padding, ctx.of)
        return None, as_partial(found, ctx.share), None, None, None

    return backward


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""

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
    """The rows that ids name; index_select raises IndexError for one that is not there."""
    return portable.embedding(ids, weight)


@portable_operator("portable_embedding_weight_grad")
def portable_weight_grad(
    grad: Tensor, ids: Tensor, spans: Tensor | None, vocabulary: int, padding: int, of: int = 0
) -> Tensor:
    """The table's gradient over the samples."""
    return portable.embedding_weight_grad(
        grad, ids, whole_samples(grad, spans, of), vocabulary, padding
    )


declare("embedding", register_formulas)
