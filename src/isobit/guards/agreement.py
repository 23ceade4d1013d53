"""Whether the replicas of a live run hold the same bits; if not, the minority: parameter, rank, first element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import AgreementError, ArgumentError
from isobit.guards.replica import Findings, Gather, Replica, Talk, compare
from isobit.majority import name_ranks
from isobit.parallel.collectives.rank_group import RankGroup
from isobit.parallel.tensor.local_shards import find_shards

Replicated = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
MODES = ("raise", "report")


@dataclass(frozen=True)
class Disagreement:
    """A parameter of a rank in the minority, which differs in `what`; for bits, the first element that differs.

    `there` is what that rank has, `expected` what the ranks of the `majority` have. Where it is `tied` no value has
    most ranks, and `majority` is the group of the lowest rank among the largest. Beyond the parameters that are
    searched, index is None.
    """

    parameter: str
    rank: int
    what: str
    there: str
    expected: str
    index: tuple[int, ...] | None = None
    majority: tuple[int, ...] = ()
    tied: bool = False

    def __str__(self) -> str:
        at = "" if self.index is None else f" at {list(self.index)}"
        values = f": {self.there}, not {self.expected}" if self.there else ""
        others = f" as {name_ranks(self.majority)}" + (", and no majority" if self.tied else "")
        return f"rank {self.rank}, {self.parameter}, {self.what}{at}{values}{others}"


@dataclass(frozen=True)
class Agreement:
    """What one check found: the same on every rank, but for `digest`, `nonfinite` and `unchanged`, which are its own.

    `changed` is whether every rank's digest is another than in the check before; None where there was none.
    """

    ranks: tuple[int, ...]
    parameters: int
    elements: int
    differences: tuple[Disagreement, ...]
    finite: bool
    changed: bool | None
    digest: str
    nonfinite: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    sent: int = 0  # bytes that this rank gave to the others
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def agreed(self) -> bool:
        """Every rank holds the same bits."""
        return not self.differences

    @property
    def minority(self) -> tuple[int, ...]:
        """Ranks that differ from most others in some parameter."""
        return tuple(sorted({d.rank for d in self.differences if not d.tied}))

    @property
    def kept(self) -> bool:
        """The bits agree, all are finite, and the run moved on since the check before."""
        return self.agreed and self.finite and self.changed is not False


def rank_agreement(
    replicated: Replicated,
    group: dist.ProcessGroup | None = None,
    *,
    every: int = 1,
    step: int | None = None,
    on_difference: str = "raise",
    buffers: bool = True,
    since: Agreement | None = None,
    most: int = 8,
) -> Agreement | None:
    """Compares the ranks of the group (None is the world) by raw bits and names the minority; all its ranks call this.

    The group is of ranks that hold the same pieces: of sharded parameters, the replicas of one shard. With `every`
    and `step`, other steps return None at once. `since` is the check before. At most `most` parameters are searched
    for the element; all that differ are named.
    """
    if on_difference not in MODES or every < 1 or (every > 1 and step is None):
        raise ArgumentError(
            expected="on_difference 'raise' or 'report', and every = 1, or more with a step",
            received=f"on_difference={on_difference!r}, every={every}, step={step}",
            remedy="pass the number of the step beside every",
        )
    if step is not None and step % every:
        return None
    members = RankGroup.of(group)
    own: Replica | Exception
    try:
        own = Replica.of(*read(replicated, buffers))
    except Exception as error:  # told to the others, who would wait for this rank
        own = error
    changed = since is not None and isinstance(own, Replica) and own.digest != since.digest
    found, sent = carry(compare(own, members.index, changed, most), members)
    assert isinstance(own, Replica)
    agreement = conclude(own, found, members.ranks, since, sent)
    if agreement.differences and on_difference == "raise":
        refuse(agreement)
    return agreement


def read(
    replicated: Replicated, buffers: bool
) -> tuple[Iterator[tuple[str, Tensor]], Mapping[int, object]]:
    """Names and tensors, and the records of shards."""
    if isinstance(replicated, nn.Module):
        named = [*replicated.named_parameters(), *(replicated.named_buffers() if buffers else ())]
        return iter(named), find_shards(replicated)
    return iter(replicated.items() if isinstance(replicated, Mapping) else replicated), {}


def carry(program: Talk[Findings], members: RankGroup) -> tuple[Findings, int]:
    """Carries a rank's messages until its program ends; also the bytes that it gave."""
    sent, answer = 0, None
    while True:
        try:
            message = next(program) if answer is None else program.send(answer)
        except StopIteration as end:
            return end.value, sent
        if isinstance(message, Gather):
            sent += len(message.data)
            answer = members.all_gather(message.data)
        else:
            sent += len(message.data)
            answer = [members.broadcast(message.data, message.size, message.source)]


def conclude(
    own: Replica,
    found: Findings,
    ranks: tuple[int, ...],
    since: Agreement | None = None,
    sent: int = 0,
) -> Agreement:
    """Findings of members, as a record of ranks; refuses a group that holds different pieces."""
    wrong = next((f for f in found.differences if f.what == "shard"), None)
    if wrong is not None:
        there, here = wrong.there or "whole", wrong.expected or "whole"
        raise ArgumentError(
            expected="a group of ranks that hold the same pieces",
            received=f"{wrong.parameter!r}: {there} on rank {ranks[wrong.member]}, "
            f"{here} on {name_ranks([ranks[at] for at in wrong.majority])}",
            remedy="pass the group of the mesh axis that replicates, not the one that shards",
        )
    digests = {name: entry[3] for name, entry in own.table.items()}
    before = {} if since is None else since.digests
    return Agreement(
        ranks=ranks,
        parameters=len(own.table),
        elements=sum(tensor.numel() for tensor in own.tensors.values()),
        differences=tuple(
            Disagreement(
                f.parameter,
                ranks[f.member],
                f.what,
                f.there,
                f.expected,
                f.index,
                tuple(ranks[at] for at in f.majority),
                f.tied,
            )
            for f in found.differences
        ),
        finite=found.finite,
        changed=None if since is None else found.changed,
        digest=own.digest,
        nonfinite=own.nonfinite,
        unchanged=tuple(name for name, digest in digests.items() if before.get(name) == digest),
        sent=sent,
        digests=digests,
    )


def refuse(agreement: Agreement) -> None:
    """Names what differs, the first few."""
    shown = "; ".join(map(str, agreement.differences[:4]))
    more = len(agreement.differences) - 4
    tied = any(d.tied for d in agreement.differences)
    error = AgreementError(
        expected=f"the same bits on {len(agreement.ranks)} ranks",
        received=shown + (f"; and {more} more" if more > 0 else ""),
        remedy="look for a rank that skipped an exchange, or a bit that flipped; go on from the last check that agreed"
        + (
            "; where there is no majority, compare each group with that check to see which one is wrong"
            if tied
            else ""
        ),
    )
    error.agreement = agreement
    raise error
