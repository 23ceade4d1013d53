"""The Triton executor of attention.

One order and two forms of the forward: `attention` for many queries, `attention_chunks` and `merge_chunks` (split-KV)
for few queries over more than one chunk. Keys are read through the table of blocks, whether they are those of a call,
of packed samples, or the pages of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.attention.portable import Mask
from isobit.ops.attention.tiles import tile_of
from isobit.ops.attention.triton_backward import (
    differentiate_keys,
    differentiate_queries,
    dot_heads,
)
from isobit.ops.attention.triton_forward import attention, attention_chunks, merge_chunks
from isobit.ops.device_tables import values_of
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK

# Sizes of tiles and the choice of a form are not part of the order: every one gives the same bits.
FEW_ROWS = 16  # up to how many rows of a sample and a key head are few
DOT_ROWS = 32
# Bytes of a head, padded, whose gradient fits into the shared memory of a GPU; others take every head.
WIDEST_GRADIENT = {"sm_80": 512, "sm_86": 256, "sm_89": 256, "sm_120": 256}
CHUNK = ATTENTION_CHUNK


@dataclass(frozen=True)
class Call:
    """The samples and sizes of a call.

    Attributes:
        spans, blocks, lengths: See triton_forward.py; contiguous.
        longest: The most queries of a sample.
        constants: The constants that all kernels of rows have.
        mask: Which keys a query sees, and the scale and the soft cap of the scores.
        limits: before, after and size of the mask; see triton_forward.py.
    """

    spans: Tensor
    blocks: Tensor
    lengths: Tensor
    longest: int
    constants: dict[str, Any]
    mask: Mask
    limits: tuple[int, int, int]

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        spans: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        mask: Mask,
    ) -> Call:
        """Describe a call of q [..., H, D] and k [..., H_kv, D]."""
        depth, key_heads = q.shape[-1], k.shape[-2]
        constants = {
            "KEY_HEADS": key_heads,
            "GROUP": q.shape[-2] // key_heads,
            "DEPTH": depth,
            "PADDED": 1 << (depth - 1).bit_length(),
            "CAPPED": mask.softcap > 0,
        }
        longest = max((rows for _, rows in values_of(spans)), default=0) if q.numel() else 0
        spans, blocks, lengths = spans.contiguous(), blocks.contiguous(), lengths.contiguous()
        # No limit is larger than the table, so that sums of positions fit in 32 bits.
        keys = blocks.shape[1] * ATTENTION_BLOCK
        before = min(mask.window - 1, keys) if mask.window else keys
        limits = before, 0 if mask.causal else before, min(mask.chunk_size or keys, keys)
        return Call(spans, blocks, lengths, longest, constants, mask, limits)

    def tile(self, use: str, x: Tensor) -> dict[str, int]:
        """Return the tile of a use, for x, as constants and options of a kernel."""
        tile = tile_of(use, x.dtype, target_of(x), self.constants["PADDED"] * x.dtype.itemsize)
        return {"ROWS": tile.rows, "warps": tile.warps, "stages": tile.stages}

    def check_gradient(self, q: Tensor) -> None:
        """Raise if the tiles of the gradient do not fit into the GPU's shared memory."""
        target, width = target_of(q), self.constants["PADDED"] * q.dtype.itemsize
        if width > WIDEST_GRADIENT.get(target, width):
            raise UnsupportedError(
                expected=f"heads of at most {WIDEST_GRADIENT[target]} bytes in a gradient on {target}, by its memory",
                received=f"heads of {q.shape[-1]} of {q.dtype}, which are {width} bytes when padded",
                remedy="use a 16-bit dtype, another GPU, or tensors on the CPU",
            )

    @property
    def scoring(self) -> tuple[float, float]:
        """SCALE and CAP."""
        return self.mask.scale, self.mask.softcap

    @property
    def hides(self) -> bool:
        """Whether a query hides a key of a block that it sees: one before a window or chunk, or after itself."""
        mask = self.mask
        return bool(mask.window or mask.chunk_size or (mask.causal and self.longest > 1))

    @property
    def samples(self) -> int:
        return len(self.spans)

    @property
    def table(self) -> int:
        """Blocks of the longest sample."""
        return self.blocks.shape[1]


@triton_operator("attention")
def triton_attention(
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
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1], torch.inf, dtype=torch.float32, device=q.device)
    mask = Mask(scale, causal, window, softcap, chunk_size)
    call = Call.of(q, k, spans, blocks, lengths, mask)
    if call.longest:
        forward(call, (q.contiguous(), k.contiguous(), v.contiguous()), y, lse)
    return y, lse


def forward(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    lse: Tensor,
) -> None:
    """Compute y and lse of contiguous q, k and v, in the form that suits the number of queries."""
    rows = call.longest * call.constants["GROUP"]
    few = rows <= FEW_ROWS
    tile = call.tile("few queries" if few else "many queries", y)
    how = {**call.constants, **tile, "CHUNK": CHUNK}
    tiles = -(-rows // how["ROWS"])
    grid = (tiles * call.samples, how["KEY_HEADS"])
    where = (call.spans, call.blocks, call.lengths, tiles, call.table, *call.limits)
    chunks = -(-call.table * ATTENTION_BLOCK // CHUNK)
    if not few or chunks == 1:
        run(attention, grid, *inputs, y, lse, *where, *call.scoring, GUARD=call.hides, **how)
        return
    heads = lse.numel()
    sizes = ((chunks, heads), (chunks, heads), (chunks, heads, y.shape[-1]))
    states = [torch.empty(size, dtype=torch.float32, device=y.device) for size in sizes]
    run(
        attention_chunks,
        (*grid, chunks),
        *inputs,
        *states,
        *where,
        heads,
        *call.scoring,
        GUARD=call.hides,
        **how,
    )
    merged = (y, lse, call.spans, call.lengths, tiles, *call.limits, heads)
    del how["CAPPED"]
    run(merge_chunks, grid, *states, *merged, **how)


@triton_operator("attention_backward")
def triton_attention_backward(
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
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    mask = Mask(scale, causal, window, softcap, chunk_size)
    call = Call.of(q, k, spans, blocks, lengths, mask)
    if not call.longest:
        return dq, dk, dv
    call.check_gradient(q)
    grad, lse, heads = grad.contiguous(), lse.contiguous(), lse.numel()
    dots = torch.empty_like(lse)
    how: dict[str, Any] = {"DEPTH": q.shape[-1], "ROWS": DOT_ROWS, "warps": 4}
    run(dot_heads, (-(-heads // DOT_ROWS),), grad, out.contiguous(), dots, heads, **how)
    inputs = (grad, q.contiguous(), k.contiguous(), v.contiguous(), lse, dots)
    how = {**call.constants, **call.tile("gradient", q)}
    tiles = -(-call.longest // how["ROWS"])
    where = (call.spans, call.blocks, call.lengths, tiles, call.table, *call.limits, *call.scoring)
    programs = tiles * call.samples
    run(differentiate_queries, (programs, q.shape[-2]), *inputs, dq, *where, **how)
    run(differentiate_keys, (programs, k.shape[-2]), *inputs, dk, dv, *where, **how)
    return dq, dk, dv
