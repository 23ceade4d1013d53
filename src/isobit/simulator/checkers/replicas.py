"""Replicas: ranks that train copies of one model, compared bit for bit at every step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from isobit.foundation.majority import count_votes, name_ranks
from isobit.simulator.checkers.habits import check_habits
from isobit.simulator.checkers.step_record import Start, Step, describe_difference, digest
from isobit.simulator.collectives import Call
from isobit.simulator.findings import TrainingFinding

# Data-parallel ranks: which ranks are to train on different batches, although no two hold the same
# parameters.
#
# [Note: who may share a batch]
# Shards show nothing about data: FSDP's ranks and tensor-parallel ranks both hold a part of each
# tensor. The collectives do. FSDP and DDP reduce gradients over a group: its members are data
# parallel. Ranks that exchange activations in a forward pass (tensor, sequence, context or expert
# parallel) may be given one batch, so they count as one of them. On a mesh of 2 × 2, data × tensor,
# FSDP reduces over {0, 2} and {1, 3}, and activations pass within {0, 1} and {2, 3}: ranks 0 and 2
# are compared, and so are 1 and 3. Replicas, which start with equal parameters, need no such
# evidence.

FSDP = "distributed/fsdp/"
SYNC_BATCH_NORM = (
    "nn/modules/_functions.py"  # statistics of different batches, not activations of one
)
DTENSOR = "distributed/tensor/"
ACTIVATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class DataParallel:
    """The groups of ranks that reduce gradients, and those that exchange activations.

    Attributes:
        reducing: Groups over which FSDP or DDP reduces gradients.
        exchanging: Groups with a collective in a forward pass.
        tensor_parallel: Those of them that DTensor made.
    """

    def __init__(self) -> None:
        """Start without any group."""
        self.reducing: set[tuple[int, ...]] = set()
        self.exchanging: set[tuple[int, ...]] = set()
        self.tensor_parallel: set[tuple[int, ...]] = set()

    def note_call(self, call: Call, in_forward: bool) -> None:
        """Note what a collective shows of its group."""
        if len(call.members) < 2:
            return
        if call.torchs_file.startswith(FSDP):
            if call.kind in ("reduce_scatter", "all_reduce") and not in_forward:
                self.reducing.add(call.members)
        elif in_forward and call.kind in ACTIVATIONS and call.torchs_file != SYNC_BATCH_NORM:
            self.exchanging.add(call.members)
            if call.torchs_file.startswith(DTENSOR):
                self.tensor_parallel.add(call.members)

    def note_module(self, module: nn.Module) -> None:
        """Note the group of DDP, whose C++ code makes its collectives."""
        if isinstance(module, DistributedDataParallel):
            self.reducing.add(tuple(sorted(get_process_group_ranks(module.process_group))))

    def groups(self) -> list[tuple[int, ...]]:
        """Return the largest sets of ranks that are data parallel to each other."""
        return connect({rank for group in self.reducing for rank in group}, self.reducing)


def connect(ranks: Collection[int], groups: Iterable[Collection[int]]) -> list[tuple[int, ...]]:
    """Return the ranks in sets that groups connect.

    Example:
        >>> connect([0, 1, 2, 3, 4], [(0, 1), (1, 2)])
        [(0, 1, 2), (3,), (4,)]
    """
    sets = {rank: {rank} for rank in ranks}
    for group in groups:
        joined = set().union(*(sets[rank] for rank in group if rank in sets))
        sets.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(each)) for each in sets.values()})


Pair = frozenset[int]


def find_replicas(
    starts: Mapping[int, Start], talked: Iterable[Pair] = ()
) -> list[tuple[int, ...]]:
    """Return the groups of ranks whose optimizers started with the same parameters, bit for bit.

    Shards and pipeline stages are not replicas, though some of their tensors may be equal at the start: biases of
    zeros are. So all parameters must be equal, one of them must be more than a constant, and no two ranks of a group
    may send each other messages, as stages do.
    """
    alike = {rank: (start.digests, start.shapes) for rank, start in starts.items() if start.varied}
    groups = [group for group in count_votes(alike).groups if len(group) > 1]
    return [group for group in groups if not any(pair <= set(group) for pair in talked)]


def find_strangers(starts: Mapping[int, Start], steps: Mapping[int, Step]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that sum gradients of parameters which were different at the start.

    Such a gradient is the result of an all-reduce, has the same bits on two ranks and more than one value: a shard's
    has not.
    """
    groups: set[tuple[int, ...]] = set()
    shapes = {rank: starts[rank].shapes for rank in steps if starts[rank].varied}
    for alike in count_votes(shapes).groups:
        for at in range(len(starts[alike[0]].shapes)):
            summed = {
                rank: steps[rank].gradients[at]
                for rank in alike
                if steps[rank].summed[at] and steps[rank].varied[at]
            }
            for group in count_votes(summed).groups:
                if len({starts[rank].digests[at] for rank in group}) > 1:
                    groups.add(group)
    return [group for group in groups if not any(set(group) < set(other) for other in groups)]


