"""Compare an executor's attention with the portable one, bit for bit, across the edges of a block and of a chunk."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attention import portable
from isobit.ops.attesting import Call, call_native
from isobit.ops.portable.hard_inputs import wide_values
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK

KEYS, DEPTH = 66, 16  # a whole block and a part of the next
# Two queries that see the end of a chunk, a whole block of the next, and a part of another.
QUERIES, END, WINDOW = 2, ATTENTION_CHUNK + KEYS, 2 * KEYS


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(KEYS)
    q, k, v, grad = (wide_values((KEYS, 1, DEPTH), dtype, generator) for _ in range(4))
    spans, blocks, lengths = (
        torch.tensor([[0, KEYS]]),
        torch.tensor([[0, 64]]),
        torch.tensor([KEYS]),
    )
    y, lse = call("attention", q, k, v, spans, blocks, lengths, 0.25, True, 0)
    mask = portable.Mask(0.25, True, 0)
    found = call("attention_backward", grad, q, k, v, y, lse, spans, blocks, lengths, 0.25, True, 0)
    known = portable.attention_backward(portable.Saved(grad, q, k, v, y, lse), spans, mask)
    pairs = [
        (y, portable.attention(q, k, v, spans, blocks, lengths, mask)[0]),
        *zip(found, known, strict=True),
    ]
    for name, (left, right) in zip(("outputs", "dq", "dk", "dv"), pairs, strict=True):
        if not bits.equal(left, right):
            return f"attention's {name}"
    return difference_across_chunks(generator, call)


def difference_across_chunks(generator: torch.Generator, call: Call) -> str | None:
    """Return what differs first where a window is cut by the edge of a chunk, or None.

    The keys before the window are NaN. Only blocks that a query sees are computed here, so that this takes little time;
    the contract has whole chunks.
    """
    mask = portable.Mask(0.25, True, WINDOW)
    q, k, v = (
        torch.randn((rows, 1, DEPTH), generator=generator, dtype=torch.float32)
        for rows in (QUERIES, END, END)
    )
    first = END - QUERIES + 1 - WINDOW  # the first key that is seen
    k[:first] = v[:first] = torch.nan
    starts = range(0, END, ATTENTION_BLOCK)
    found, found_lse = call(
        "attention",
        q,
        k,
        v,
        torch.tensor([[0, QUERIES]]),
        torch.tensor([list(starts)]),
        torch.tensor([END]),
        mask.scale,
        mask.causal,
        mask.window,
    )
    fold = portable.Fold(q[:, 0], torch.arange(END - QUERIES, END), END, mask)
    for at in starts[first // ATTENTION_BLOCK :]:
        fold.add(at, k[at : at + ATTENTION_BLOCK, 0], v[at : at + ATTENTION_BLOCK, 0])
    y, lse = fold.finish()
    if not bits.equal(found[:, 0], y) or not bits.equal(found_lse[:, 0], lse):
        return "attention's outputs across a chunk's edge"
    return None
