"""The attention operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.attention import portable
from isobit.ops.attention.portable import Mask
from isobit.ops.launch import launch
from isobit.ops.registration import declare, portable_operator, register_operator
from isobit.order.plan import ATTENTION_BLOCK, LANES
from isobit.order.samples import Samples


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    queries: Samples | None = None,
    keys: Samples | None = None,
) -> Tensor:
    """softmax(q · kᵀ · scale) · v, with bits that depend on a query, its position and its sample's keys alone.

    q is [B, T, H, D] or packed [T, H, D]; k and v are [B, S, H_kv, D] or [S, H_kv, D], and H_kv divides H. `queries`
    and `keys` say which rows form which sample; by default a batch's rows are its samples. Query i of a sample stands
    at position (its keys − its queries + i), so a cache is keys without queries. Rows outside every sample give 0.
    """
    check_tensors(q=q, k=k, v=v)
    check_attention(q, k, v)
    asked = queries or default_samples(q)
    known = keys or default_samples(k)
    check_samples(q, k, asked, known)
    blocks = [[start + at for at in range(0, rows, ATTENTION_BLOCK)] for start, rows in known.spans]
    shape = q.shape
    if not keeps_batches(known, k.shape[-3]) or not keeps_batches(asked, q.shape[-3]):
        q, k, v = q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3)
    table = BlockTable(blocks, [rows for _, rows in known.spans], k.device)
    mask = Mask(check_scale(scale, q.shape[-1]), causal, check_window(window, causal))
    return attend(q, k, v, asked, table, mask).view(shape)


def keeps_batches(samples: Samples, rows: int) -> bool:
    """Whether no sample crosses from one row of the batch into the next: then its rows are evenly spaced."""
    return all(
        not length or start // rows == (start + length - 1) // rows
        for start, length in samples.spans
    )


class BlockTable:
    """Where each sample's keys lie: the row at which each block of 64 begins, and how many keys there are."""

    def __init__(self, starts: list[list[int]], lengths: list[int], device: torch.device) -> None:
        most = max((len(row) for row in starts), default=0)
        padded = [row + [0] * (most - len(row)) for row in starts]
        self.starts = torch.tensor(padded, dtype=torch.int64, device=device).reshape(
            len(starts), most
        )
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Samples, keys: BlockTable, mask: Mask
) -> Tensor:
    """Over rows [R, H, D] or [B, T, H, D]: the one call that contiguous, cached and paged keys share."""
    spans = torch.tensor(queries.spans, dtype=torch.int64, device=q.device).reshape(-1, 2)
    sizes = (q.shape[:-2].numel(), *q.shape[-2:], k.shape[:-2].numel(), k.shape[-2])
    where = (spans, keys.starts, keys.lengths)
    y, _ = launch("attention", sizes, q, k, v, *where, mask.scale, mask.causal, mask.window)
    return y  # type: ignore[no-any-return]


# ---- checks ---------------------------------------------------------------------------------------------


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes that belong together, or a refusal."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() not in (3, 4):
            refuse_shape(
                name, tensor, "[B, T, H, D] or [T, H, D]", "put heads and their depth last"
            )
    if v.shape != k.shape:
        refuse_shape("v", v, f"{list(k.shape)}, as k", "pass keys and values of one shape")
    depth = q.shape[-1]
    if k.shape[-1] != depth:
        refuse_shape("k", k, f"[..., {depth}], as q", "make the depth of q and k the same")
    if not depth or depth % LANES or depth > 256:
        refuse_shape(
            "q",
            q,
            f"[..., D], D a multiple of {LANES} up to 256",
            "pad the depth with zeros, and say scale=",
        )
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        refuse_shape(
            "k",
            k,
            f"[..., H_kv, D], H_kv a divisor of {q.shape[-2]}",
            "each key head serves as many heads",
        )


def default_samples(rows: Tensor) -> Samples:
    """[B, T, ...] is B samples, [T, ...] one."""
    return Samples.packed([rows.shape[-3]] * (rows.shape[0] if rows.dim() == 4 else 1))


def check_samples(q: Tensor, k: Tensor, queries: Samples, keys: Samples) -> None:
    """Spans that cover the rows given, sample by sample."""
    for name, tensor, samples in (("q", q, queries), ("k", k, keys)):
        if samples.rows != tensor.shape[:-2].numel():
            refuse_shape(
                name,
                tensor,
                f"[..., H, D] with {samples.rows} rows, as its samples say",
                "describe all rows",
            )
    if len(queries.spans) != len(keys.spans):
        raise ArgumentError(
            expected=f"keys of {len(queries.spans)} samples, as queries",
            received=f"keys of {len(keys.spans)}",
            remedy="describe the same samples in the same order; a sample may have no queries",
        )
    for i, ((_, asked), (_, known)) in enumerate(zip(queries.spans, keys.spans, strict=True)):
        if asked > known:
            raise ArgumentError(
                expected=f"at least as many keys as queries in sample {i}",
                received=f"{asked} queries and {known} keys",
                remedy="a query is one of its sample's positions: append its key first",
            )


def check_scale(scale: float | None, depth: int) -> float:
    """1 / √D unless said."""
    return depth**-0.5 if scale is None else float(scale)


def check_window(window: int | None, causal: bool) -> int:
    """A number of keys, or 0 for all."""
    if window is None:
        return 0
    if not causal or window < 1:
        raise ArgumentError(
            expected="a window of one key or more, in causal attention",
            received=f"window={window}, causal={causal}",
            remedy="leave window out, or count the keys a query sees, itself included",
        )
    return int(window)


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, spans, blocks, lengths, ctx.scale, ctx.causal, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, spans, blocks, lengths)


def backward_with(prefix: str) -> Any:
    """The gradient, by the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, spans, blocks, lengths = ctx.saved_tensors
        if not torch.equal(spans[:, 1], lengths):
            raise UnsupportedError(
                expected="as many queries as keys in every sample",
                received="a gradient through keys of a cache, or of an earlier chunk",
                remedy="train on whole samples; a cache is for inference, under torch.no_grad()",
            )
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        grads = operator(grad, *tensors, spans, blocks, lengths, ctx.scale, ctx.causal, ctx.window)
        return (*grads, *[None] * 6)

    return backward


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""
    register_operator(
        "attention",
        prefix,
        lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
        backward_with(prefix),
        setup_context,
    )
    register_operator(
        "attention",
        f"{prefix}_backward",
        lambda grad, q, k, v, *_: tuple(t.new_empty(t.shape) for t in (q, k, v)),
    )


@portable_operator("portable_attention")
def portable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """y and the log-sum-exp of each query's scores."""
    mask = Mask(scale, causal, window)
    y, lse = portable.attention(
        q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3), spans, blocks, lengths, mask
    )
    return y.view(q.shape), lse.view(q.shape[:-1])


@portable_operator("portable_attention_backward")
def portable_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    rows = [t.flatten(0, -3) for t in (grad, q, k, v, out)]
    given = portable.Given(rows[0], rows[1], rows[2], rows[3], rows[4], lse.flatten(0, -2))
    dq, dk, dv = portable.attention_backward(given, spans, Mask(scale, causal, window))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


declare("attention", register_formulas)
