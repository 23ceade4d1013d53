"""Claims of gradient-accumulation-v1: shares of a global batch merge to the whole; planted wrong merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.errors import UnsupportedError
from isobit.library.claims import Subject, must_raise
from isobit.ops.embedding.op import embedding
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear
from isobit.ops.portable.sums import round_once
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import Share, accumulation_dtype, collecting
from isobit.order.samples import Samples
from isobit.order.tree import Counter, Node, merge

Gradients = list[Tensor]

# Samples of each share of a global batch of eight, and of twelve, whose segments hold three.
CUTS = ((1,) * 8, (2,) * 4, (4, 2, 1, 1), (4, 4), (3,) * 4, (6, 3, 3), (3, 3, 6))
OURS: dict[str, Subject] = {
    "linear": lambda x, w, b, samples: linear(x, w, b, samples=samples),
    "linear_group": lambda x, w, v, samples: torch.cat(
        linear_group(x, (w, v), samples=samples), -1
    ),
    "rms_norm": lambda x, w, samples: rms_norm(x, w, samples=samples),
    "rms_norm of heads": lambda x, w, samples: rms_norm(
        x.unflatten(-1, (4, -1)), w, samples=samples, heads=True
    ),
    "layer_norm": lambda x, w, b, samples: layer_norm(x, w, b, samples=samples),
    "embedding": lambda x, w, samples: embedding(ids_of(x), w, samples=samples),
}
STOCK: dict[str, Subject] = {
    "linear": lambda x, w, b, samples: F.linear(x, w, b),
    "linear_group": lambda x, w, v, samples: torch.cat((F.linear(x, w), F.linear(x, v)), -1),
    "rms_norm": lambda x, w, samples: F.rms_norm(x, w.shape, w, 1e-6),
    "rms_norm of heads": lambda x, w, samples: F.rms_norm(
        x.unflatten(-1, (4, -1)), w.shape, w, 1e-6
    ),
    "layer_norm": lambda x, w, b, samples: F.layer_norm(x, w.shape, w, b),
    "embedding": lambda x, w, samples: F.embedding(ids_of(x), w),
}


def ids_of(x: Tensor) -> Tensor:
    """Return an id from 0 to 6 per row, chosen by its bits."""
    return bits.as_integers(x[:, 0].contiguous()).long() % 7


@dataclass(frozen=True)
class Problem:
    """A global batch of one operator, packed sample after sample."""

    operator: str
    lengths: tuple[int, ...]
    x: Tensor
    grad: Tensor
    parameters: tuple[Tensor, ...]

    def gradients(self, table: dict[str, Subject], counts: Sequence[int]) -> Iterator[Any]:
        """Yield (node, gradients) of each share; the whole batch is one share."""
        leaves = [p.detach().requires_grad_() for p in self.parameters]
        of, first, edges = len(self.lengths), 0, [0, *accumulate(self.lengths)]
        for leaf in leaves:
            leaf.grad_dtype = accumulation_dtype(leaf.dtype)
        for count in counts:
            samples = Samples.packed(self.lengths[first : first + count], first=first, total=of)
            rows = slice(edges[first], edges[first + count])
            with torch.enable_grad(), collecting(Share(first, of, count)):
                y = table[self.operator](self.x[rows], *leaves, samples=samples)
            torch.autograd.backward(y, self.grad[rows].reshape(y.shape))
            yield samples.roots[0], [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            first += count


@dataclass(frozen=True)
class Accumulation:
    """Gradients of a global batch from those of its shares, and how many partials were held at most."""

    merge: Callable[[Iterator[tuple[Node, Gradients]], list[int]], Gradients]
    table: str = "ours"

    @property
    def operators(self) -> dict[str, Subject]:
        """Return the operators by name."""
        return OURS if self.table == "ours" else STOCK

    def __call__(self, x: Tensor) -> Tensor:
        """Return the gradient of a norm's weight over the rows of x, in two shares."""
        lengths = len(x) // 2, len(x) - len(x) // 2
        return self.run(Problem("rms_norm", lengths, x, x, (torch.ones_like(x[0]),)), (1, 1))[0][0]

    def run(self, problem: Problem, counts: Sequence[int]) -> tuple[Gradients, int]:
        """Return the gradients, and the most partials held at a time."""
        held: list[int] = []
        found = self.merge(problem.gradients(self.operators, counts), held)
        pairs = zip(found, problem.parameters, strict=True)
        return [round_once(t, p.dtype) for t, p in pairs], max(held)


