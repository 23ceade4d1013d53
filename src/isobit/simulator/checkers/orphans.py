"""Orphans: handles that no rank waited for, and messages that no rank received."""

from __future__ import annotations

from collections.abc import Iterable

from isobit.errors import OrphanError
from isobit.foundation.majority import name_ranks
from isobit.simulator.operations import Message
from isobit.simulator.rank import Rank


def orphaned_work(ranks: Iterable[Rank]) -> list[OrphanError]:
    """Report handles that were never waited for, once per line of the program."""
    found: dict[str, list[tuple[int, str]]] = {}
    for rank in ranks:
        for work in rank.pending.values():
            if not work.torchs_own:  # DDP's Join never waits for its own signals
                found.setdefault(work.site, []).append((rank.index, work.what))
    errors = []
    for site, held in found.items():
        guilty = sorted({rank for rank, _ in held})
        errors.append(
            OrphanError(
                expected=f"{name_ranks(guilty)} to call wait() on every handle ({held[0][1]})",
                received=f"the end of the program without wait() on {len(held)} handles; their results were never "
                "written",
                remedy="keep the handle that the call returns and call .wait() before using the result",
                ranks=guilty,
                stacks={held[0][0]: [site]},
            )
        )
    return errors


def orphaned_message(message: Message) -> OrphanError:
    """Report a message that was never received."""
    return OrphanError(
        expected=f"rank {message.receiver} to receive the message of rank {message.sender}",
        received="the end of the program without that receive",
        remedy="match every send with a receive of the same group, source and tag",
        ranks=sorted({message.sender, message.receiver}),
        stacks={message.sender: [message.site]},
    )
