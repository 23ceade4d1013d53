"""Holds the loaded kernels against the order: their revealed trees, and their bits on hard values."""

from __future__ import annotations

import torch

from isobit import native
from isobit.order.evaluate import ENGINES, evaluate, expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.reveal import reveal
from isobit.order.tree import Tree, digest
from isobit.records import Attestation

BIG = 2.0**100

# 1 and 5 take the paths for few rows, 33 leaves a tail in the tile engine, 130 a second tile.
ROW_COUNTS = (1, 5, 33, 130)
# Two segments of one leaf; 1025 is one segment of three folded leaves, the last of a single element.
EXTENTS = (512, 1025)


def attest_kernels() -> tuple[Attestation, ...]:
    """One attestation per dtype that has native kernels."""
    return tuple(
        attest_dtype(dtype, "amx" if dtype == torch.bfloat16 and native.pairs_bf16() else "chain")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def attest_dtype(dtype: torch.dtype, engine: str) -> Attestation:
    """Reveals the tree at several row counts, then compares values with the exact evaluator."""
    name, checks = str(dtype).removeprefix("torch."), 0
    extent = EXTENTS[0]
    expected = digest(expected_tree(FeaturePlan(extent).segments, engine))
    if dtype != torch.float16:  # fp16 cannot hold the probe's 2^100; it runs as fp32, which is probed
        for rows in ROW_COUNTS:
            found = digest(reveal_forward(dtype, rows, extent))
            checks += 1
            if found != expected:
                detail = f"{rows} rows: tree {found[:8]}, expected {expected[:8]}"
                return Attestation(name, engine, False, checks, detail)
    for extent in EXTENTS:
        checks += 1
        if not values_agree(dtype, engine, extent):
            detail = f"values at extent {extent} differ from the exact evaluator"
            return Attestation(name, engine, False, checks, detail)
    return Attestation(name, engine, True, checks, f"tree {expected[:8]}")


def reveal_forward(dtype: torch.dtype, rows: int, extent: int) -> Tree:
    """The tree by which y sums over K, seen in the last of `rows` rows; one call probes one i against all j."""

    def probe(i: int) -> list[int]:
        weight = torch.ones(extent, extent)
        weight[:, i] = BIG
        weight.fill_diagonal_(-BIG)
        weight[i] = 1.0
        x = torch.ones(rows, extent, dtype=dtype)
        total = torch.ops.isobit.linear_roots(x, weight.to(dtype), extent, 0)[0, -1]
        sizes: list[int] = (extent - total).long().tolist()
        return sizes

    return reveal(probe, extent)


def values_agree(dtype: torch.dtype, engine: str, extent: int) -> bool:
    """Two rows by one column of full mantissas and wide exponents, bit for bit."""
    generator = torch.Generator().manual_seed(extent)
    x, weight = (wide_values((n, extent), dtype, generator) for n in (2, 1))
    got = torch.ops.isobit.linear_roots(x, weight, extent, 0)[0, :, 0]
    segments = FeaturePlan(extent).segments
    column = weight[0].double().tolist()
    want = [evaluate(segments, list(zip(row, column, strict=True)), ENGINES[engine]) for row in x.double().tolist()]
    return torch.equal(got, torch.tensor(want, dtype=torch.float32))


def wide_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random signs and full mantissas, exponents from 2^-6 to 2^6."""
    exponent = torch.randint(-6, 7, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponent).to(dtype)
