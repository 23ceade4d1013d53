"""`rank_agreement`: check that the replicas of a training run have the same bits, and name those that differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import AgreementError, ArgumentError
from isobit.foundation.majority import name_ranks
from isobit.guards.live.comparison import Gather, Replica, ReplicaComparison, Talk, compare
from isobit.parallel.collectives.levels import RankGroup
from isobit.parallel.tensor.shard import find_record, find_shards, is_dtensor

Replicated = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
MODES = ("raise", "report")


@dataclass(frozen=True)
class Disagreement:
    """A parameter of one rank that differs from the majority.

    Attributes:
        parameter: Its name.
        rank: The rank that differs.
        what: What differs: "bits", "dtype", "shape", or "missing" or "extra" for the parameter itself.
        there: What the rank has.
        expected: What the ranks of the majority have.
        index: The first element that differs; None if it was not searched for.
        majority: The ranks that have `expected`.
        tied: Whether two groups of ranks are the largest. `majority` is then the one with the lowest rank.

    Example:
        >>> from isobit.guards import Disagreement
        >>> print(Disagreement("bias", 3, "bits", "0x3f80", "0x3f00", (2,), (0, 1, 2)))
        rank 3, bias, bits at [2]: 0x3f80, not 0x3f00 as ranks 0–2
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
        """Return the difference in words."""
        at = "" if self.index is None else f" at {list(self.index)}"
        values = f": {self.there}, not {self.expected}" if self.there else ""
        others = f" as {name_ranks(self.majority)}" + (", and no majority" if self.tied else "")
        return f"rank {self.rank}, {self.parameter}, {self.what}{at}{values}{others}"


@dataclass(frozen=True)
class Agreement:
    """What one check found.

    It is the same on every rank, except for `digest`, `digests`, `nonfinite` and `unchanged`, which are the rank's own.

    Attributes:
        ranks: The ranks that were compared.
        parameters: The number of parameters and buffers.
        elements: The number of their elements.
        differences: Each parameter of each rank that differs from the majority.
        finite: Whether all numbers on all ranks are finite.
        changed: Whether the digest of every rank has changed since the previous check; None if there was none.
        digest: The digest of all parameters of this rank.
        nonfinite: Parameters of this rank that have a NaN or an infinity.
        unchanged: Parameters of this rank that have not changed since the previous check.
        sent: Bytes that this rank sent.
        digests: The digest of each parameter of this rank.

    Example:
        >>> import torch
        >>> from isobit.guards import rank_agreement
        >>> agreement = rank_agreement(torch.nn.Linear(2, 2))  # on one rank
        >>> agreement.agreed, agreement.finite, agreement.parameters
        (True, True, 2)
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
    sent: int = 0
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def agreed(self) -> bool:
        """Whether every rank has the same bits."""
        return not self.differences

    @property
    def minority(self) -> tuple[int, ...]:
        """Ranks that differ from a majority in some parameter."""
        return tuple(sorted({d.rank for d in self.differences if not d.tied}))

    @property
    def kept(self) -> bool:
        """Whether the ranks agree, all numbers are finite, and parameters have changed since the previous check."""
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
    """Check that all ranks of a group have the same parameters, bit for bit. Every rank of the group must call this.

    While the ranks agree, each sends 25 bytes. If they differ, a majority vote per parameter decides which ranks are
    wrong, and a binary search finds their first wrong element.

    Args:
        replicated: A model, or named tensors.
        group: Ranks that must be equal; None is the world. For sharded parameters: the replicas of one shard.
        every: Check only each `every`-th step, and return None on the others.
        step: The number of the step, required if `every` is more than 1.
        on_difference: "raise", or "report" to return the differences.
        buffers: Whether to compare the buffers of a model too.
        since: The previous check, to find parameters that have stopped changing.
        most: The number of parameters whose first wrong element is searched for. All that differ are named.

    Returns:
        What was found, or None on a step that is not checked.

    Raises:
        AgreementError: If ranks differ; its attribute `agreement` is what was found.
        ArgumentError: If an argument is not supported, or the ranks of the group have different shards.
        UnsupportedError: If a rank could not read its parameters, or they changed during the check.

    Example:
        >>> import torch
        >>> from isobit.guards import rank_agreement
        >>> from isobit.simulator import World
        >>> def program(rank):
        ...     weight = torch.zeros(2, 3)
        ...     weight[1, 2] = float(rank == 3)
        ...     found = rank_agreement({"weight": weight}, on_difference="report")
        ...     return str(found.differences[0])
        >>> World(4).run(program).values[0]
        'rank 3, weight, bits at [1, 2]: 0x3f800000, not 0x00000000 as ranks 0–2'
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
    except Exception as error:  # compared like the others, as those would wait for this rank
        own = error
    changed = since is not None and isinstance(own, Replica) and own.digest != since.digest
    found, sent = carry(compare(own, members.index, changed, most), members)
    assert isinstance(own, Replica)
    agreement = conclude(own, found, members.ranks, since, sent)
    if agreement.differences and on_difference == "raise":
        raise disagreement_error(agreement)
    return agreement


