"""Check that the micro-batches of a step are parts of one batch: every target has the same weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from isobit.guards.trial_run.judging import Found, NotJudged
from isobit.guards.trial_run.loss_calls import LossCall

NEAR = 1e-3  # relative; losses of 16 bits round factors
SHOWN = 8


@dataclass(frozen=True)
class Share:
    """What the losses of one micro-batch add to the step.

    Attributes:
        count: Their targets.
        low: The smallest weight of a target.
        high: The largest.
        total: The weights of all targets.
        is_mean: Whether the loss functions divided by their number of targets themselves.
    """

    count: float
    low: float
    high: float
    total: float
    is_mean: bool


def share_of(calls: list[LossCall]) -> Share:
    """Return the share of a micro-batch from its calls."""
    found = [call.weights() for call in calls]
    counts = [
        float(w.numel()) if call.reduction == "none" else call.count
        for call, w in zip(calls, found, strict=True)
    ]
    totals = [
        float(w.sum()) if call.reduction == "none" else float(w) * call.count
        for call, w in zip(calls, found, strict=True)
    ]
    weights = torch.cat(found)
    low, high = (float(weights.min()), float(weights.max())) if len(weights) else (0.0, 0.0)
    is_mean = all(call.reduction == "mean" for call in calls)
    return Share(sum(counts), low, high, sum(totals), is_mean)


def are_near(values: Iterable[float]) -> bool:
    """Return whether numbers are equal but for rounding."""
    held = list(values)
    return max(held) - min(held) <= NEAR * max(map(abs, held))


def targets_weigh_the_same(
    losses: list[LossCall],
    rows: list[list[int]],
    unknown: str = "",
    taken: list[dict[int, int]] | None = None,
) -> Iterator[Found]:
    """Yield a finding if the loss is averaged per micro-batch, over unequal numbers of targets, or not divided.

    Args:
        losses: The loss calls of the run.
        rows: Per step, the rows of each call of a model.
        unknown: Why another loss is not among them.
        taken: Per step, the batches that were taken from each iterator of a DataLoader.

    Raises:
        NotJudged: If no step of the run can show it.
    """
    used = [call for call in losses if call.factor is not None]
    if not used:
        raise NotJudged(
            f"{unknown or 'no loss was differentiated'}; isobit.guards.micro_batch_invariance takes any loss"
        )
    reasons = ["micro-batches of a step have different losses"]
    is_judged = False
    for step in sorted({call.step for call in used}):
        calls = [call for call in used if call.step == step]
        if any(call.is_derived for call in calls) and not has_one_call_each(calls, rows[step]):
            reasons.append("the rows of micro-batches are not known, or a backward has several")
            continue
        groups = shares_of_step(calls)
        for shares in groups:
            reason, wrong = judge(step, shares, set(rows[step]))
            if wrong:
                yield "per-micro-batch-mean", "error", wrong
                return
        for shares in groups[:1]:
            if is_undivided(shares, rows[step], taken[step] if taken else {}):
                yield (
                    "loss-not-divided",
                    "warning",
                    f"step {step} adds up the mean losses of {len(shares)} micro-batches, each a batch of the loader, "
                    f"with the weight 1: its gradients are {len(shares)} times those of their mean; divide the loss by "
                    f"{len(shares)}",
                    step,
                )
                return
        for shares in groups:
            reason, _ = judge(step, shares, set(rows[step]))
            is_judged = is_judged or not reason
            reasons.append(reason)
    if not is_judged:
        raise NotJudged(reasons[1] if len(reasons) > 1 else reasons[0])


def is_undivided(shares: list[Share], rows: list[int], taken: dict[int, int]) -> bool:
    """Return whether a step sums means that accumulation should average.

    Several backward passes may also be several losses, as those of a discriminator. So each must follow a call of the
    model with a batch of its own, out of one loader.
    """
    return (
        len(shares) > 1
        and len(shares) == len(rows) == max(taken.values(), default=0)
        and all(share.count > 1 and are_near((share.total, 1.0)) for share in shares)
    )


def has_one_call_each(calls: list[LossCall], rows: list[int]) -> bool:
    """Return whether each backward of a step follows one call of a model, with two rows or more.

    What a loss without a name averages over may else be one sample, or one moment of an episode.
    """
    return len({call.backward for call in calls}) == len(rows) and min(rows) > 1


def shares_of_step(calls: list[LossCall]) -> list[list[Share]]:
    """Return, for each loss of a micro-batch, its shares in all micro-batches of a step; none if losses vary."""
    batches: dict[int | None, list[LossCall]] = {}
    for call in calls:
        batches.setdefault(call.backward, []).append(call)
    groups = list(batches.values())
    kinds = {tuple((call.kind, call.classes) for call in group) for group in groups}
    if len(kinds) == 1:
        return [[share_of([group[at]]) for group in groups] for at in range(len(groups[0]))]
    if len({kind for each in kinds for kind in each}) == 1:  # one loss, in pieces
        return [[share_of(group) for group in groups]]
    return []


def ranks_weigh_the_same(losses: list[list[LossCall]]) -> Iterator[Found]:
    """Yield a finding if the loss is averaged per rank, over unequal numbers of targets.

    Args:
        losses: The loss calls of each rank.

    Raises:
        NotJudged: If the first step cannot show it.
    """
    used = [[c for c in calls if c.factor is not None and c.step == 0] for calls in losses]
    if not all(used):
        raise NotJudged("not every rank differentiated a loss that is known")
    reason, wrong = judge(0, [share_of(calls) for calls in used], set(), "rank")
    if reason:
        raise NotJudged(reason)
    if wrong:
        yield "per-rank-mean", "warning", wrong


def judge(
    step: int, shares: list[Share], rows: set[int], part: str = "micro-batch"
) -> tuple[str, str]:
    """Return why shares of one loss cannot be judged, or what is wrong with them; two empty strings if nothing is."""
    if len(shares) < 2:
        return "one backward per step: nothing is accumulated", ""
    if any(not share.count or not share.total for share in shares):
        return f"a {part} has no target that counts", ""
    counts = [share.count for share in shares]
    if are_near(counts):
        return (
            f"every {part} has {counts[0]:g} targets; only unequal numbers show how they are weighted",
            "",
        )
    if not all(are_near((share.low, share.high)) for share in shares):
        return f"targets of one {part} have different weights", ""
    if are_near([share.high for share in shares]):
        return "", ""
    if not are_near([share.total for share in shares]):
        return f"the weight of a {part} follows neither their number nor its targets", ""
    if rows == {1} and not all(share.is_mean for share in shares):
        return (
            "every micro-batch has one row: a mean per row and one per micro-batch are the same; try two rows",
            "",
        )
    plural = "ranks" if part == "rank" else f"{part}es"
    every, given = sum(counts), sum(share.total for share in shares)
    found = ", ".join(f"{share.total / given:.4g}" for share in shares[:SHOWN])
    due = ", ".join(f"{count:g}/{every:g}" for count in counts[:SHOWN])
    return "", (
        f"the normaliser is per {part}: in step {step} the losses of {len(shares)} {plural} have the "
        f"weights {found}; their targets ask for {due}. With other {plural} the same batch trains "
        "differently: divide the sum of the losses by the targets of the whole step"
    )