def check_start(starts: Mapping[int, Start], steps: Mapping[int, Step]) -> TrainingFinding:
    """Report parameters of `find_strangers` that were different at the start."""
    ranks = sorted(steps)
    columns = list(zip(*(starts[rank].digests for rank in ranks), strict=True))
    at = next(
        i
        for i, column in enumerate(columns)
        if len(set(column)) > 1 and all(steps[rank].summed[i] for rank in ranks)
    )
    vote = count_votes(dict(zip(ranks, columns[at], strict=True)))
    name = steps[ranks[0]].names[at]
    text = f"{name} was not equal before the first step: {vote}; its gradients are summed over these ranks"
    return TrainingFinding("start differs", vote.suspects, text)


def check_settings(steps: Mapping[int, Step], step: int) -> TrainingFinding | None:
    """Find replicas that update with different numbers, where their parameters cannot show it."""
    vote = count_votes({rank: note.settings for rank, note in steps.items()})
    if vote.is_unanimous:
        return None
    text = f"the optimizer of some replicas differs at step {step}: {describe_settings(steps)}"
    return TrainingFinding("update differs", vote.suspects, text)


def describe_settings(steps: Mapping[int, Step]) -> str:
    """Return the first number of the optimizers that differs between ranks, in words, or nothing."""
    settings = {rank: dict(note.settings) for rank, note in steps.items()}
    for name in dict(next(iter(steps.values())).settings):
        vote = count_votes({rank: each.get(name) for rank, each in settings.items()})
        if not vote.is_unanimous:
            return ", ".join(
                f"{name} {settings[group[0]].get(name)} on {name_ranks(group)}"
                for group in vote.groups[:4]
            )
    return ""


def check_unreduced(
    steps: Mapping[int, Step], step: int, apart: Collection[int]
) -> TrainingFinding | None:
    """Find a gradient that differs and is in no all-reduce, among parameters whose values differ already."""
    notes = list(steps.values())
    reduced = [at for at in range(len(notes[0].gradients)) if all(n.summed[at] for n in notes)]
    left = [
        at
        for at in sorted(apart)
        if len({note.gradients[at] for note in notes}) > 1
        and not any(note.summed[at] for note in notes)
    ]
    if not left or not reduced:
        return None
    vote = count_votes({rank: note.gradients[left[0]] for rank, note in steps.items()})
    text = (
        f"the gradient of {list_names(notes[0].names, left)} differs at step {step}: {vote}; it is not summed over "
        f"ranks, as those of {len(reduced)} other parameters are (right only for a shard that each rank has alone)"
    )
    return TrainingFinding("gradients differ", vote.suspects, text)


def list_names(names: Sequence[str], which: Sequence[int], most: int = 3) -> str:
    """Return the names of parameters in words, the first few of them."""
    shown = ", ".join(names[at] for at in which[:most])
    return shown + (f" and {len(which) - most} more" if len(which) > most else "")


def check_pending(steps: Mapping[int, Step], step: int) -> TrainingFinding | None:
    """Find an update that uses a gradient before `wait()` on its reduction."""
    early = {rank: note.pending for rank, note in steps.items() if note.pending}
    if not early:
        return None
    ranks = tuple(sorted(early))
    what = early[ranks[0]]
    return TrainingFinding("pending", ranks, f"step {step} uses {what} before wait()")


def check_finite(steps: Mapping[int, Step], step: int) -> TrainingFinding | None:
    """Find a gradient that is not finite, and the ranks that put it into the sum."""
    infinite = {rank: note.infinite for rank, note in steps.items() if note.infinite is not None}
    if not infinite:
        return None
    guilty = tuple(sorted(rank for rank, note in steps.items() if note.poisoned)) or tuple(
        sorted(infinite)
    )
    rank, at = min(infinite.items())
    name = steps[rank].names[at]
    return TrainingFinding(
        "not finite", guilty, f"the gradient of {name} is not finite at step {step}"
    )