def read(
    replicated: Replicated, buffers: bool
) -> tuple[Iterator[tuple[str, Tensor]], Mapping[int, object]]:
    """Return names and tensors, and the shard of each parameter."""
    if isinstance(replicated, nn.Module):
        named = [*replicated.named_parameters(), *(replicated.named_buffers() if buffers else ())]
        return iter(named), find_shards(replicated)
    return iter(replicated.items() if isinstance(replicated, Mapping) else replicated), {}


def carry(program: Talk[ReplicaComparison], members: RankGroup) -> tuple[ReplicaComparison, int]:
    """Exchange the messages of a rank's program until it ends; return its result and the bytes sent."""
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
    found: ReplicaComparison,
    ranks: tuple[int, ...],
    since: Agreement | None = None,
    sent: int = 0,
) -> Agreement:
    """Convert findings about members of the group into a record of ranks."""
    wrong = next((f for f in found.differences if f.what == "shard"), None)
    if wrong is not None:
        there, here = wrong.there or "whole", wrong.expected or "whole"
        raise ArgumentError(
            expected="a group of ranks that have the same shards",
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


def disagreement_error(agreement: Agreement) -> AgreementError:
    """Return an error that names the first differences."""
    shown = "; ".join(map(str, agreement.differences[:4]))
    more = len(agreement.differences) - 4
    tied = any(d.tied for d in agreement.differences)
    error = AgreementError(
        expected=f"the same bits on {len(agreement.ranks)} ranks",
        received=shown + (f"; and {more} more" if more > 0 else ""),
        remedy="look for a rank that skipped a collective, or for a flipped bit; restart from the last good check"
        + (
            "; where there is no majority, compare each group with that check to see which one is wrong"
            if tied
            else ""
        ),
    )
    error.agreement = agreement
    return error


# `replicated_tensors`: the tensors that every rank of a tensor-parallel group should have with the same bits.


def replicated_tensors(
    model: nn.Module, group: dist.ProcessGroup | None = None, sharded: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return the parameters and buffers that a tensor-parallel group does not shard: norms, biases, positions.

    Pass them to `rank_agreement` with the same group. Layer norms that differ between tensor-parallel ranks train on
    without an error: each rank clips or updates its own copy.

    Args:
        model: A model with isobit's shards, with DTensors, or sharded by hand.
        group: The tensor-parallel ranks; None is the world.
        sharded: Patterns of names that are sharded by hand, such as "*.qkv.weight".

    Returns:
        Tensors by name.

    Raises:
        ArgumentError: If none is left.

    Example:
        >>> from isobit.guards import replicated_tensors
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> list(replicated_tensors(model, sharded=["1.*"]))
        ['0.weight', '0.bias']
    """
    patterns, shards = tuple(sharded), find_shards(model)
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    found = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
        and is_replicated(tensor, shards, ranks)
    }
    if not found:
        raise ArgumentError(
            expected="a model with a tensor that the group does not shard",
            received=f"a model whose tensors are all sharded, or match {patterns}",
            remedy="pass patterns of the sharded names only",
        )
    return found


def is_replicated(tensor: Tensor, shards: dict[int, Any], ranks: list[int]) -> bool:
    """Return whether the ranks of a group have the same elements of a tensor."""
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        for axis, placement in enumerate(placements):
            if dist.get_process_group_ranks(mesh.get_group(axis)) == ranks:
                return bool(placement.is_replicate())
        return all(placement.is_replicate() for placement in placements)
    shard = find_record(tensor, shards)
    return shard is None or shard.parts == 1
