"""Claims of linear-group-kernel-v1: outputs are isobit.linear's, and dX is one sum over all weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.foundation.records import Proof
from isobit.library import refused_calls
from isobit.library import stock as stock_functions
from isobit.library.certificates import Question, error_factor, feature_order, prove_orders
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    forward_and_gradients,
    put_among_random,
    refuses_each,
)
from isobit.library.linear.planted import input_grad_by
from isobit.ops import dispatch
from isobit.ops.linear import partial
from isobit.ops.linear.group import interleave, linear_group
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.reveal.targets.tensor_target import TensorTarget

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


# Order certificate of linear_group: dX over the rows of several weights.

SHAPES = ((128, 64, 64), (512, 256, 256))  # rows of three weights: queries, keys and values
REVEALED_GROUPS = ((1, torch.float32), (2, torch.float32), (4, torch.bfloat16))


def prove_order(subject: Grouped) -> Proof:
    """Certify that dX over the rows of three weights, group by group, has the order of one feature axis."""

    def questions() -> Iterator[Question]:
        for dims in SHAPES:
            for groups, dtype in REVEALED_GROUPS:
                target = functools.partial(group_target, subject.group, dims, groups, dtype=dtype)
                order = feature_order(sum(dims), dispatch.engine_of(dtype))
                what = f"{dims} in {groups} groups"
                yield Question(what, target, [{"m": m} for m in (1, 33)], order)

    covers = (
        f"dX over the rows of weights of {list(SHAPES)} in 1, 2 (fp32) and 4 (bf16) groups, at 1 and "
        "33 rows"
    )
    return prove_orders(questions(), covers)


def group_target(
    group: Group, dims: Sequence[int], groups: int, m: int, dtype: torch.dtype
) -> TensorTarget:
    """Return dX: terms are in the order of the axis, and are copied to the weights before each call."""
    total, width = sum(dims), 8
    axis = interleave([torch.arange(n) + sum(dims[:i]) for i, n in enumerate(dims)], 0, groups)
    terms = torch.zeros(width, total, dtype=dtype)
    weights = [torch.zeros(n, width, dtype=dtype) for n in dims]
    x = torch.zeros(m, width, dtype=dtype, requires_grad=True)
    grads = [torch.ones(m, n, dtype=dtype) for n in dims]
    with torch.enable_grad():
        outputs = group(x, weights, None, groups=groups)

    def run() -> Tensor:
        dealt = torch.empty_like(terms.t())
        dealt[axis] = terms.t()
        for i, weight in enumerate(weights):
            weight.data.copy_(dealt[sum(dims[:i]) : sum(dims[: i + 1])])
        return torch.autograd.grad(outputs, x, grads, retain_graph=True)[0]

    name = f"dX of {dims} in {groups} groups"
    return TensorTarget(name, terms, lambda: run()[-1], everywhere=run)


# Planted wrong groups of linear layers.


def _apart(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, samples: Any = None
) -> Any:
    """Call separate linear layers: autograd adds their dX."""
    pairs = zip(weights, biases or [None] * 3, strict=False)
    return tuple(linear(x, w, b, samples=samples) for w, b in pairs)


def _ungrouped(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, **named: Any
) -> Any:
    """Sum weight after weight, without groups."""
    return linear_group(x, weights, biases, **named)


def _turned(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Sum the weights from the last to the first."""
    return linear_group(x, weights[::-1], None if biases is None else biases[::-1], **named)[::-1]


def _without_bias(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Leave out the last bias and its gradient."""
    *others, last = linear_group(x, weights, biases, **named)
    return *others, last - (0 if biases is None else biases[-1])


def _without_samples(
    x: Tensor, weights: Any, biases: Any = None, *, samples: Any = None, **named: Any
) -> Any:
    """Count padding as tokens."""
    return linear_group(x, weights, biases, **named)


def _by_rows(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Call separate linear layers for few rows."""
    return (_apart if len(x) < 8 else linear_group)(x, weights, biases, **named)


def _blunt(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Make weights too large by 2^-8."""
    larger = [(w.float() * (1 + 2.0**-8)).to(w.dtype) for w in weights]
    return linear_group(x, larger, biases, **named)


stock = Grouped(stock_functions.linear_group)
apart, ungrouped, turned = Grouped(_apart), Grouped(_ungrouped), Grouped(_turned)
without_bias, without_samples = Grouped(_without_bias), Grouped(_without_samples)
by_rows, blunt = Grouped(_by_rows), Grouped(_blunt)
