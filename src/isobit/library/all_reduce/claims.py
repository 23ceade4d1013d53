"""What tree-collective-v1 claims: ranks are leaves of one tree, on each executor and level; and other orders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.ops.portable.rounding import settle_nans
from isobit.order.addition import Branch, digest
from isobit.order.tree import merge
from isobit.parallel.collectives.additions import add_rows, add_two
from isobit.parallel.collectives.recursive_halving import folded_spans, meet
from isobit.records import Proof
from isobit.reveal.certificate import certify
from isobit.reveal.targets.tensor_target import TensorTarget

# Ranks stand in columns, elements of the exchanged tensor in rows: [elements, ranks] → [elements].
Subject = Callable[[Tensor], Tensor]
RANKS = (2, 4, 8, 16)


def by_meetings(x: Tensor) -> Tensor:
    """As messages carry it out, all ranks in one process: the same plan and additions, without a wire."""
    elements, ranks = x.shape
    owned = folded_spans(elements, ranks)
    held = list(x.t().contiguous())
    for meetings in zip(*(meet(rank, owned) for rank in range(ranks)), strict=True):
        sums = [value.clone() for value in held]
        for rank, meeting in enumerate(meetings):
            for span in meeting.kept:
                part = slice(span.start, span.stop)
                pair = (rank, meeting.peer) if meeting.is_left else (meeting.peer, rank)
                add_two(held[pair[0]][part], held[pair[1]][part], sums[rank][part])
        held = sums
    total = torch.empty(elements, dtype=x.dtype)
    for rank, span in enumerate(owned):
        total[span.start : span.stop] = held[rank][span.start : span.stop]
    return total


def by_rows(x: Tensor) -> Tensor:
    """As collectives carry it out: a local tree over what all ranks sent."""
    total = torch.empty(len(x), dtype=x.dtype)
    add_rows(list(x.t().clone(memory_format=torch.contiguous_format)), total)
    return total


def is_the_tree(subject: Subject, case: Case, tally: Tally) -> None:
    """The definition's tree, by rank."""
    x = case.arguments["x"]
    tally.count(case.rows)
    tally.same(subject(x), settle_nans(by_stock_additions(x)), "against the definition")


def has_one_nan(subject: Subject, case: Case, tally: Tally) -> None:
    """inf − inf, NaNs of any payload, and both at once, are one NaN wherever they meet."""
    x = case.arguments["x"].clone()
    tally.count(case.rows)
    odd = torch.full((len(x),), -1, dtype=torch.int32).view(
        torch.float32
    )  # a NaN with its sign and all bits set
    for first, last in (
        (torch.inf, -torch.inf),
        (-torch.inf, torch.inf),
        (torch.nan, odd),
        (odd, 1.0),
        (1.0, odd),
    ):
        x[:, 0], x[:, -1] = first, last
        tally.same(subject(x), torch.full((len(x),), torch.nan), f"{first} and {last}")


def executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """Messages and collectives."""
    x = case.arguments["x"]
    tally.count(case.rows)
    tally.same(subject(x), by_rows(x), "collectives")


def places_do_not_matter(subject: Subject, case: Case, tally: Tally) -> None:
    """An element has the same sum in a tensor of its own, and where the tensor is turned round."""
    x = case.arguments["x"]
    tally.count(case.rows)
    whole = subject(x)
    tally.same(subject(x.flip(0)).flip(0), whole, "turned round")
    for at in range(0, len(x), max(len(x) // 8, 1)):
        tally.same(subject(x[at : at + 1]), whole[at : at + 1], f"element {at} alone")


def levels_do_not_matter(subject: Subject, case: Case, tally: Tally) -> None:
    """Inside hosts, then across them; which is also micro-batches inside ranks, then ranks, down to one rank."""
    x = case.arguments["x"]
    tally.count(case.rows)
    inner = 2
    while inner < x.shape[1]:
        hosts = torch.stack([subject(part) for part in torch.split(x, inner, dim=1)], 1)
        tally.same(subject(hosts), subject(x), f"{inner} ranks a host")
        inner *= 2


def prove_tree(subject: Subject) -> Proof:
    """The order of each element's sum, revealed by probes, is the balanced tree."""
    count = 0
    for ranks in RANKS:

        def target(elements: int, ranks: int = ranks) -> TensorTarget:
            x = torch.zeros(elements, ranks)
            return TensorTarget(f"{ranks} ranks", x, lambda: subject(x))

        found = certify(target, [{"elements": elements} for elements in (1, 3, 64)])
        count += found.count
        leaves: list[Branch] = list(range(ranks))
        if not found.matches(digest(merge(leaves, lambda left, right: (left, right)))):
            return Proof("order certificate", "", count, f"{ranks} ranks: {found}")
    return Proof(
        "order certificate", f"all finite inputs: {list(RANKS)} ranks, 1, 3 and 64 elements", count
    )


def by_stock_additions(x: Tensor) -> Tensor:
    """The tree, with the NaNs that the processor makes."""
    total: Tensor = merge(list(x.t()), torch.add)
    return total.clone()


def ring(x: Tensor) -> Tensor:
    """Chunk c is added from rank c + 1 on, round the ring: so an element's order follows from its place and from P."""
    elements, ranks = x.shape
    sums = torch.stack([_fold(list(x.roll(-chunk - 1, 1).t())) for chunk in range(ranks)], 1)
    chunks = torch.arange(elements) * ranks // max(elements, 1)
    return sums.gather(1, chunks[:, None]).squeeze(1)


def _fold(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = torch.add(total, value)
    return total


def far_ranks_first(x: Tensor) -> Tensor:
    """Recursive halving as it is usually done: (0+2)+(1+3)."""
    level: list[Tensor] = list(x.t())
    while len(level) > 1:
        half = len(level) // 2
        level = [torch.add(level[i], level[i + half]) for i in range(half)]
    return level[0]


def left_fold(x: Tensor) -> Tensor:
    """One rank after the other."""
    return _fold(list(x.t()))


def as_they_arrive(x: Tensor) -> Tensor:
    """A fold in an order that the data decide, as a network would."""
    first = x.nan_to_num()[:1].abs().argsort(dim=1)[0] if len(x) else torch.arange(x.shape[1])
    return _fold(list(x[:, first].t()))


def last_rank_forgotten(x: Tensor) -> Tensor:
    """A rank's message is lost."""
    return by_meetings(torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], 1))
