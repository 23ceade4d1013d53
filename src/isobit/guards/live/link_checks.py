"""`check_links`: send known numbers between every two ranks before a run, and name the links that change them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.guards.live.events import Event
from isobit.parallel.collectives.levels import RankGroup


def check_links(group: dist.ProcessGroup | None = None, *, elements: int = 2**16) -> list[Event]:
    """Send known numbers from every rank to every other one, and compare their bits. Every rank must call this.

    A message that is lost altogether is a timeout of the group. What was found is summed over the ranks by an
    all-reduce, so that every rank reports every link.

    Args:
        group: The ranks; None is the world.
        elements: Numbers of 8 bytes per message.

    Returns:
        A finding `link-changes-data` per link, the same on every rank.

    Raises:
        ArgumentError: If `elements` is not positive, or this rank is not in the group.

    Example:
        >>> from isobit.guards import check_links
        >>> from isobit.simulator import Flip, World
        >>> World(3).run(lambda rank: check_links()).values
        [[], [], []]
        >>> flipped = World(3, faults=[Flip(rank=1, element=7)]).run(lambda rank: check_links())
        >>> print(flipped.values[0][0])
        rank 0: link-changes-data: from rank 1 to rank 2: 1 of 65536 numbers differ, first at [7]
    """
    if elements < 1:
        raise ArgumentError(
            expected="at least one number per message",
            received=f"elements={elements}",
            remedy="pass elements=65536",
        )
    here = RankGroup.of(group)
    count, me = len(here.ranks), here.index
    wrong = [0] * (count * count)  # by sender and receiver
    first = [0] * (count * count)
    for distance in range(1, count):
        to, source = (me + distance) % count, (me - distance) % count
        received = torch.zeros(elements, dtype=torch.int64, device=here.device)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend,
                    pattern(me, to, elements).to(here.device),
                    here.ranks[to],
                    here.group,
                ),
                dist.P2POp(dist.irecv, received, here.ranks[source], here.group),
            ]
        )
        for work in works:
            work.wait()
        differs = (received.cpu() != pattern(source, me, elements)).nonzero()
        wrong[source * count + me] = len(differs)
        first[source * count + me] = int(differs[0]) if len(differs) else 0
    totals = here.add_integers([*wrong, *first])
    rank = here.rank
    return [
        Event(
            "finding",
            "link-changes-data",
            float(totals[at]),
            "error",
            rank=rank,
            message=f"from rank {here.ranks[at // count]} to rank {here.ranks[at % count]}: "
            f"{totals[at]} of {elements} numbers differ, first at [{totals[count * count + at]}]",
        )
        for at in range(count * count)
        if totals[at]
    ]


def pattern(source: int, to: int, elements: int) -> Tensor:
    """Return the numbers of one link: the rank of a message that arrives at the wrong place shows too."""
    generator = torch.Generator().manual_seed(source * 1_000_003 + to)
    return torch.randint(-(2**62), 2**62, (elements,), generator=generator)