def check_data(
    steps: Mapping[int, Step],
    step: int,
    before: Mapping[int, Step] | None,
    exchanging: Iterable[Collection[int]] = (),
) -> TrainingFinding | None:
    """Find data-parallel ranks that trained on the same batch.

    If all ranks did, it may be intended, as in tests of wrappers: then it is reported only if the batch changes.

    Args:
        steps: The steps of ranks that are data parallel.
        step: The number of the step.
        before: The steps before.
        exchanging: Groups of ranks that exchange activations, and may share a batch.
    """
    fed = {rank: note.data for rank, note in steps.items() if note.data}
    alike = [group for group in count_votes(fed).groups if len(connect(group, exchanging)) > 1]
    if not alike or is_one_batch(steps, before):
        return None
    ranks = tuple(sorted(rank for group in alike for rank in group))
    text = f"the same batch on ranks {count_votes({r: fed[r] for r in ranks})} at step {step}"
    return TrainingFinding("data alike", ranks, text)


def is_one_batch(steps: Mapping[int, Step], before: Mapping[int, Step] | None) -> bool:
    """Return whether all ranks trained on one batch, and on the same one in the step before, if there was one."""
    fed = {rank: note.data for rank, note in steps.items()}
    return len(set(fed.values())) == 1 and (
        before is None or all(before[r].data == fed[r] for r in fed if r in before)
    )


def check_masks(steps: Mapping[int, Step], step: int) -> TrainingFinding | None:
    """Find replicas that train on different batches with the same dropout masks."""
    drawn = {rank: note.masks for rank, note in steps.items() if note.masks}
    groups = count_votes(drawn).groups
    for group in groups:
        if len(group) > 1 and len({steps[rank].data for rank in group}) == len(group):
            ranks = tuple(sorted(r for g in groups if len(g) > 1 for r in g))
            alike = count_votes({r: drawn[r] for r in ranks})
            text = f"dropout draws the same masks on ranks {alike} at step {step}"
            return TrainingFinding("random numbers alike", ranks, text)
    return None


def find_apart(steps: Mapping[int, Step]) -> set[int]:
    """Return the parameters that differ between ranks after a step."""
    count = len(next(iter(steps.values())).values)
    return {at for at in range(count) if len({note.values[at] for note in steps.values()}) > 1}


def check_values(
    steps: Mapping[int, Step], step: int, apart: Collection[int] = ()
) -> Iterator[TrainingFinding]:
    """Find parameters that differ after a step, because of their gradients or because of the update.

    Gradients may differ if the optimizer reduces them itself. After an all-reduce they may not: then they are reported
    even if the update rounds the difference away.

    Args:
        steps: The steps of replicas.
        step: The number of the step.
        apart: Parameters that differed before the step.
    """
    count = len(next(iter(steps.values())).values)
    by_value = sorted(find_apart(steps) - set(apart))
    by_gradient = [
        at for at in range(count) if len({note.gradients[at] for note in steps.values()}) > 1
    ]
    reduced = all(all(note.summed) for note in steps.values())
    different = by_value or (by_gradient if reduced and not apart else [])
    caused = [at for at in different if at in by_gradient]
    others = [at for at in different if at not in by_gradient]
    settings = describe_settings(steps)
    if caused:
        yield differing_values(
            steps, step, caused, by_value, "gradients differ", "its gradient differs"
        )
    if others:
        why = "gradients were equal, the update was not"
        why += f" ({settings})" if settings else ""
        found = differing_values(steps, step, others, by_value, "update differs", why)
        # An optimizer such as LBFGS moves every parameter by the gradients of all.
        yield replace(found, follows="gradients differ" if caused and not settings else "")


def differing_values(
    steps: Mapping[int, Step],
    step: int,
    which: Sequence[int],
    by_value: Sequence[int],
    kind: str,
    why: str,
) -> TrainingFinding:
    """Report parameters that differ after a step."""
    at = which[0]
    held = {
        r: n.gradients[at] if kind == "gradients differ" else n.values[at] for r, n in steps.items()
    }
    vote = count_votes(held)
    left, right = steps[vote.groups[0][0]], steps[vote.groups[1][0]]
    name, place = left.names[at], describe_difference(left.kept[at], right.kept[at])
    more = f"; so do {list_names(left.names, which[1:])}" if len(which) > 1 else ""
    text = f"{name} differs at step {step}, {place}; {why}: {vote}{more}"
    if not by_value:
        text = f"the gradient of {name} differs at step {step} after an all-reduce: {vote}{more}"
    return TrainingFinding(kind, vote.suspects, text)


