"""Claims of tree-collective-v1: ranks are leaves of one tree, for each transport and level; other orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.records import Proof
from isobit.library.certificates import Question, prove_orders
from isobit.ops.portable.sums import settle_nans
from isobit.order.addition import Branch
from isobit.order.tree import merge
from isobit.parallel.collectives.elementwise_add import add_rows, add_two
from isobit.parallel.collectives.transfers import bit_reversed_spans, halving_rounds
from isobit.reveal.targets.tensor_target import TensorTarget

Subject = Callable[[Tensor], Tensor]  # [elements, ranks] -> [elements]
RANKS = (2, 4, 8, 16)


def by_recursive_halving(x: Tensor) -> Tensor:
    """Run recursive halving with all ranks in one process: the same plan and additions, without a network."""
    elements, ranks = x.shape
    owned = bit_reversed_spans(elements, ranks)
    held = list(x.t().contiguous())
    for exchanges in zip(*(halving_rounds(rank, owned) for rank in range(ranks)), strict=True):
        sums = [value.clone() for value in held]
        for rank, exchange in enumerate(exchanges):
            for span in exchange.kept:
                part = slice(span.start, span.stop)
                pair = (rank, exchange.peer) if exchange.is_left else (exchange.peer, rank)
                add_two(held[pair[0]][part], held[pair[1]][part], sums[rank][part])
        held = sums
    total = torch.empty(elements, dtype=x.dtype)
    for rank, span in enumerate(owned):
        total[span.start : span.stop] = held[rank][span.start : span.stop]
    return total


def by_rows(x: Tensor) -> Tensor:
    """Add what all ranks sent by a local tree, as the all-to-all transport does."""
    total = torch.empty(len(x), dtype=x.dtype)
    add_rows(list(x.t().clone(memory_format=torch.contiguous_format)), total)
    return total


def is_the_tree(subject: Subject, case: Case, tally: Tally) -> None:
    """The sum is the definition's tree over ranks."""
    x = case.arguments["x"]
    tally.count(case.rows)
    tally.same(subject(x), settle_nans(by_stock_additions(x)), "against the definition")


def has_one_nan(subject: Subject, case: Case, tally: Tally) -> None:
    """The sums inf − inf and of NaNs of any payload are the canonical NaN."""
    x = case.arguments["x"].clone()
    tally.count(case.rows)
    inf, nan = torch.inf, torch.nan
    # A NaN with its sign and all bits set.
    odd = torch.full((len(x),), -1, dtype=torch.int32).view(torch.float32)
    for first, last in ((inf, -inf), (-inf, inf), (nan, odd), (odd, 1.0), (1.0, odd)):
        x[:, 0], x[:, -1] = first, last
        tally.same(subject(x), torch.full((len(x),), torch.nan), f"{first} and {last}")


def executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """Recursive halving and the all-to-all transport have the same bits."""
    x = case.arguments["x"]
    tally.count(case.rows)
    tally.same(subject(x), by_rows(x), "collectives")


def places_do_not_matter(subject: Subject, case: Case, tally: Tally) -> None:
    """An element has the same sum alone, and in a reversed tensor."""
    x = case.arguments["x"]
    tally.count(case.rows)
    whole = subject(x)
    tally.same(subject(x.flip(0)).flip(0), whole, "turned round")
    for at in range(0, len(x), max(len(x) // 8, 1)):
        tally.same(subject(x[at : at + 1]), whole[at : at + 1], f"element {at} alone")


def levels_do_not_matter(subject: Subject, case: Case, tally: Tally) -> None:
    """Summing inside hosts and then across them changes no bit; neither do micro-batches inside ranks."""
    x = case.arguments["x"]
    tally.count(case.rows)
    inner = 2
    while inner < x.shape[1]:
        hosts = torch.stack([subject(part) for part in torch.split(x, inner, dim=1)], 1)
        tally.same(subject(hosts), subject(x), f"{inner} ranks a host")
        inner *= 2


def prove_tree(subject: Subject) -> Proof:
    """Certify that the order of each element's sum is the balanced tree over ranks."""

    def question(ranks: int) -> Question:
        def target(elements: int) -> TensorTarget:
            x = torch.zeros(elements, ranks)
            return TensorTarget(f"{ranks} ranks", x, lambda: subject(x))

        leaves: list[Branch] = list(range(ranks))
        order = merge(leaves, lambda left, right: (left, right))
        return Question(f"{ranks} ranks", target, [{"elements": n} for n in (1, 3, 64)], order)

    covers = f"all finite inputs: {list(RANKS)} ranks, 1, 3 and 64 elements"
    return prove_orders((question(ranks) for ranks in RANKS), covers)


def by_stock_additions(x: Tensor) -> Tensor:
    """Return the tree's sum with the NaNs that the processor makes."""
    total: Tensor = merge(list(x.t()), torch.add)
    return total.clone()


def ring(x: Tensor) -> Tensor:
    """Add chunk c from rank c + 1 on, around the ring: the order depends on the element's place and on P."""
    elements, ranks = x.shape
    sums = torch.stack(
        [reduce(torch.add, list(x.roll(-chunk - 1, 1).t())) for chunk in range(ranks)], 1
    )
    chunks = torch.arange(elements) * ranks // max(elements, 1)
    return sums.gather(1, chunks[:, None]).squeeze(1)


def far_ranks_first(x: Tensor) -> Tensor:
    """Run recursive halving in the usual order: (0+2)+(1+3)."""
    level: list[Tensor] = list(x.t())
    while len(level) > 1:
        half = len(level) // 2
        level = [torch.add(level[i], level[i + half]) for i in range(half)]
    return level[0]


def left_fold(x: Tensor) -> Tensor:
    """Add one rank after the other."""
    total: Tensor = reduce(torch.add, list(x.t()))
    return total


def as_they_arrive(x: Tensor) -> Tensor:
    """Fold in an order that depends on the data, as arrival on a network would."""
    first = x.nan_to_num()[:1].abs().argsort(dim=1)[0] if len(x) else torch.arange(x.shape[1])
    return left_fold(x[:, first])


def last_rank_forgotten(x: Tensor) -> Tensor:
    """Lose the last rank's message."""
    return by_recursive_halving(torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], 1))