def problems(case: Case, of: int) -> Iterator[Problem]:
    """Yield every operator on the case's rows, cut into `of` samples, some of them empty."""
    x = case.arguments["x"]
    rows, k = x.shape
    drawn = torch.randint(0, rows + 1, (of - 1,), generator=case.generator(7))
    lengths = tuple(b - a for a, b in pairwise([0, *drawn.sort().values.tolist(), rows]))
    shapes = {
        "linear": ((5, k), (5,)),
        "linear_group": ((4, k), (2, k)),
        "rms_norm": ((k,),),
        "rms_norm of heads": ((k // 4,),),
        "layer_norm": ((k,), (k,)),
        "embedding": ((7, 9),),
    }
    widths = {"linear": 5, "linear_group": 6, "embedding": 9}
    for at, (name, given) in enumerate(shapes.items()):
        grad = case.draw((rows, widths.get(name, k)), 20 + at)
        parameters = tuple(case.draw(shape, 40 + 4 * at + i) for i, shape in enumerate(given))
        yield Problem(name, lengths, x, grad, parameters)


def every_cut(subject: Accumulation, case: Case, tally: Tally) -> None:
    """The merged gradient of any shares has the bits of the whole batch."""
    for of in (8, 12):
        for problem in problems(case, of):
            tally.count(case.rows)
            whole, _ = subject.run(problem, (of,))
            for counts in (cut for cut in CUTS if sum(cut) == of):
                where = f"{problem.operator} of {of} samples in shares of {counts}"
                for found, expected in zip(subject.run(problem, counts)[0], whole, strict=True):
                    tally.same(found, expected, where)


def few_partials(subject: Accumulation, case: Case, tally: Tally) -> None:
    """At most log2(segments) + 1 partials are held, the newest included."""
    for problem in problems(case, 8):
        tally.count(case.rows)
        for counts in CUTS[:4]:
            held = subject.run(problem, counts)[1]
            tally.within(held, 4, 1, f"{problem.operator}, partials held in shares of {counts}")


def refuses(subject: Accumulation, case: Case, tally: Tally) -> None:
    """Every operator raises for a share that is not collected, is not one subtree, or would be rounded."""
    given = Samples.packed([1, 1], first=2, total=8)
    shares: dict[str, tuple[Samples, Share | None, torch.dtype]] = {
        "no share is collected": (given, None, torch.float32),
        "another share is collected": (given, Share(0, 8, 2), torch.float32),
        "not one subtree": (
            Samples.packed([1, 1], first=1, total=8),
            Share(1, 8, 2),
            torch.float32,
        ),
        "would be rounded": (given, Share(2, 8, 2), torch.bfloat16),
    }
    for problem in problems(case, 8):
        for what, (samples, share, dtype) in shares.items():
            tally.count(2)
            leaves = [p.detach().bfloat16().requires_grad_() for p in problem.parameters]
            for leaf in leaves:
                leaf.grad_dtype = dtype
            operator = subject.operators[problem.operator]
            call = partial(operator, problem.x[:2].bfloat16(), *leaves, samples=samples)
            with torch.enable_grad(), nullcontext() if share is None else collecting(share):
                must_raise(call, f"{problem.operator}, {what}", tally, UnsupportedError)


# ---- merges: ours, stock's, planted ---------------------------------------------------------------------


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add gradients parameter by parameter."""
    return [a + b for a, b in zip(left, right, strict=True)]


def by_tree(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Merge by the binary counter."""
    counter: Counter[Gradients] = Counter(add)
    for node, gradients in shares:
        held.append(len(counter) + 1)
        counter.push(node, gradients)
    ((_, total),) = counter
    return total


def _all(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> list[Gradients]:
    found = [gradients for _, gradients in shares]
    held.append(len(found))
    return found


def _left(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Add one after another, as autograd accumulates."""
    return reduce(add, _all(shares, held))


def _rounded(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Round each share before it is merged."""
    return by_tree(((node, [t.bfloat16().float() for t in g]) for node, g in shares), held)


def _means(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Take the mean of the shares' means without their sizes."""
    found = list(shares)
    held.append(1)
    sizes = [2**node.level for node, _ in found]
    means = [[t / size for t in g] for (_, g), size in zip(found, sizes, strict=True)]
    return [t / len(found) * sum(sizes) for t in reduce(add, means)]


def _wrong_pair(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Merge every share with its other neighbour."""
    found = _all(shares, held)
    turned = [*found[1:], found[0]]
    return merge(turned, add) if len(found) in (1, 2, 4, 8) else reduce(add, turned)


def _hoarded(shares: Iterator[tuple[Node, Gradients]], held: list[int]) -> Gradients:
    """Keep all shares until the last: right bits, too much memory."""
    found = list(shares)
    total = by_tree(iter(found), held)
    held.append(len(found))
    return total


ours, stock = Accumulation(by_tree), Accumulation(_left, "stock")
left, rounded, means = Accumulation(_left), Accumulation(_rounded), Accumulation(_means)
wrong_pair, hoarded = Accumulation(_wrong_pair), Accumulation(_hoarded)