def check_tensor(
    held: Mapping[int, Tensor], name: str, count: int, alike: bool
) -> TrainingFinding | None:
    """Check a tensor that `probe.same` (`alike`) or `probe.distinct` has shown on each rank."""
    vote = count_votes({rank: digest(tensor) for rank, tensor in held.items()})
    if alike and not vote.is_unanimous:
        place = describe_difference(held[vote.groups[0][0]], held[vote.groups[1][0]])
        text = f"{name}, probe {count}, differs {place}: {vote}"
        return TrainingFinding("tensors differ", vote.suspects, text)
    if not alike and len(vote.groups) < len(held):
        ranks = tuple(sorted(rank for group in vote.groups if len(group) > 1 for rank in group))
        text = f"{name}, probe {count}, is the same on some ranks: {vote}"
        return TrainingFinding("tensors alike", ranks, text)
    return None


@dataclass
class Compared:
    """What was compared in the steps of a run.

    Attributes:
        replicas: Ranks whose parameters were compared with those of another rank.
        fed: Ranks whose batches were.
        one_batch: Ranks that had one batch at every step so far.
        sharing: Ranks that had the batch of another one, with which they exchange activations.
        apart: By optimizer and group, the parameters that differ between its ranks.
    """

    replicas: set[int] = field(default_factory=set)
    fed: set[int] = field(default_factory=set)
    one_batch: set[int] = field(default_factory=set)
    sharing: set[int] = field(default_factory=set)
    apart: dict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=dict)


def check_step(
    steps: Mapping[int, Step],
    starts: Mapping[int, Start],
    key: tuple[int, int],
    before: Mapping[int, Step] | None,
    talked: Iterable[Pair],
    parallel: DataParallel,
    compared: Compared,
) -> Iterator[TrainingFinding]:
    """Find everything wrong with a step, causes before their consequences.

    Args:
        steps: The step of each rank.
        starts: The parameters of each rank before its first step.
        key: The number of the optimizer, and of the step.
        before: The steps before.
        talked: Pairs of ranks that send each other messages.
        parallel: Which ranks are data parallel, and which exchange activations.
        compared: What was compared; it is extended.
    """
    ordinal, step = key
    found = [check_pending(steps, step), check_finite(steps, step)]
    mine: Mapping[int, Step]
    strangers = find_strangers(starts, steps) if step == 0 else []
    for group in strangers:
        mine = {rank: steps[rank] for rank in group}
        found.append(check_start(starts, mine))
        compared.apart[ordinal, group] = set(range(len(steps[group[0]].names)))
    found += check_habits({rank: note.habits for rank, note in steps.items()}, step)
    own = {rank: starts[rank] for rank in steps}
    replicas = find_replicas(own, talked)
    known = {group for number, group in compared.apart if number == ordinal}
    for group in dict.fromkeys([*replicas, *sorted(known - set(replicas))]):
        mine = {rank: steps[rank] for rank in group if rank in steps}
        if len(mine) < 2:
            continue
        compared.replicas |= set(mine)
        apart = compared.apart.get((ordinal, group), set())
        found += check_values(mine, step, apart)
        if group not in replicas:
            found.append(check_settings(mine, step))
        found.append(check_unreduced(mine, step, apart))
        if group in replicas:
            compared.apart[ordinal, group] = find_apart(mine)
    shared = parallel.tensor_parallel
    for group, exempt in [
        *((group, shared) for group in dict.fromkeys([*replicas, *known])),
        *((group, parallel.exchanging) for group in parallel.groups()),
    ]:
        mine = {rank: steps[rank] for rank in group if rank in steps}
        found += check_batches(mine, step, before, exempt, compared)
    for finding in found:
        if finding is not None:
            yield replace(finding, sites={rank: steps[rank].site for rank in finding.ranks})


def check_batches(
    steps: Mapping[int, Step],
    step: int,
    before: Mapping[int, Step] | None,
    exchanging: Iterable[Collection[int]],
    compared: Compared,
) -> Iterator[TrainingFinding | None]:
    """Find data-parallel ranks with one batch, or with one dropout mask for different batches."""
    fed = {rank: note for rank, note in steps.items() if note.data}
    if len(fed) < 2:
        return
    clusters = connect(list(fed), exchanging)
    for cluster in clusters:  # of ranks that may share a batch
        alike = count_votes({rank: fed[rank].data for rank in cluster}).groups
        compared.sharing |= {rank for group in alike if len(group) > 1 for rank in group}
    if len(clusters) < 2:
        return
    if is_one_batch(fed, before):
        compared.one_batch |= set(fed)
    else:
        compared.fed |= set(fed)
        yield check_data(fed, step, before, exchanging)
    yield check_masks({cluster[0]: fed[cluster[0]] for cluster in clusters}, step)
