"""The Triton executor of the delta rule: forward with a carried state, and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from isobit.ops.delta_rule.portable import CHUNK, sizes_of
from isobit.ops.delta_rule.triton_backward import (
    add_heads,
    pull_chunks,
    pull_features,
    relate_gradients,
)
from isobit.ops.delta_rule.triton_chunks import advance_chunks, relate_rows
from isobit.ops.device_tables import copied, kept
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import one_nan

BLOCK = 16  # columns of the values, or features of keys, that a program has
WARPS = 8  # of kernels with tiles of 64 rows by 64 rows
ELEMENTS = 512


@dataclass(frozen=True)
class Chunks:
    """The chunks of a call, in the order of the samples; see [Note: the delta rule on a GPU].

    Attributes:
        table: int64 [chunks, 5].
        bounds: int64 [samples + 1].
    """

    table: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, v: Tensor, spans: Tensor | None, counts: Sequence[int] | None) -> Chunks:
        """Return those of v [..., T, H, Dv]; counts are the tokens of each sample that its state has."""
        samples = whole_samples(v.select(-2, 0), spans).spans
        if counts is not None:  # which are others at every call
            return cls.cut(samples, v.device, counts)
        return kept((cls, samples), v.device, lambda: cls.cut(samples, v.device, None))

    @classmethod
    def cut(
        cls,
        samples: tuple[tuple[int, int], ...],
        device: torch.device,
        counts: Sequence[int] | None,
    ) -> Chunks:
        """Return the chunks of samples, (first row, number of rows) each."""
        rows: list[tuple[int, ...]] = []
        bounds = [0]
        for index, (start, length) in enumerate(samples):
            known = 0 if counts is None else counts[index] % CHUNK
            end = start + length
            if counts is not None and not length:  # its open chunk is written again
                rows.append((start, known, known, index, 0))
            while start < end:
                count = min(CHUNK - known, end - start)
                rows.append((start, known, known + count, index, int(start + count < end)))
                start, known = start + count, 0
            bounds.append(len(rows))
        return cls(copied(rows, (-1, 5), device), copied(bounds, (-1,), device))

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.table)


@dataclass(frozen=True)
class Related:
    """What the rows of each chunk are to each other."""

    decay: Tensor
    rest: Tensor
    pairs: Tensor


def constants_of(q: Tensor, v: Tensor, packed: int = 0) -> dict[str, Any]:
    """Return the sizes of heads, as constants of kernels."""
    sizes = sizes_of(q, v)
    found = {"KEY_HEADS": sizes.key_heads, "H": sizes.heads, "DK": sizes.key_size}
    return {**found, "DV": sizes.value_size, "PACKED": packed}


def relate(
    given: tuple[Tensor, ...], state: Tensor, chunks: Chunks, constants: dict[str, Any]
) -> Related:
    """Return decays and products of the rows of all chunks."""
    q, k, _, g, _ = given
    shape = (len(chunks), constants["H"])
    found = Related(
        *(
            torch.empty(*shape, *size, dtype=torch.float32, device=q.device)
            for size in ((CHUNK,), (CHUNK,), (3, CHUNK, CHUNK))
        )
    )
    out = found.decay, found.rest, found.pairs
    run(relate_rows, shape, q, k, g, state, chunks.table, *out, warps=WARPS, **constants)
    return found


def advance(
    given: tuple[Tensor, ...],
    state: Tensor,
    chunks: Chunks,
    related: Related,
    out: tuple[Tensor, Tensor, Tensor],
    constants: dict[str, Any],
    *,
    keep: bool,
) -> None:
    """Go through the chunks of all samples; `out` are after, o and kept of `advance_chunks`."""
    samples, v = len(chunks.bounds) - 1, given[2]
    run(
        advance_chunks,
        (samples, constants["H"], triton.cdiv(constants["DV"], BLOCK)),
        *given,
        state,
        chunks.table,
        chunks.bounds,
        related.decay,
        related.rest,
        related.pairs,
        *out,
        v.shape[:-2].numel(),
        warps=4,
        KEEP=keep,
        WIDE=triton.next_power_of_2(constants["DK"]),
        BLOCK=BLOCK,
        **constants,
    )


@triton_operator("delta_rule")
def triton_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Tensor | None,
    state: Tensor | None,
    counts: list[int],
) -> tuple[Tensor, Tensor]:
    """Return o and the state that is left. A state that would grow is an error when the device is synchronized."""
    if g.is_cuda:
        torch._assert_async(~(g > 0).any())
    given = tuple(t.contiguous() for t in (q, k, v, g.float(), beta))
    sizes = sizes_of(q, v)
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    chunks = Chunks.of(v, spans, None if state is None else counts)
    constants = constants_of(q, v, 0 if state is None else sizes.packed)
    if state is None:
        shape = (len(chunks.bounds) - 1, sizes.heads * sizes.key_size * sizes.value_size)
        after = torch.zeros(shape, dtype=torch.float32, device=v.device)
        before = after
    else:
        before = state.contiguous()
        after = one_nan(before).contiguous()
    related = relate(given, before, chunks, constants)
    advance(given, before, chunks, related, (after, o, after), constants, keep=False)
    return o, after if state is not None else after.new_empty(0, sizes.packed)


@triton_operator("delta_rule_backward")
def triton_delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and beta."""
    given = tuple(t.contiguous() for t in (q, k, v, g.float(), beta))
    q_in, k_in, v_in, _, rates = given
    upstream, chunks = grad.contiguous(), Chunks.of(v, spans, None)
    constants, tokens = constants_of(q, v), v.shape[:-2].numel()
    heads, key_size, value_size = (constants[name] for name in ("H", "DK", "DV"))

    def memory(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=v.device)

    states, laters = (memory(len(chunks), heads, key_size, value_size) for _ in range(2))
    kept, by = memory(5, tokens, heads, value_size), memory(len(chunks), heads, 2, CHUNK, CHUNK)
    related = relate(given, states, chunks, constants)
    advance(given, states, chunks, related, (states, kept, kept), constants, keep=True)
    del constants["PACKED"]
    # Rows of no sample have no gradient.
    made = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, g, beta)]
    decays = related.decay, related.rest
    wide = triton.next_power_of_2(key_size)
    run(
        pull_chunks,
        (len(chunks.bounds) - 1, heads, triton.cdiv(value_size, BLOCK)),
        *(upstream, q_in, k_in, rates, chunks.table, chunks.bounds, *decays, related.pairs),
        *(laters, kept, made[2], tokens),
        warps=4,
        WIDE=wide,
        BLOCK=BLOCK,
        **constants,
    )
    apart = {name: value for name, value in constants.items() if name != "KEY_HEADS"}
    run(
        relate_gradients,
        (len(chunks), heads),
        *(upstream, v_in, rates, chunks.table, *decays, related.pairs, states, laters, kept),
        *(by, made[3], made[4], tokens),
        warps=WARPS,
        WIDE=wide,
        **apart,
    )
    of_heads = memory(2, tokens, heads, key_size)
    run(
        pull_features,
        (len(chunks), heads, triton.cdiv(key_size, BLOCK)),
        *(upstream, q_in, k_in, rates, chunks.table, *decays, states, laters, kept, by),
        *(of_heads[0], of_heads[1], tokens),
        warps=4,
        BLOCK=BLOCK,
        **constants,
    )
    for per_head, out in zip(of_heads, made[:2], strict=True):
        repeats, size = heads // constants["KEY_HEADS"], out.numel()
        grid = (triton.cdiv(size, ELEMENTS),)
        how = {"REPEATS": repeats, "DK": key_size, "BLOCK": ELEMENTS}
        run(add_heads, grid, per_head, out, size, warps=4, **how)
    return made[0], made[1], made[2], made[3], made[4]
