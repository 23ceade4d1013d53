"""What linear-group-kernel-v1 claims: outputs are isobit.linear's, and dX is one sum over all weights by groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.library.linear.claims import SAMPLE_LENGTHS, spread
from isobit.library.linear.orders import with_threads
from isobit.library.linear.proofs import error_factor
from isobit.library.logprob.claims import Call, refuses_each
from isobit.machine import thread_count
from isobit.ops import dispatch
from isobit.ops.linear import partial
from isobit.ops.linear.group import interleave, linear_group
from isobit.ops.linear.op import linear
from isobit.order.addition import digest
from isobit.order.cut import Cut
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.records import Proof
from isobit.reveal.certificate import certify
from isobit.reveal.targets.tensor_target import TensorTarget

Group = Callable[..., tuple[Tensor, ...]]

GROUPS = (1, 2, 4)
SHAPES = ((128, 64, 64), (512, 256, 256))  # rows of three weights, as of queries, keys and values


@dataclass(frozen=True)
class Grouped:
    """A group as contracts draw it: one weight [4n, k], of which queries have half, keys and values a quarter each."""

    group: Group

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat(self.group(x, thirds(weight), thirds(bias), groups=2), -1)


def thirds(rows: Tensor) -> list[Tensor]:
    """Queries, keys, values."""
    quarter = len(rows) // 4
    return [rows[: 2 * quarter], rows[2 * quarter : 3 * quarter], rows[3 * quarter :]]


def drawn(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """(x, weights, biases, upstream gradients)."""
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
    """(outputs, gradients of x, of each weight, of each bias)."""
    leaves = [t.detach().requires_grad_() for t in (x, *weights, *biases)]
    count = len(weights)
    with torch.enable_grad():
        outputs = group(leaves[0], leaves[1 : 1 + count], leaves[1 + count :], **named)
        found = torch.autograd.grad(outputs, leaves, grads)
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
        joined = interleave(weights, 0, groups), interleave(grads, -1, groups)
        tally.same(found[0], input_grad(*joined), f"dX of {groups} groups")


def input_grad(weight: Tensor, grad: Tensor) -> Tensor:
    """isobit.linear's."""
    x = weight.new_zeros(len(grad), weight.shape[1]).requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(linear(x, weight), x, grad)[0]


def one_of(function: Callable[..., Tensor]) -> Group:
    """A linear layer as a group of one."""
    return lambda x, weights, biases, **named: (function(x, weights[0], biases[0], **named),)


