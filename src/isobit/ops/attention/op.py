"""The attention operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.arguments import WITH_GPU, check_softcap, check_tensors, refuse_shape
from isobit.ops.attention import portable
from isobit.ops.attention.portable import Mask
from isobit.ops.device_tables import copied, kept, table_of, values_of
from isobit.ops.portable.samples import as_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.order.plan import ATTENTION_BLOCK, LANES
from isobit.order.samples import Samples


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    q_samples: Samples | Tensor | None = None,
    k_samples: Samples | Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention that gives a token the same bits in prefill, in any chunk, and when decoded.

    The result of a query depends on that query, its position and the keys of its sample. Query i of a sample has the
    position (number of keys − number of queries + i), so keys of a cache are keys that come before the queries.

    Args:
        q: Queries, [B, T, H, D], or packed [T, H, D]. D is a multiple of 16, at most 256.
        k: Keys, [B, S, H_kv, D] or [S, H_kv, D], where H_kv divides H.
        v: Values, in the shape of k.
        is_causal: Whether a query sees only keys up to its own position.
        scale: Factor of the scores; by default 1 / sqrt(D).
        window: How many keys up to its own a query sees; without is_causal, it also sees as many from its own on, so
            that keys nearer than `window` positions are seen. By default all.
        softcap: Scores become softcap · tanh(score / softcap), after the scale; by default they are not capped.
        chunk_size: With is_causal, a query sees only keys of its own chunk of so many positions of the sample, as in
            Llama 4; by default all.
        q_samples: The rows of each sample of q, as `Samples` or cumulative lengths (`cu_seqlens`). By default each
            batch entry is a sample. Rows outside every sample are padding and give 0.
        k_samples: The same for k and v; a sample has at least as many keys as queries.

    Returns:
        Tensor in the shape and dtype of q.

    Raises:
        ArgumentError: If shapes, dtypes, samples or options do not fit together.
        UnsupportedError: In backward, if a sample has fewer queries than keys.

    Example:
        >>> q, k, v = (torch.randn(1, 70, 2, 16) for _ in range(3))
        >>> whole = isobit.attention(q, k, v, is_causal=True)
        >>> torch.equal(isobit.attention(q[:, -1:], k, v, is_causal=True), whole[:, -1:])
        True
    """

    def places(q: Tensor, k: Tensor) -> Places:
        return Places(q, k, as_samples(q_samples), as_samples(k_samples))

    mask = mask_of(q, is_causal, scale, window, softcap, chunk_size)
    return attention_in(places, q, k, v, mask)


def attention_in(
    places: Callable[[Tensor, Tensor], Places],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
) -> Tensor:
    """Compute `attention` of samples at places that the caller may keep from layer to layer."""
    check_tensors(WITH_GPU, q=q, k=k, v=v)
    check_attention(q, k, v)
    return places(q, k).attend(q, k, v, mask)


class Places:
    """Where the queries and keys of each sample are: the same for every layer of a model that runs once.

    Args:
        q: Queries of a call, of which only the shape and the device are read.
        k: Keys of that call.
        queries: The samples of q; by default each batch entry is one.
        keys: The samples of k.

    Raises:
        ArgumentError: If the samples do not describe the rows of q and k.
    """

    def __init__(self, q: Tensor, k: Tensor, queries: Samples | None, keys: Samples | None) -> None:
        """Check the samples, and make the tables that the operator reads."""

        def make() -> tuple[Tensor, BlockTable, bool]:
            of_q, of_k = queries or default_samples(q), keys or default_samples(k)
            check_samples(q, k, of_q, of_k)
            starts = [
                [start + at for at in range(0, rows, ATTENTION_BLOCK)] for start, rows in of_k.spans
            ]
            inside = keeps_batches(of_k, k.shape[-3]) and keeps_batches(of_q, q.shape[-3])
            table = BlockTable(starts, [rows for _, rows in of_k.spans], k.device)
            return spans_tensor(of_q, q.device), table, not inside

        key = (q.shape[:-2], k.shape[:-2], queries, keys)
        self.spans, self.table, self.crosses = kept(key, q.device, make)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Compute attention of tensors that were checked, in the shapes that the places were made of."""
        if not self.crosses:
            return attend(q, k, v, self.spans, self.table, mask)
        rows = q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3)
        return attend(*rows, self.spans, self.table, mask).view(q.shape)


def spans_tensor(samples: Samples, device: torch.device) -> Tensor:
    """Return the first row and the number of rows of each sample, [samples, 2]."""
    return table_of(samples.spans, (-1, 2), device)


def keeps_batches(samples: Samples, rows: int) -> bool:
    """Return whether no sample crosses from one batch entry into the next: then its rows are evenly spaced."""
    return all(
        not length or start // rows == (start + length - 1) // rows
        for start, length in samples.spans
    )


class BlockTable:
    """The position of each sample's keys in memory: the row at which each block of 64 begins, and how many there are.

    `starts` is [samples, blocks], padded with 0; `lengths` is [samples].
    """

    def __init__(self, starts: list[list[int]], lengths: list[int], device: torch.device) -> None:
        most = max((len(row) for row in starts), default=0)
        padded = [row + [0] * (most - len(row)) for row in starts]
        self.starts = copied(padded, (len(starts), most), device)
        self.lengths = copied(lengths, (len(lengths),), device)


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, keys: BlockTable, mask: Mask) -> Tensor:
    """Compute attention of rows [R, H, D] or [B, T, H, D]; contiguous, cached and paged keys all call this."""

    def sizes(q: Tensor) -> tuple[int, ...]:
        return (q.shape[:-2].numel(), *q.shape[-2:], k.shape[:-2].numel(), k.shape[-2])

    where = (spans, keys.starts, keys.lengths)
    y, _ = launch("attention", sizes, q, k, v, *where, *mask.options)
    return y  # type: ignore[no-any-return]


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the shapes of q, k and v fit together."""
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
            "pad the depth with zeros, and pass scale=",
        )
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        refuse_shape(
            "k",
            k,
            f"[..., H_kv, D], H_kv a divisor of {q.shape[-2]}",
            "give every key head the same number of query heads",
        )


