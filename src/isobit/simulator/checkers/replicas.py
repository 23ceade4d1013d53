"""Judges one step of replicas: what each rank noted of it, compared bit for bit, and the ranks to blame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from isobit.simulator.checkers.odd_ranks import (
    digest,
    find_odd,
    group_ranks,
    say_difference,
    say_groups,
)
from isobit.simulator.checkers.training_errors import Told

Pair = frozenset[int]


@dataclass(frozen=True)
class Start:
    """What a rank's optimizer began with: digests of its parameters, and whether any is more than a constant."""

    digests: tuple[str, ...]
    shapes: tuple[str, ...]
    varied: bool


@dataclass
class Step:
    """What a rank noted of one step of an optimizer."""

    parameters: list[Tensor]
    names: tuple[str, ...]
    gradients: tuple[str, ...]
    infinite: int | None
    """The first parameter whose gradient is not finite."""
    summed: bool
    """Whether an all-reduce summed into every gradient."""
    poisoned: bool
    """Whether this rank put a number that is not finite into a sum."""
    data: tuple[str, ...]
    masks: tuple[str, ...]
    pending: str = ""
    """The gradient that a collective still owns, and which."""
    site: str = ""
    values: tuple[str, ...] = ()
    kept: tuple[Tensor | None, ...] = ()


def find_replicas(
    starts: Mapping[int, Start], talked: Iterable[Pair] = ()
) -> list[tuple[int, ...]]:
    """Ranks whose optimizers began alike in every bit.

    Shards and pipeline stages are not replicas though some of their tensors may begin alike: biases of zeros do.
    So the whole list must agree, hold more than constants, and no two of them may send each other messages, as
    stages do.
    """
    alike = {rank: (start.digests, start.shapes) for rank, start in starts.items() if start.varied}
    groups = [group for group in group_ranks(alike) if len(group) > 1]
    return [group for group in groups if not any(pair <= set(group) for pair in talked)]


def judge_start(starts: Mapping[int, Start], steps: Mapping[int, Step]) -> Told | None:
    """Parameters that differ from the start although their gradients are summed over the ranks that hold them."""
    shared = {
        rank: step.gradients for rank, step in steps.items() if step.summed and starts[rank].varied
    }
    for group in group_ranks(shared):
        values = {rank: (starts[rank].digests, starts[rank].shapes) for rank in group}
        if len(group) < 2 or len(group_ranks(values)) == 1:
            continue
        at = next(
            i
            for i, column in enumerate(zip(*(values[r][0] for r in group), strict=True))
            if len(set(column)) > 1
        )
        held = {rank: values[rank][0][at] for rank in group}
        name = steps[group[0]].names[at]
        text = (
            f"{name} was not equal before the first step: {say_groups(held)}; "
            "its gradients are summed over these ranks"
        )
        return Told("start differs", find_odd(held), name, text)
    return None


def judge_pending(steps: Mapping[int, Step], step: int) -> Told | None:
    """An update with a gradient whose reduction nobody waited for."""
    early = {rank: note.pending for rank, note in steps.items() if note.pending}
    if not early:
        return None
    ranks = tuple(sorted(early))
    return Told(
        "pending",
        ranks,
        early[ranks[0]],
        f"step {step} updates with {early[ranks[0]]}, not waited for",
    )


def judge_finite(steps: Mapping[int, Step], step: int) -> Told | None:
    """A gradient that is not finite, and who brought it."""
    infinite = {rank: note.infinite for rank, note in steps.items() if note.infinite is not None}
    if not infinite:
        return None
    guilty = tuple(sorted(rank for rank, note in steps.items() if note.poisoned)) or tuple(
        sorted(infinite)
    )
    rank, at = min(infinite.items())
    name = steps[rank].names[at]
    return Told("not finite", guilty, name, f"the gradient of {name} is not finite at step {step}")


