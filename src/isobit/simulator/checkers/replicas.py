"""Replicas: ranks that train copies of one model, compared bit for bit at every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from isobit.majority import count_votes
from isobit.simulator.checkers.habits import check_habits
from isobit.simulator.checkers.step_record import Start, Step, describe_difference, digest
from isobit.simulator.checkers.training_findings import TrainingFinding

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


def check_start(starts: Mapping[int, Start], steps: Mapping[int, Step]) -> TrainingFinding | None:
    """Find parameters that were different at the start, although their gradients are summed over ranks."""
    shared = {
        rank: step.gradients for rank, step in steps.items() if step.summed and starts[rank].varied
    }
    for group in count_votes(shared).groups:
        values = {rank: (starts[rank].digests, starts[rank].shapes) for rank in group}
        if len(group) < 2 or count_votes(values).is_unanimous:
            continue
        at = next(
            i
            for i, column in enumerate(zip(*(values[r][0] for r in group), strict=True))
            if len(set(column)) > 1
        )
        vote = count_votes({rank: values[rank][0][at] for rank in group})
        name = steps[group[0]].names[at]
        text = f"{name} was not equal before the first step: {vote}; its gradients are summed over these ranks"
        return TrainingFinding("start differs", vote.suspects, text)
    return None


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
    steps: Mapping[int, Step], step: int, before: Mapping[int, Step] | None
) -> TrainingFinding | None:
    """Find replicas that trained on the same batch.

    If all ranks did, it may be intended, as in tests of wrappers: then it is reported only if the batch changes.
    """
    fed = {rank: note.data for rank, note in steps.items() if note.data}
    alike = [group for group in count_votes(fed).groups if len(group) > 1]
    if not alike:
        return None
    if len(alike[0]) == len(steps) and (
        before is None or all(before[r].data == fed[r] for r in fed if r in before)
    ):
        return None
    ranks = tuple(sorted(rank for group in alike for rank in group))
    text = f"the same batch on ranks {count_votes({r: fed[r] for r in ranks})} at step {step}"
    return TrainingFinding("data alike", ranks, text)


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


def check_values(steps: Mapping[int, Step], step: int) -> TrainingFinding | None:
    """Find parameters that differ after a step, because of their gradients or because of the update.

    Gradients may differ if the optimizer reduces them itself. After an all-reduce they may not: then they are reported
    even if the update rounds the difference away.
    """
    count = len(next(iter(steps.values())).values)
    by_value = [at for at in range(count) if len({note.values[at] for note in steps.values()}) > 1]
    by_gradient = [
        at for at in range(count) if len({note.gradients[at] for note in steps.values()}) > 1
    ]
    different = by_value or (by_gradient if all(note.summed for note in steps.values()) else [])
    if not different:
        return None
    by_gradient = [at for at in by_gradient if at in different]
    at = (by_gradient or different)[0]
    vote = count_votes(
        {rank: (note.gradients if by_gradient else note.values)[at] for rank, note in steps.items()}
    )
    left, right = steps[vote.groups[0][0]], steps[vote.groups[1][0]]
    name = left.names[at]
    place = describe_difference(left.kept[at], right.kept[at])
    why = "its gradient differs" if by_gradient else "gradients were equal, the update was not"
    text = f"{name} differs at step {step}, {place}; {why}: {vote}"
    if not by_value:
        text = f"the gradient of {name} differs at step {step} after an all-reduce: {vote}"
    kind = "gradients differ" if by_gradient else "update differs"
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


def check_step(
    steps: Mapping[int, Step],
    starts: Mapping[int, Start],
    step: int,
    before: Mapping[int, Step] | None,
    talked: Iterable[Pair],
) -> Iterator[TrainingFinding]:
    """Find everything wrong with a step, causes before their consequences."""
    found = [
        check_pending(steps, step),
        check_finite(steps, step),
        check_start(starts, steps) if step == 0 else None,
    ]
    found += check_habits({rank: note.habits for rank, note in steps.items()}, step)
    for group in find_replicas({rank: starts[rank] for rank in steps}, talked):
        mine = {rank: steps[rank] for rank in group}
        found += [check_data(mine, step, before), check_masks(mine, step), check_values(mine, step)]
    for finding in found:
        if finding is not None:
            yield replace(finding, sites={rank: steps[rank].site for rank in finding.ranks})
