"""What a linear layer promises, one relation a function: each compares bits, or errors against fp64, and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts import transforms
from isobit.contracts.subject import STOCK, Share, Subject
from isobit.ops.linear.attest import wide_values
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.records import Verdict


@dataclass(frozen=True)
class Problem:
    """A weight shape and dtype, with inputs of full mantissas and wide exponents, by seed.

    Every sum is made to cancel: half of its terms are the other half negated, in another order. What is left
    is rounding error alone, so that a change of order shows even through a rounding to bf16.
    """

    name: str
    k: int
    n: int
    dtype: torch.dtype
    row_counts: Sequence[int] = transforms.SOME_ROW_COUNTS
    threads: Sequence[int] = transforms.THREADS

    @property
    def subject_name(self) -> str:
        """As verdicts name it."""
        return f"{self.name} {self.k}×{self.n} {str(self.dtype).removeprefix('torch.')}"

    def draw(self, *shape: int, seed: int) -> Tensor:
        """Random values of this problem's dtype."""
        return wide_values(shape, self.dtype, torch.Generator().manual_seed(seed))

    @cached_property
    def weight(self) -> Tensor:
        """[N, K], cancelling along both axes against `x` and `grad`."""
        return mirror(mirror(self.draw(self.n, self.k, seed=1), 1, -1), 0, -1)

    @cached_property
    def bias(self) -> Tensor:
        """[N], as small as what the sums leave."""
        return self.draw(self.n, seed=2) * 2.0**-20

    def x(self, rows: int, seed: int) -> Tensor:
        """[rows, K]: each row's products with `weight` cancel."""
        return mirror(self.draw(rows, self.k, seed=seed), 1, 1)

    def grad(self, rows: int, seed: int) -> Tensor:
        """[rows, N]: each row's products with `weight` cancel."""
        return mirror(self.draw(rows, self.n, seed=seed), 1, 1)

    def tokens(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """(grad, x) whose products cancel along the rows."""
        grad, x = self.draw(rows, self.n, seed=seed), self.draw(rows, self.k, seed=seed + 1)
        return mirror(grad, 0, -1), mirror(x, 0, 1)


def mirror(values: Tensor, axis: int, sign: int) -> Tensor:
    """The second half of an axis becomes `sign` times the first, in a fixed random order; an odd last one vanishes."""
    size = values.shape[axis]
    half = size // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(size))
    first = values.narrow(axis, 0, half)
    rest = values.narrow(axis, 2 * half, size - 2 * half) * 0
    return torch.cat([first, sign * first.index_select(axis, order), rest], axis)


class Tally:
    """Counts comparisons, and keeps the first difference."""

    def __init__(self) -> None:
        self.compared, self.differing, self.first = 0, 0, ""

    def same(self, left: Tensor, right: Tensor, where: str) -> None:
        """Bit equality."""
        self.compared += left.numel()
        found = bits.first_difference(left, right)
        if found is not None:
            self.differing += found.count or left.numel()
            self.first = self.first or f"{where}: {found}"

    def within(self, error: float, limit: float, count: int, where: str) -> None:
        """An error that must not exceed a limit; NaN exceeds every limit."""
        self.compared += count
        if not error <= limit:
            self.differing += 1
            self.first = self.first or f"{where}: error {error:.3e}, limit {limit:.3e}"

    def verdict(self, problem: Problem, check: str) -> Verdict:
        """What was counted."""
        return Verdict(problem.subject_name, check, self.compared, self.differing, self.first)


def rows(subject: Subject, problem: Problem, tally: Tally) -> None:
    """A row's y and dX do not depend on how many rows there are, on its place, on its neighbours, or on threads."""
    weight, needle, grad = problem.weight, problem.x(1, seed=3), problem.grad(1, seed=4)
    alone = subject.output(needle, weight, problem.bias)
    alone_grad = subject.input_grad(grad, weight)
    most = max(problem.row_counts, default=0)
    neighbours = problem.draw(most, problem.k, seed=5), problem.draw(most, problem.n, seed=6)
    for threads in problem.threads:
        with transforms.thread_count(threads):
            for count in problem.row_counts:
                at = list(transforms.places(count))
                x, dy = (t[:count].clone() for t in neighbours)
                x[at], dy[at] = needle, grad
                y, dx = subject.output(x, weight, problem.bias), subject.input_grad(dy, weight)
                for place in at:
                    where = f"{count} rows, place {place}, {threads} threads"
                    tally.same(y[place : place + 1], alone, f"y, {where}")
                    tally.same(dx[place : place + 1], alone_grad, f"dX, {where}")


def columns(subject: Subject, problem: Problem, tally: Tally) -> None:
    """An output does not depend on which other outputs are computed beside it."""
    x, grad, weight = problem.x(33, seed=5), problem.grad(33, seed=6), problem.weight[:321]
    whole = subject.output(x, weight, None)
    for start, stop in ((0, 1), (0, 17), (3, 80), (130, 321), (max(len(weight) - 1, 0), len(weight))):
        part = subject.output(x, weight[start:stop].contiguous(), None)
        tally.same(part, whole[:, start:stop], f"y, outputs {start} to {stop}")
    whole = subject.input_grad(grad, problem.weight)
    for start, stop in ((0, 1), (5, 70), (problem.k - 1, problem.k)):
        part = subject.input_grad(grad, problem.weight[:, start:stop].contiguous())
        tally.same(part, whole[:, start:stop], f"dX, inputs {start} to {stop}")


def layouts(subject: Subject, problem: Problem, tally: Tally) -> None:
    """Storage does not matter: contiguous, transposed, strided, misaligned, gaps between rows."""
    for count in (1, 33, 130):
        x, grad = problem.x(count, seed=7), problem.grad(count, seed=7)
        samples, (token_grad, token_x) = Samples.packed([count]), problem.tokens(count, seed=7)
        plain = (
            subject.output(x, problem.weight, None),
            subject.input_grad(grad, problem.weight),
            *subject.parameter_grads(token_grad, token_x, samples),
        )
        for name, store in transforms.LAYOUTS.items():
            weight = store(problem.weight)
            changed = (
                subject.output(store(x), weight, None),
                subject.input_grad(store(grad), weight),
                *subject.parameter_grads(store(token_grad), store(token_x), samples),
            )
            for what, left, right in zip(("y", "dX", "dW", "db"), plain, changed, strict=True):
                tally.same(left, right, f"{what}, {count} rows, {name}")


def samples(subject: Subject, problem: Problem, tally: Tally) -> None:
    """dW and db of a batch are one sum: packed, padded left or right, in micro-batches of 1, 2 and 4."""
    lengths = transforms.SAMPLE_LENGTHS
    total, width = sum(lengths), max(lengths) + 5
    grad, x = problem.tokens(total, seed=8)
    whole = subject.parameter_grads(grad, x, Samples.packed(lengths))

    def compare(found: Sequence[Tensor], where: str) -> None:
        for what, left, right in zip(("dW", "db"), whole, found, strict=True):
            tally.same(left, right, f"{what}, {where}")

    for side in ("left", "right"):
        described = Samples.padded(lengths, width=width, side=side)
        padded = [spread(t, described, seed) for t, seed in ((grad, 9), (x, 10))]
        compare(subject.parameter_grads(padded[0], padded[1], described), f"padded {side}")
    for size in transforms.MICRO_BATCHES:
        compare(subject.accumulate(split(grad, x, lengths, size)), f"micro-batches of {size}")
    for threads in problem.threads:
        with transforms.thread_count(threads):
            again = subject.parameter_grads(grad, x, Samples.packed(lengths))
            compare(again, f"{threads} threads")


def spread(packed: Tensor, described: Samples, seed: int) -> Tensor:
    """Packed rows put where padded samples are, among random rows."""
    generator = torch.Generator().manual_seed(seed)
    out = wide_values((described.rows, packed.shape[1]), packed.dtype, generator)
    at = 0
    for start, length in described.spans:
        out[start : start + length] = packed[at : at + length]
        at += length
    return out


def split(grad: Tensor, x: Tensor, lengths: Sequence[int], size: int) -> list[Share]:
    """A packed batch as micro-batches of `size` samples."""
    shares, at = [], 0
    for first in range(0, len(lengths), size):
        described = Samples.packed(lengths[first : first + size], first=first, of=len(lengths))
        shares.append((grad[at : at + described.rows], x[at : at + described.rows], described))
        at += described.rows
    return shares


def cuts(subject: Subject, problem: Problem, tally: Tally) -> None:
    """K cut over ranks and merged equals the uncut y; N likewise for dX; for every cut that the plan allows."""
    x, grad = problem.x(9, seed=11), problem.grad(9, seed=11)
    whole = subject.output(x, problem.weight, None), subject.input_grad(grad, problem.weight)
    for parts in transforms.CUTS:
        if FeaturePlan(problem.k).count % parts == 0:
            tally.same(subject.cut_output(x, problem.weight, parts), whole[0], f"y, K in {parts}")
        if FeaturePlan(problem.n).count % parts == 0:
            found = subject.cut_input_grad(grad, problem.weight, parts)
            tally.same(found, whole[1], f"dX, N in {parts}")


def frozen(subject: Subject, problem: Problem, tally: Tally) -> None:
    """A weight kept for decoding gives the same bits, and a later write to it, even by .data, is seen."""
    layer = torch.nn.Linear(problem.k, problem.n, bias=False, dtype=problem.dtype)
    with torch.no_grad():
        layer.weight.copy_(problem.weight)
        decode = subject.decoder(layer)
        for count in (1, 8, 64, 257):
            x = problem.x(count, seed=12)
            fresh = subject.output(x, layer.weight.clone(), None)
            tally.same(decode(x), fresh, f"{count} rows, frozen")
        layer.weight.data.copy_(problem.draw(problem.n, problem.k, seed=13))
        x = problem.x(8, seed=14)
        fresh = subject.output(x, layer.weight.clone(), None)
        tally.same(decode(x), fresh, "8 rows, after weight.data.copy_")


ACCURACY = 1.25


def accuracy(subject: Subject, problem: Problem, tally: Tally) -> None:
    """Largest error against fp64 is at most 1.25 times stock's on the same inputs, for y, dX, dW and db."""
    count = 64
    x, grad = (problem.draw(count, size, seed=15) for size in (problem.k, problem.n))
    weight = problem.draw(problem.n, problem.k, seed=1)  # ordinary sums, which do not cancel
    described = Samples.packed([count])
    exact = (
        x.double() @ weight.double().t(),
        grad.double() @ weight.double(),
        grad.double().t() @ x.double(),
        grad.double().sum(0),
    )
    found, stock = (
        (
            who.output(x, weight, None),
            who.input_grad(grad, weight),
            *who.parameter_grads(grad, x, described),
        )
        for who in (subject, STOCK)
    )
    for what, true, mine, theirs in zip(("y", "dX", "dW", "db"), exact, found, stock, strict=True):
        error, limit = ((t.double() - true).abs().max().item() for t in (mine, theirs))
        tally.within(error, ACCURACY * limit, mine.numel(), what)


Relation = Callable[[Subject, Problem, Tally], None]
RELATIONS: dict[str, Relation] = {
    relation.__name__: relation for relation in (rows, columns, layouts, samples, cuts, frozen, accuracy)
}


def judge(relation: str, subject: Subject, problem: Problem) -> Verdict:
    """One relation on one problem."""
    tally = Tally()
    RELATIONS[relation](subject, problem, tally)
    return tally.verdict(problem, relation)
