"""Claims of linear-group-kernel-v1: outputs are isobit.linear's, and dX is one sum over all weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.library import refused_calls
from isobit.library.bounds import error_factor
from isobit.library.gradients import forward_and_gradients
from isobit.library.linear.implementations import input_grad_by
from isobit.library.placements import SAMPLE_LENGTHS, put_among_random
from isobit.library.subjects import refuses_each
from isobit.ops.linear import partial
from isobit.ops.linear.group import interleave, linear_group
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

Group = Callable[..., tuple[Tensor, ...]]

GROUPS = (1, 2, 4)


@dataclass(frozen=True)
class Grouped:
    """A group as contracts draw it: one weight [4n, k]; queries have half, keys and values a quarter each."""

    group: Group

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the outputs of all three weights side by side."""
        return torch.cat(self.group(x, thirds(weight), thirds(bias), groups=2), -1)


def thirds(rows: Tensor) -> list[Tensor]:
    """Split the rows into queries, keys and values."""
    quarter = len(rows) // 4
    return [rows[: 2 * quarter], rows[2 * quarter : 3 * quarter], rows[3 * quarter :]]


def drawn(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return (x, weights, biases, upstream gradients)."""
    x, weight, bias = case.arguments.values()
    grads = [case.draw((len(x), len(w)), 60 + i, "wide") for i, w in enumerate(thirds(weight))]
    return x, thirds(weight), thirds(bias), grads


def all_grads(
    group: Group,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    grads: Sequence[Tensor],
    **named: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of x, of each weight and of each bias."""
    count = len(weights)

    def call(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return group(x, parameters[:count], parameters[count:], **named)

    outputs, found = forward_and_gradients(call, (x, *weights, *biases), grads)
    return [y.detach() for y in outputs], list(found)


def is_linear(subject: Grouped, case: Case, tally: Tally) -> None:
    """Each output, dW and db are isobit.linear's; dX is isobit.linear's over the interleaved weights."""
    x, weights, biases, grads = drawn(case)
    tally.count(case.rows)
    for groups in GROUPS:
        outputs, found = all_grads(subject.group, x, weights, biases, grads, groups=groups)
        for at, (weight, bias, grad) in enumerate(zip(weights, biases, grads, strict=True)):
            alone, own = all_grads(one_of(linear), x, [weight], [bias], [grad])
            tally.same(outputs[at], alone[0], f"output {at} of {groups} groups")
            tally.same(found[1 + at], own[1], f"dW {at} of {groups} groups")
            tally.same(found[1 + len(weights) + at], own[2], f"db {at} of {groups} groups")
        joined = interleave(grads, -1, groups), interleave(weights, 0, groups)
        tally.same(found[0], input_grad_by(linear, *joined), f"dX of {groups} groups")


def one_of(function: Callable[..., Tensor]) -> Group:
    """Return a linear layer as a group of one."""
    return lambda x, weights, biases, **named: (function(x, weights[0], biases[0], **named),)


def rows_of_dx(subject: Grouped, case: Case, tally: Tally) -> None:
    """A row of dX depends on that row of the gradients alone, for any batch, storage and threads."""
    x, weights, biases, grads = drawn(case)
    tally.count(case.rows)

    def dx(rows: Any, store: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
        given = store(x[rows]), [store(w) for w in weights], biases, [store(g[rows]) for g in grads]
        return all_grads(subject.group, *given, groups=2)[1][0]

    whole = dx(slice(None))
    for size in (1, 3, 65):
        tally.same(dx(slice(size)), whole[:size], f"the first {size} rows by themselves")
    order = torch.randperm(len(x), generator=case.generator(31))
    tally.same(dx(order), whole[order], "rows shuffled")
    for name, store in LAYOUTS.items():
        tally.same(dx(slice(None), store), whole, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            tally.same(dx(slice(None)), whole, f"{threads} threads")


def ranks(subject: Grouped, case: Case, tally: Tally) -> None:
    """Ranks that hold whole groups sum whole segments: their shares of dX merge to the uncut bits."""
    x, weights, biases, grads = drawn(case)
    tally.count(case.rows)
    extent = sum(map(len, weights))
    for count in (2, 4):
        if FeaturePlan(extent).count % count:
            continue
        whole = all_grads(subject.group, x, weights, biases, grads, groups=4)[1][0]
        shares = []
        for rank in range(count):
            held = [w.chunk(count, 0)[rank] for w in weights]
            own = [g.chunk(count, -1)[rank] for g in grads]
            cut = Cut(extent, count, rank)
            shares.append(partial.group_input_grad(own, held, 4 // count, cut))
        tally.same(partial.merge(shares, dtype=case.dtype), whole, f"dX over {count} ranks")
        outputs = subject.group(x, weights, biases, groups=4)
        for rank in range(count):
            parameters = ([t.chunk(count, 0)[rank] for t in ts] for ts in (weights, biases))
            part = subject.group(x, *parameters, groups=4 // count)
            for left, right in zip(part, outputs, strict=True):
                tally.same(left, right.chunk(count, -1)[rank], f"outputs of rank {rank} of {count}")


def samples(subject: Grouped, case: Case, tally: Tally) -> None:
    """The gradients dW and db are one sum over the samples, packed or padded."""
    _, weight, bias = case.arguments.values()
    weights, biases, count = thirds(weight), thirds(bias), sum(SAMPLE_LENGTHS)
    x = case.draw((count, case.sizes["k"]), 70, "wide")
    grads = [case.draw((count, len(w)), 71 + i, "wide") for i, w in enumerate(weights)]
    tally.count(count)

    def parameters(x: Tensor, grads: list[Tensor], described: Samples) -> list[Tensor]:
        return all_grads(subject.group, x, weights, biases, grads, samples=described)[1][1:]

    whole = parameters(x, grads, Samples.packed(SAMPLE_LENGTHS))
    for side in ("left", "right"):
        padded = Samples.padded(SAMPLE_LENGTHS, width=520, side=side)
        placed = [put_among_random(case, t, padded, 80 + i) for i, t in enumerate((x, *grads))]
        found = parameters(placed[0], placed[1:], padded)
        for at, (left, right) in enumerate(zip(found, whole, strict=True)):
            tally.same(left, right, f"parameter {at}, padded {side}")


def error_bound(subject: Grouped, case: Case, tally: Tally) -> None:
    """The error of dX against fp64 is within the bound of one sum over all weights."""
    x, weights, biases, grads = drawn(case)
    tally.count(case.rows)
    weight, grad = torch.cat(weights).double(), torch.cat(grads, -1).double()
    exact, size = grad @ weight, grad.abs() @ weight.abs()
    last = torch.finfo(case.dtype).eps / 2
    allowed = error_factor(len(weight), case.dtype) * size * (1 + last) + last * exact.abs()
    found = all_grads(subject.group, x, weights, biases, grads, groups=2)[1][0]
    error = (found.double() - exact).abs()
    tally.true(error <= allowed + 2.0**-100, "dX over the bound of the order", error / allowed)


def refuses(subject: Grouped, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    refuses_each(subject.group, refused_calls.linear_group(), tally)


ours = Grouped(linear_group)