def rows_of_dx(subject: Grouped, case: Case, tally: Tally) -> None:
    """A row of dX depends on that row of the gradients alone: batch, position, storage, threads."""
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
            held = (
                [w.chunk(count, 0)[rank] for w in weights],
                [g.chunk(count, -1)[rank] for g in grads],
            )
            shares.append(
                partial.group_input_grad(held[1], held[0], 4 // count, Cut(extent, count, rank))
            )
        tally.same(partial.merge(shares, dtype=case.dtype), whole, f"dX over {count} ranks")
        for rank in range(count):
            own = (
                [w.chunk(count, 0)[rank] for w in weights],
                [b.chunk(count, 0)[rank] for b in biases],
            )
            part = subject.group(x, *own, groups=4 // count)
            for left, right in zip(part, subject.group(x, weights, biases, groups=4), strict=True):
                tally.same(left, right.chunk(count, -1)[rank], f"outputs of rank {rank} of {count}")


def samples(subject: Grouped, case: Case, tally: Tally) -> None:
    """dW and db are one sum over the samples, packed or padded."""
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
        placed = [spread(case, t, padded, 80 + i) for i, t in enumerate((x, *grads))]
        for at, (left, right) in enumerate(
            zip(parameters(placed[0], placed[1:], padded), whole, strict=True)
        ):
            tally.same(left, right, f"parameter {at}, padded {side}")


def error_bound(subject: Grouped, case: Case, tally: Tally) -> None:
    """dX against fp64 is within the bound of one sum over all weights."""
    x, weights, biases, grads = drawn(case)
    tally.count(case.rows)
    weight, grad = torch.cat(weights).double(), torch.cat(grads, -1).double()
    exact, size = grad @ weight, grad.abs() @ weight.abs()
    last = torch.finfo(case.dtype).eps / 2
    allowed = error_factor(len(weight), case.dtype) * size * (1 + last) + last * exact.abs()
    error = (
        all_grads(subject.group, x, weights, biases, grads, groups=2)[1][0].double() - exact
    ).abs()
    tally.true(error <= allowed + 2.0**-100, "dX over the bound of the order", error / allowed)


def prove_order(subject: Grouped) -> Proof:
    """dX over the rows of three weights, group by group, is the order of one feature axis; probed through autograd."""
    count = 0
    for dims in SHAPES:
        for groups, dtype in ((1, torch.float32), (2, torch.float32), (4, torch.bfloat16)):

            def make(
                m: int, threads: int, dims: Any = dims, groups: int = groups, dtype: Any = dtype
            ) -> TensorTarget:
                return with_threads(group_target(subject.group, dims, groups, m, dtype), threads)

            found = certify(make, [{"m": m, "threads": 1} for m in (1, 33)])
            count += found.count
            segments = FeaturePlan(sum(dims)).segments
            if not found.matches(digest(expected_tree(segments, dispatch.engine_of(dtype)))):
                return Proof("order certificate", "", count, f"{dims} in {groups} groups: {found}")
    covers = f"dX over the rows of weights of {list(SHAPES)} in 1, 2 (fp32) and 4 (bf16) groups, at 1 and 33 rows"
    return Proof("order certificate", covers, count)


def group_target(
    group: Group, dims: Sequence[int], groups: int, m: int, dtype: torch.dtype
) -> TensorTarget:
    """dX: terms stand in the order of the axis, and are dealt out to the weights before a call."""
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

    return TensorTarget(
        f"dX of {dims} in {groups} groups", terms, lambda: run()[-1], everywhere=run
    )


def refuses(subject: Grouped, case: Case, tally: Tally) -> None:
    """Each call is refused with a remedy."""
    refuses_each(subject.group, refused_calls(), tally)


def refused_calls() -> Iterator[Call]:
    """Calls that no group takes."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    yield "no weights", (x, []), {}
    yield "fewer biases than weights", (x, [weight, weight], [None]), {}
    yield "groups that do not divide the rows", (x, [weight]), {"groups": 3}
    yield "no groups", (x, [weight]), {"groups": 0}
    yield "a weight of another width", (x, [weight, torch.ones(4, 5)]), {}
    yield "a bias of another size", (x, [weight], [torch.ones(3)]), {}
    yield "two dtypes", (x, [weight, weight.bfloat16()]), {}
    yield "samples that do not describe the rows", (x, [weight]), {"samples": Samples.packed([3])}


# ---- planted --------------------------------------------------------------------------------------------


def _apart(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, samples: Samples | None = None
) -> Any:
    """Linears of their own: autograd adds their dX."""
    return tuple(
        linear(x, w, b, samples=samples)
        for w, b in zip(weights, biases or [None] * 3, strict=False)
    )


def _ungrouped(
    x: Tensor, weights: Any, biases: Any = None, *, groups: int = 1, **named: Any
) -> Any:
    """One sum, weight after weight."""
    return linear_group(x, weights, biases, **named)


def _turned(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Weights from the last to the first."""
    return linear_group(x, weights[::-1], None if biases is None else biases[::-1], **named)[::-1]


def _without_bias(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """The last bias is forgotten, and its gradient with it."""
    *others, last = linear_group(x, weights, biases, **named)
    return *others, last - (0 if biases is None else biases[-1])


def _without_samples(
    x: Tensor, weights: Any, biases: Any = None, *, samples: Any = None, **named: Any
) -> Any:
    """Padding is counted."""
    return linear_group(x, weights, biases, **named)


def _by_rows(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Few rows are summed apart."""
    return (_apart if len(x) < 8 else linear_group)(x, weights, biases, **named)


def _blunt(x: Tensor, weights: Any, biases: Any = None, **named: Any) -> Any:
    """Weights a hair too large."""
    return linear_group(
        x, [(w.float() * (1 + 2.0**-8)).to(w.dtype) for w in weights], biases, **named
    )


def _stock(x: Tensor, weights: Any, biases: Any = None, **_: Any) -> Any:
    """torch's own, which refuses little."""
    return tuple(
        F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=False)
    )


ours, stock, apart, ungrouped = (
    Grouped(linear_group),
    Grouped(_stock),
    Grouped(_apart),
    Grouped(_ungrouped),
)
turned, without_bias, without_samples = (
    Grouped(_turned),
    Grouped(_without_bias),
    Grouped(_without_samples),
)
by_rows, blunt = Grouped(_by_rows), Grouped(_blunt)
