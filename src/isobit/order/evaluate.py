"""A slow evaluator of the order of addition in plain Python: every executor must return the same bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from isobit.order.addition import Branch, chain
from isobit.order.engines import TENSOR_CORES, add_fused, tensor_core
from isobit.order.exact_sum import round_fp32
from isobit.order.plan import LANES, FeaturePlan, Segment
from isobit.order.tree import merge

SMALLEST_NORMAL = 2.0**-126
AMX_BLOCK = 32

# An engine adds a run of products: (accumulator so far or None, factors) -> accumulator.
Engine = Callable[["float | None", Sequence[tuple[float, float]]], float]


def fma_fp32(a: float, b: float, c: float) -> float:
    """Return a*b + c rounded once to fp32, for fp32 values."""
    product = a * b  # exact: fp64 holds every product of two fp32 values
    total = product + c
    if not math.isfinite(total):
        return total
    # Round the fp64 sum to odd, so that the rounding to fp32 takes account of what was dropped.
    there = total - product
    dropped = (product - (total - there)) + (c - there)
    if dropped and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.copysign(math.inf, dropped))
    return round_fp32(total)


def add_fp32(a: float, b: float) -> float:
    """Return a + b rounded to fp32; the fp64 sum of fp32 values has enough digits for that."""
    return round_fp32(a + b)


def flush(value: float) -> float:
    """Replace a subnormal by zero with its sign."""
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def chain_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """Add as fp32 kernels on every CPU: an ascending chain of fused multiply-adds from +0, then the accumulator."""
    total = 0.0
    for a, b in factors:
        total = fma_fp32(a, b, total)
    return total if before is None else add_fp32(before, total)


def amx_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """Add as bf16 on AMX: an even and an odd chain per 32 products, their sum to the accumulator; no subnormals."""
    total = 0.0 if before is None else before
    if not factors:
        return total if before is None else add_fp32(total, 0.0)
    for at in range(0, len(factors), AMX_BLOCK):
        halves = [0.0, 0.0]
        for i, (a, b) in enumerate(factors[at : at + AMX_BLOCK]):
            halves[i % 2] = flush(fma_fp32(flush(a), flush(b), halves[i % 2]))
        total = flush(add_fp32(flush(total), flush(add_fp32(*halves))))
    return total


def striped_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """Add a plain sum, whose second factors are ones: 16 interleaved ascending chains, merged by the tree."""
    lanes = [0.0] * LANES
    for i, (value, _) in enumerate(factors):
        lanes[i % LANES] = add_fp32(lanes[i % LANES], value)
    total = merge(lanes, add_fp32)
    return total if before is None else add_fp32(before, total)


def by_leaf(engine: Engine) -> Engine:
    """Return an engine whose runs start from zero, and are added to the accumulator when they are finished."""

    def add(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
        total = engine(None, factors)
        return total if before is None else add_fp32(before, total)

    return add


ENGINES: dict[str, Engine] = {
    "chain": chain_engine,
    "amx": amx_engine,
    "striped": striped_engine,
    # Of bf16 operands; engines.tensor_core(name, "f16") is the one of f16, whose subnormals have another exponent.
    "tc24x8": by_leaf(tensor_core("tc24x8")),
    "tc25x16": by_leaf(tensor_core("tc25x16")),
    "cdna3": by_leaf(tensor_core("cdna3")),
}


def feature_segments(extent: int, engine: str) -> tuple[Segment, ...]:
    """Return the segments of a feature axis for an engine.

    A chain of multiply-adds is cut into leaves, because a finished leaf is added to the accumulator at no cost, and the
    error of a short chain is smaller. AMX continues from the accumulator, so leaves do not change its bits. A tensor
    core would need a second tile for a finished leaf; its segments are one chain.
    """
    plan = FeaturePlan(extent)
    return plan.products if engine in ("chain", "amx") else plan.segments


def evaluate_segment(
    segment: Segment, factors: Sequence[tuple[float, float]], engine: Engine
) -> float:
    """Return the sum of one segment: its leaves from left to right."""
    total: float | None = None
    for leaf in segment:
        run = factors[leaf.start : leaf.start + leaf.length]
        total = engine(total if leaf.fold else None, run)
    return 0.0 if total is None else total


def evaluate(
    segments: Sequence[Segment], factors: Sequence[tuple[float, float]], engine: Engine
) -> float:
    """Return a whole sum of products in fp32, before bias and rounding."""
    return merge([evaluate_segment(s, factors, engine) for s in segments], add_fp32)


def leaf_tree(engine: str, indices: Sequence[int]) -> list[Branch]:
    """Return what an engine adds to its accumulator for one run, in order."""
    if engine == "chain":
        return [chain(indices)]
    if engine == "striped":
        filled = min(LANES, len(indices))
        lanes: list[Branch | None] = [chain(indices[lane::LANES]) for lane in range(filled)]
        lanes += [None] * (LANES - filled)  # +0.0, which no probe can see
        total = merge(lanes, lambda a, b: b if a is None else a if b is None else (a, b))
        return [] if total is None else [total]
    if engine in TENSOR_CORES:
        fused = add_fused(engine, None, indices)
        return [] if fused is None else [fused]
    blocks = [indices[at : at + AMX_BLOCK] for at in range(0, len(indices), AMX_BLOCK)]
    return [
        (chain(block[0::2]), chain(block[1::2])) if len(block) > 1 else block[0] for block in blocks
    ]


def expected_tree(segments: Sequence[Segment], engine: str) -> Branch:
    """Return the tree of additions that probing a kernel must reveal."""
    sums: list[Branch] = []
    for segment in segments:
        terms = [
            term
            for leaf in segment
            if leaf.length
            for term in leaf_tree(engine, range(leaf.start, leaf.start + leaf.length))
        ]
        sums.append(chain(terms))
    return merge(sums, lambda a, b: (a, b))
