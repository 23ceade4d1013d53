"""The Triton executor of the embedding: the lookup, and the dense gradient of the table.

[Note: the gradient of a table on a GPU]
A row of the table has the sum over the tokens with its id; a leaf, sample or segment without the id adds +0, which
changes no bits. So tokens are sorted by id, and within an id they stay in the order of the samples. Then every level of
the order is a fold of runs of neighbours: the tokens of a leaf (from +0), the leaves of a segment, and, once per level
of the tree, the two halves of a node, of which one may be missing. The sort and the tables are integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.device_tables import is_capturing, kept, refuse_in_capture
from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run
from isobit.ops.gpu.ordered_rows import BLOCK, WARPS, fold
from isobit.ops.portable.samples import whole_samples
from isobit.ops.share import gradient_dtype
from isobit.order.samples import Samples

TOKENS = 16  # of a program of the lookup


@triton.jit(do_not_specialize=["size"])
def look_up(
    ids: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ABSENT: tl.constexpr = 0,
) -> None:
    """Copy rows of weight [ROWS, WIDTH] to y [size, WIDTH]; an id that is no row gives +0, or NaN if ABSENT is 1."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(ids + token, mask=token < size, other=0).to(tl.int64)
    inside = (token < size) & (column < WIDTH)
    known = inside & (row >= 0) & (row < ROWS)
    other = 0.0
    if ABSENT:
        other = float("nan")
    value = tl.load(weight + row * WIDTH + column, mask=known, other=other)
    tl.store(y + token * WIDTH + column, value, mask=inside)


@triton.jit
def add_tokens(
    grad: tl.tensor,
    tokens: tl.tensor,
    bounds: tl.tensor,
    sums: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store sums [runs, WIDTH]: from +0, the rows of grad [., WIDTH] of tokens [bounds[i], bounds[i + 1])."""
    at, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(bounds + at), tl.load(bounds + at + 1)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end):
        token = tl.load(tokens + i)
        total = total + tl.load(grad + token * WIDTH + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(sums + at.to(tl.int64) * WIDTH + column, total, mask=inside)


@triton.jit
def store_rows(
    rows: tl.tensor, ids: tl.tensor, table: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Round rows fp32 [ids, WIDTH] into the rows of the table that ids name."""
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.load(rows + at * WIDTH + column, mask=inside, other=0.0)
    place = tl.load(ids + at) * WIDTH + column
    tl.store(table + place, round_once(total, table.dtype.element_ty), mask=inside)


def tokens_in_order(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of all samples in the order of the segments, and the leaf and the segment of each."""
    runs = enumerate(samples.segments)
    leaves = [(leaf.start, leaf.length, at) for at, run in runs for leaf in run]
    table = torch.tensor(leaves, dtype=torch.int64).reshape(-1, 3)
    start, length, segment = table.unbind(1)
    leaf = torch.repeat_interleave(torch.arange(len(table)), length)
    first = length.cumsum(0) - length
    tokens = torch.arange(len(leaf)) - first[leaf] + start[leaf]
    return tokens, leaf, segment[leaf]


def runs_of(*keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds [runs + 1] of runs of equal keys, and the place of the first of each run."""
    changes = torch.zeros(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    first = changes.nonzero().flatten()
    return torch.cat([first, first.new_tensor([len(changes)])]), first


def run_columns(
    kernel: object, rows: int, width: int, *args: Tensor | int, **constants: int
) -> None:
    """Launch a kernel over `rows` programs times blocks of columns."""
    grid = (rows, -(-width // BLOCK))
    run(kernel, grid, *args, warps=WARPS, WIDTH=width, BLOCK=BLOCK, **constants)


@triton_operator("embedding")
def triton_embedding(
    ids: Tensor, weight: Tensor, spans: Tensor | None, padding: int, of: int = 0
) -> Tensor:
    """Look up rows; an id that is not in the table raises IndexError, on a GPU when the device is synchronized.

    Builds of torch for ROCm leave assertions on the device out: there, the row of such an id is NaN.
    """
    known = ((ids >= 0) & (ids < len(weight))).all()
    if ids.is_cuda or is_capturing():
        torch._assert_async(known)
    elif not known:
        raise IndexError("an id that is no row of the table")
    y = torch.empty(*ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    given = (ids.contiguous(), weight.contiguous(), y, ids.numel())
    programs = -(-ids.numel() // TOKENS)
    run_columns(
        look_up, programs, weight.shape[1], *given, ROWS=len(weight), TOKENS=TOKENS, ABSENT=1
    )
    return y


@triton_operator("embedding_weight_grad", tags=(torch.Tag.cudagraph_unsafe,))
def triton_embedding_weight_grad(
    grad: Tensor, ids: Tensor, spans: Tensor | None, vocabulary: int, padding: int, of: int = 0
) -> Tensor:
    samples, width, device = whole_samples(grad, spans, of), grad.shape[-1], grad.device
    dtype = gradient_dtype(grad.dtype, len(samples.spans), samples.total)
    table = torch.zeros(vocabulary, width, dtype=dtype, device=device)
    refuse_in_capture("the gradient of an embedding, whose sums depend on the ids")
    tokens, leaf, segment = kept(
        (tokens_in_order, samples.spans, samples.total),
        device,
        lambda: tuple(part.to(device) for part in tokens_in_order(samples)),
    )
    key, order = ids.reshape(-1)[tokens].long().sort(stable=True)
    order = order[key != padding]
    key, tokens, leaf, node = key[key != padding], tokens[order], leaf[order], segment[order]
    if not len(tokens):
        return table
    bounds, first = runs_of(key, leaf)
    rows = torch.empty(len(first), width, dtype=torch.float32, device=device)
    run_columns(add_tokens, len(rows), width, grad.contiguous(), tokens, bounds, rows)
    key, node = key[first], node[first]
    for level in range(len(samples.segments).bit_length()):  # the leaves of a segment, then nodes
        bounds, first = runs_of(key, node >> level)
        if len(first) < len(rows):
            rows, key, node = fold(rows, bounds, None), key[first], node[first]
    run_columns(store_rows, len(rows), width, rows, key, table)
    return table
