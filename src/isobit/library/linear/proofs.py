"""Proofs about the linear layer besides its orders: shares of the plan, output shapes, and the error bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from isobit.contracts.judge.recipes import cancel, draw_values
from isobit.foundation.records import Proof
from isobit.library import bounds
from isobit.library.bounds import error_factor, sum_depth
from isobit.library.linear.implementations import layer_of
from isobit.library.linear.orders import DTYPES, prove, question
from isobit.library.subjects import Subject
from isobit.order.plan import FEATURE_CAP, FeaturePlan
from isobit.order.tree import Counter, Node, merge

Pair = Any
EXTENTS = (512, 1024, 4096)
SIZES = range(9)
BOUNDED = (1, 64, 333, 512, 1024, 1032, 2048, 3072, 4096, 12288)


def pair(left: Pair, right: Pair) -> Pair:
    """Return an addition as a term."""
    return (left, right)


def prove_cuts(subject: Subject) -> Proof:
    """Enumerate the ways to share segments out: the shares' roots merge to the whole tree; kernels agree."""
    engine, cases, count = "enumeration of the plan", 0, 1
    while count <= FEATURE_CAP:
        whole = merge(list(range(count)), pair)
        for shares in compositions(count):
            cases += 1
            if merge_shares(shares) != [whole]:
                failure = f"{count} segments shared as {shares} merge to another tree"
                return Proof(engine, "", cases, failure)
        count *= 2
    for extent, parts in itertools.product(EXTENTS, (2, 4, 8)):
        if FeaturePlan(extent).count % parts == 0:
            cases += 1
            if not cut_is_whole(subject, extent, parts):
                return Proof(engine, "", cases, f"K = {extent} over {parts} ranks differs")
    covers = (
        f"every extent, since a plan has at most {FEATURE_CAP} segments: all ways to share them out "
        f"in order; the kernel itself at K = {list(EXTENTS)}"
    )
    return Proof(engine, covers, cases)


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut a run of segments into runs."""
    for marks in itertools.product((False, True), repeat=count - 1):
        sizes, size = [], 1
        for mark in marks:
            if mark:
                sizes.append(size)
                size = 0
            size += 1
        yield (*sizes, size)


def merge_shares(shares: Sequence[int]) -> list[Pair]:
    """Merge each share by itself, then their roots."""
    total: Counter[Pair] = Counter(pair)
    at = 0
    for size in shares:
        share: Counter[Pair] = Counter(pair)
        for segment in range(at, at + size):
            share.push(Node(0, segment), segment)
        for node, value in share:
            total.push(node, value)
        at += size
    return [value for _, value in total]


def cut_is_whole(subject: Subject, extent: int, ranks: int) -> bool:
    """Compare a product whose terms cancel, cut over ranks and uncut."""
    generator = torch.Generator().manual_seed(extent)
    x = cancel(draw_values((9, extent), "wide", generator), True)
    weight = cancel(draw_values((64, extent), "wide", generator), False)
    layer = layer_of(subject)
    return torch.equal(layer.cut_output(x, weight, ranks), layer.output(x, weight, None))


def prove_shapes(subject: Subject) -> Proof:
    """Enumerate every small shape, with data and on the meta device."""
    engine, cases = "enumeration of the real kernel", 0
    for m, k, n in itertools.product(SIZES, SIZES, SIZES):
        for device in ("cpu", "meta"):
            cases += 1
            found = subject(torch.ones(m, k, device=device), torch.ones(n, k, device=device)).shape
            if tuple(found) != (m, n):
                return Proof(engine, "", cases, f"[{m}, {k}] by [{n}, {k}] gives {list(found)}")
    return Proof(engine, f"every M, K and N from 0 to {SIZES[-1]}", cases)


def prove_error_bound(subject: Subject) -> Proof:
    """Bound the error in interval arithmetic: the order is certified, so its bound is the kernel's."""
    shapes = [{"k": 1032, "n": 64, "m": m} for m in (1, 33)]
    order = prove((question(subject, "linear", dtype, shapes) for dtype in DTYPES), "")
    if not order.kept:
        return Proof(bounds.ENGINE, "", order.cases, order.failure)
    worst = 0.0
    for dtype, extent in itertools.product(DTYPES, BOUNDED):
        factor = error_factor(extent, dtype)
        if not 0 < factor < 1.001 * bounds.U * sum_depth(extent, dtype):
            return Proof(bounds.ENGINE, "", len(BOUNDED), f"K = {extent}: {factor}")
        worst = max(worst, factor)
    covers = (
        f"all inputs whose products and sums neither overflow nor underflow, K in {list(BOUNDED)}: "
        "the error before the last rounding is at most ((1 + 2^-24)^d − 1)·Σ|x·w|, d the depth of "
        f"the order; at most {worst:.3g}·Σ|x·w|"
    )
    return Proof(bounds.ENGINE, covers, 2 * len(BOUNDED) + order.cases)
