"""Proofs about the linear layer beside its orders: shares of the plan, output shapes, and the error bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import cancel, draw_values
from isobit.library.linear.orders import DTYPES, prove_orders
from isobit.library.linear.shares import parts_of
from isobit.ops import dispatch
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FEATURE_CAP, FeaturePlan
from isobit.order.tree import Counter, Node, merge
from isobit.records import Proof

Pair = Any
EXTENTS = (512, 1024, 4096)
SIZES = range(9)
BOUNDED = (1, 64, 333, 512, 1024, 1032, 2048, 3072, 4096, 12288)


def pair(left: Pair, right: Pair) -> Pair:
    """An addition, as a term."""
    return (left, right)


def prove_cuts(subject: Callable[..., Any]) -> Proof:
    """However the segments are shared out, the shares' roots merge to the whole tree; and the kernel's bits agree."""
    cases = 0
    count = 1
    while count <= FEATURE_CAP:
        whole = merge(list(range(count)), pair)
        for shares in compositions(count):
            cases += 1
            if merge_shares(shares) != [whole]:
                return Proof(
                    "enumeration of the plan",
                    "",
                    cases,
                    f"{count} segments shared as {shares} merge otherwise",
                )
        count *= 2
    for extent in EXTENTS:
        for parts in (2, 4, 8, 16):
            if FeaturePlan(extent).count % parts == 0:
                cases += 1
                found, wanted = cut_and_whole(subject, extent, parts)
                if not torch.equal(found, wanted):
                    return Proof(
                        "enumeration of the plan",
                        "",
                        cases,
                        f"K = {extent} over {parts} ranks differs",
                    )
    covers = (
        f"every extent, since a plan has at most {FEATURE_CAP} segments: all ways to share them out in order; "
        f"the kernel itself at K = {list(EXTENTS)}"
    )
    return Proof("enumeration of the plan", covers, cases)


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut a run of segments into runs."""
    for marks in itertools.product((False, True), repeat=count - 1):
        sizes, size = [], 1
        for mark in marks:
            if mark:
                sizes.append(size)
                size = 0
            size += 1
        yield (*sizes, size)


def merge_shares(shares: Sequence[int]) -> list[Pair]:
    """Each share by itself, then their roots."""
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


def cut_and_whole(subject: Callable[..., Any], extent: int, ranks: int) -> tuple[Tensor, Tensor]:
    """A cancelling product, cut and uncut."""
    generator = torch.Generator().manual_seed(extent)
    x = cancel(draw_values((9, extent), "wide", generator), True)
    weight = cancel(draw_values((64, extent), "wide", generator), False)
    parts = parts_of(subject)
    return parts.cut_output(x, weight, ranks), parts.output(x, weight, None)


def prove_shapes(subject: Callable[..., Any]) -> Proof:
    """Every small shape, with data and without."""
    cases = 0
    for m, k, n in itertools.product(SIZES, SIZES, SIZES):
        for device in ("cpu", "meta"):
            cases += 1
            found = subject(torch.ones(m, k, device=device), torch.ones(n, k, device=device)).shape
            if tuple(found) != (m, n):
                failure = f"[{m}, {k}] by [{n}, {k}] gives {list(found)}"
                return Proof("enumeration of the real kernel", "", cases, failure)
    return Proof("enumeration of the real kernel", f"every M, K and N from 0 to {SIZES[-1]}", cases)


def longest_way(extent: int, dtype: torch.dtype) -> int:
    """Roundings that a product passes on its way to the result, at most."""
    return 1 + depth_of(expected_tree(FeaturePlan(extent).segments, dispatch.engine_of(dtype)))


def error_factor(extent: int, dtype: torch.dtype) -> float:
    """(1 + u)^d − 1, from above: the error of a sum in this order is at most this times the sum of magnitudes."""
    arb = load_arb()
    bound = (arb(1) + arb(2) ** -24) ** longest_way(extent, dtype) - 1
    return float(bound.abs_upper())


def prove_error_bound(subject: Callable[..., Any]) -> Proof:
    """The order is certified, so the bound of the order is the kernel's; it is evaluated in interval arithmetic."""
    shapes = [{"k": 1032, "n": 64, "m": m} for m in (1, 33)]
    order = prove_orders(subject, iter([("linear", dtype, shapes) for dtype in DTYPES]), "")
    if not order.kept:
        return Proof("interval bounds", "", order.cases, order.failure)
    worst = 0.0
    for dtype in DTYPES:
        for extent in BOUNDED:
            factor = error_factor(extent, dtype)
            if not 0 < factor < 1.001 * 2.0**-24 * longest_way(extent, dtype):
                return Proof("interval bounds", "", len(BOUNDED), f"K = {extent}: {factor}")
            worst = max(worst, factor)
    covers = (
        f"all inputs whose products and sums neither overflow nor underflow, K in {list(BOUNDED)}: the error before "
        f"the last rounding is at most ((1 + 2^-24)^d − 1)·Σ|x·w|, d the depth of the order; at most {worst:.3g}·Σ|x·w|"
    )
    return Proof("interval bounds over the certified order", covers, 2 * len(BOUNDED) + order.cases)