def default_samples(rows: Tensor) -> Samples:
    """Return B samples for [B, T, H, D], and one for [T, H, D]."""
    return Samples.packed([rows.shape[-3]] * (rows.shape[0] if rows.dim() == 4 else 1))


def check_samples(q: Tensor, k: Tensor, queries: Samples, keys: Samples) -> None:
    """Raise unless both describe all rows of the same samples, with at least as many keys as queries in each."""
    for name, tensor, samples in (("q", q, queries), ("k", k, keys)):
        if samples.rows != tensor.shape[:-2].numel():
            refuse_shape(
                name,
                tensor,
                f"[..., H, D] with {samples.rows} rows, as described by its samples",
                "describe all rows",
            )
    if len(queries.spans) != len(keys.spans):
        raise ArgumentError(
            expected=f"k_samples of {len(queries.spans)} samples, as q_samples",
            received=f"{len(keys.spans)} samples",
            remedy="describe the same samples in the same order; a sample may have no queries",
        )
    for i, ((_, query_rows), (_, key_rows)) in enumerate(
        zip(queries.spans, keys.spans, strict=True)
    ):
        if query_rows > key_rows:
            raise ArgumentError(
                expected=f"at least as many keys as queries in sample {i}",
                received=f"{query_rows} queries and {key_rows} keys",
                remedy="a query is one of its sample's positions: append its key first",
            )


def check_scale(scale: float | None, depth: int) -> float:
    """Return the scale of the scores: 1 / sqrt(D) by default."""
    return depth**-0.5 if scale is None else float(scale)


def mask_of(
    q: Tensor,
    is_causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Mask:
    """Return the mask of a call, after checking what it is made of."""
    if window is not None and window < 1:
        raise ArgumentError(
            expected="a window of one key or more",
            received=f"window={window}",
            remedy="leave window out, or count the keys that a query sees up to its own",
        )
    check_softcap(softcap)
    if chunk_size is not None and (chunk_size < 1 or not is_causal):
        raise ArgumentError(
            expected="a chunk_size of one position or more, in causal attention",
            received=f"chunk_size={chunk_size}, is_causal={is_causal}",
            remedy="leave chunk_size out, or describe each chunk as a sample of its own",
        )
    factor = check_scale(scale, q.shape[-1])
    return Mask(factor, is_causal, int(window or 0), float(softcap or 0), int(chunk_size or 0))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, spans, blocks, lengths, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, spans, blocks, lengths)


def check_rows_of_keys(spans: Tensor, blocks: Tensor, lengths: Tensor) -> None:
    """Raise unless the keys of each sample are in the rows of its queries, as the backward operators read them."""
    rows = zip(values_of(spans), values_of(blocks), values_of(lengths), strict=True)
    if any(
        list(starts[: -(-keys // ATTENTION_BLOCK)])
        != list(range(first, first + keys, ATTENTION_BLOCK))
        for (first, _), starts, keys in rows
    ):
        raise UnsupportedError(
            expected="the keys of every sample in the same rows as its queries",
            received="a gradient through samples of q and k that begin at different rows, or pages of a cache",
            remedy="describe q and k by the same samples in training",
        )


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, spans, blocks, lengths = ctx.saved_tensors
        if [rows for _, rows in values_of(spans)] != list(values_of(lengths)):
            raise UnsupportedError(
                expected="as many queries as keys in every sample",
                received="a gradient through keys of a cache, or of an earlier chunk",
                remedy="train on whole samples; a cache is for inference, under torch.no_grad()",
            )
        check_rows_of_keys(spans, blocks, lengths)
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        grads = operator(grad, *tensors, spans, blocks, lengths, *ctx.options)
        return (*grads, *[None] * (3 + len(ctx.options)))

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""
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
    softcap: float = 0.0,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    mask = Mask(scale, causal, window, softcap, chunk_size)
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
    softcap: float = 0.0,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [t.flatten(0, -3) for t in (grad, q, k, v, out)]
    saved = portable.Saved(rows[0], rows[1], rows[2], rows[3], rows[4], lse.flatten(0, -2))
    mask = Mask(scale, causal, window, softcap, chunk_size)
    dq, dk, dv = portable.attention_backward(saved, spans, mask)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


declare("attention", register_formulas, triton="isobit.ops.attention.triton")
