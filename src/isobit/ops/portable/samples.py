"""The samples of a call as operators take them: a tensor of spans, and the size of the global batch.

See [Note: shares of a global batch] in isobit/order/samples.py for `spans`, `of` and `roots`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import refuse_shape
from isobit.ops.device_tables import table_of, values_of
from isobit.ops.share import check_default, check_share, check_subtree
from isobit.order.samples import Samples


def as_samples(samples: Samples | Tensor | None) -> Samples | None:
    """Convert cumulative lengths (`cu_seqlens`, as FlashAttention takes them) to `Samples`; pass everything else on.

    Args:
        samples: `Samples`, or an int32 or int64 tensor [0, n0, n0 + n1, ...] of the whole global batch, or None.

    Raises:
        ArgumentError: If the tensor is not one-dimensional, not of integers, or decreases.
    """
    if samples is None or isinstance(samples, Samples):
        return samples
    if (
        not isinstance(samples, Tensor)
        or samples.dim() != 1
        or samples.dtype not in (torch.int32, torch.int64)
    ):
        received = (
            f"{samples.dtype} of shape {list(samples.shape)}"
            if isinstance(samples, Tensor)
            else type(samples).__name__
        )
        raise ArgumentError(
            expected="samples as isobit.Samples, or cumulative lengths as an int32 or int64 tensor [samples + 1]",
            received=received,
            remedy="pass isobit.Samples.packed(lengths), or torch.tensor([0, n0, n0 + n1, ...])",
        )
    return Samples.cumulative(samples.tolist())


def check_rows(samples: Samples, x: Tensor) -> None:
    """Raise ArgumentError unless the samples describe all rows of x [..., K]."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    if rows != samples.rows:
        expected = f"[..., K] with {samples.rows} rows, as described by samples"
        refuse_shape("x", x, expected, "describe all rows of this call, padding included")


def spans_of(samples: Samples, x: Tensor) -> Tensor:
    """Return spans [samples, 2]: the first row and the number of rows of each sample of x [..., K]."""
    check_rows(samples, x)
    return table_of(samples.spans, (-1, 2), x.device)


def describe(
    samples: Samples | Tensor | None, tokens: Tensor, *parameters: Tensor | None
) -> tuple[Tensor | None, int]:
    """Return (spans, of) of a call, after checking that gradients of `parameters` may be taken.

    (None, 0) if there are no samples=: then the operator takes tokens [B, T, K] as the B samples of the whole batch.
    """
    known = None if samples is None else as_samples(samples)
    if known is None:
        check_default(tokens, *parameters)
        return None, 0
    check_share(known, *parameters)
    return spans_of(known, tokens), known.total


def whole_samples(rows: Tensor, spans: Tensor | None, of: int = 0) -> Samples:
    """Rebuild `Samples` from the (spans, of) of an operator's arguments.

    A share is placed at index 0: the sum of a subtree does not depend on its position.

    Raises:
        UnsupportedError: If a share is not exactly one subtree.
    """
    if spans is not None:
        known = tuple((int(start), int(length)) for start, length in values_of(spans))
        share = Samples(known, rows.shape[:-1].numel(), 0, of or len(known))
        if share.is_share:
            check_subtree(share)
        return share
    length = rows.shape[-2] if rows.dim() > 1 else 1
    total = rows.shape[:-1].numel()
    return Samples.packed([length] * (total // length if length else 0))