def judge_data(
    steps: Mapping[int, Step], step: int, before: Mapping[int, Step] | None
) -> Told | None:
    """Replicas that trained on one batch. Where all did, it may be meant: only a stream of such batches is told."""
    fed = {rank: note.data for rank, note in steps.items() if note.data}
    alike = [group for group in group_ranks(fed) if len(group) > 1]
    if not alike:
        return None
    if len(alike[0]) == len(steps) and (
        before is None or all(before[r].data == fed[r] for r in fed if r in before)
    ):
        return None
    ranks = tuple(sorted(rank for group in alike for rank in group))
    text = f"the same batch on ranks {say_groups({r: fed[r] for r in ranks})} at step {step}"
    return Told("data alike", ranks, "batch", text)


def judge_masks(steps: Mapping[int, Step], step: int) -> Told | None:
    """Replicas with batches of their own that drop the same elements."""
    drawn = {rank: note.masks for rank, note in steps.items() if note.masks}
    for group in group_ranks(drawn):
        if len(group) > 1 and len({steps[rank].data for rank in group}) == len(group):
            ranks = tuple(sorted(r for g in group_ranks(drawn) if len(g) > 1 for r in g))
            text = f"dropout draws the same masks on ranks {say_groups({r: drawn[r] for r in ranks})} at step {step}"
            return Told("random numbers alike", ranks, "dropout", text)
    return None


def judge_values(steps: Mapping[int, Step], step: int) -> Told | None:
    """Parameters that part: by their gradients, or by the update alone.

    Gradients may differ where the update reduces them itself. Not after an all-reduce: then they are told even if
    the update rounds the difference away.
    """
    count = len(next(iter(steps.values())).values)
    by_value = [at for at in range(count) if len({note.values[at] for note in steps.values()}) > 1]
    by_gradient = [
        at for at in range(count) if len({note.gradients[at] for note in steps.values()}) > 1
    ]
    parted = by_value or (by_gradient if all(note.summed for note in steps.values()) else [])
    if not parted:
        return None
    by_gradient = [at for at in by_gradient if at in parted]
    at = (by_gradient or parted)[0]
    held = {
        rank: (note.gradients if by_gradient else note.values)[at] for rank, note in steps.items()
    }
    groups = group_ranks(held)
    left, right = steps[groups[0][0]], steps[groups[1][0]]
    name = left.names[at]
    place = say_difference(left.kept[at], right.kept[at])
    what = "its gradient differs" if by_gradient else "gradients were equal, the update was not"
    text = f"{name} parts at step {step}, {place}; {what}: {say_groups(held)}"
    if not by_value:
        text = (
            f"the gradient of {name} differs at step {step} after an all-reduce: {say_groups(held)}"
        )
    return Told("gradients differ" if by_gradient else "update differs", find_odd(held), name, text)


def judge_tensor(held: Mapping[int, Tensor], name: str, count: int, alike: bool) -> Told | None:
    """A tensor that a script says is the same on all ranks, or distinct."""
    digests = {rank: digest(tensor) for rank, tensor in held.items()}
    groups = group_ranks(digests)
    if alike and len(groups) > 1:
        place = say_difference(held[groups[0][0]], held[groups[1][0]])
        return Told(
            "tensors differ",
            find_odd(digests),
            name,
            f"{name}, time {count}, {place}: {say_groups(digests)}",
        )
    if not alike and len(groups) < len(held):
        ranks = tuple(sorted(rank for group in groups if len(group) > 1 for rank in group))
        return Told(
            "tensors alike",
            ranks,
            name,
            f"{name}, time {count}, is the same on ranks: {say_groups(digests)}",
        )
    return None


def judge_step(
    steps: Mapping[int, Step],
    starts: Mapping[int, Start],
    step: int,
    before: Mapping[int, Step] | None,
    talked: Iterable[Pair],
) -> Iterator[Told]:
    """What is wrong with a step, causes before consequences."""
    found = [
        judge_pending(steps, step),
        judge_finite(steps, step),
        judge_start(starts, steps) if step == 0 else None,
    ]
    for group in find_replicas({rank: starts[rank] for rank in steps}, talked):
        mine = {rank: steps[rank] for rank in group}
        found += [judge_data(mine, step, before), judge_masks(mine, step), judge_values(mine, step)]
    for told in found:
        if told is not None:
            yield replace(told, sites={rank: steps[rank].site for rank in told.ranks})
