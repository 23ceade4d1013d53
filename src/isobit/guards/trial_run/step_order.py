"""Record which gradients optimizers have read, at which rates, and what was clipped when.

[Note: gradients that were read]
After a step, the gradient of each parameter is remembered by identity and version, without being kept alive. If the
same gradient is seen again, unchanged, nothing was added to it: a second optimizer that reads it applies one gradient
twice, and clipping it changes what no optimizer will read. A backward in between changes the version, and clearing
replaces the tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.weak import TensorWeakRef

from isobit.guards.live.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.losses import LossCall
from isobit.guards.trial_run.report import Found, NotJudged

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def rate_of(group: dict[str, Any]) -> float:
    """Return the learning rate of a group; NaN if it has none, as Adafactor's, which chooses its own."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


class StepOrder:
    """Steps and clippings of a program, in their order, recorded while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.

    Attributes:
        rates: By optimizer, the largest learning rate of its groups, per step.
        read: By id of a parameter, the optimizer that read its gradient last, the gradient, and its version.
        twice: Parameters, by id, whose gradient a second optimizer read, with both classes.
        late: Parameters, by id, whose gradient was clipped after the step that read it, and not before.
        clips: Calls that clip.
    """

    def __init__(self, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self.rates: dict[torch.optim.Optimizer, list[float]] = {}
        self.read: dict[int, tuple[torch.optim.Optimizer, TensorWeakRef, int]] = {}
        self.twice: dict[int, tuple[str, str]] = {}
        self.late: dict[int, None] = {}
        self.clipped: set[int] = set()  # since the last step
        self.clipped_in_time: set[int] = set()  # before the step that read the gradient
        self.clips = 0
        self.inside: list[torch.optim.Optimizer] = []  # steps in progress: optimizers wrap others

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the functions of torch that clip gradients by ones that also record."""
        with ExitStack() as stack:
            for name in CLIPPING:
                plain = getattr(clip_grad, name)
                for module in (clip_grad, torch.nn.utils):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, self.noted(plain))
            yield

    def noted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that clips, and notes what."""

        @functools.wraps(plain)
        def clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_mine():
                return plain(parameters, limit, *args, **kwargs)
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if math.isfinite(float(limit)):  # an infinite limit only measures
                self.note_clipping(given)
            return plain(given, limit, *args, **kwargs)

        return clip

    def note_clipping(self, parameters: list[Tensor]) -> None:
        """Note that the gradients of these parameters are about to be clipped."""
        self.clips += 1
        for parameter in parameters:
            if not self.was_read(parameter):
                self.clipped.add(id(parameter))
            elif id(parameter) not in self.clipped_in_time:
                self.late[id(parameter)] = None

    def was_read(self, parameter: Tensor) -> bool:
        """Return whether an optimizer has read the gradient that a parameter has now."""
        _, kept, version = self.read.get(id(parameter), (None, lambda: None, -1))
        grad = own_gradient(parameter)
        return grad is not None and bool(grad._version == version) and kept() is grad

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the rate of a step, and gradients that another optimizer has read before."""
        if optimizer in self.inside:  # its last step has failed
            del self.inside[self.inside.index(optimizer) :]
        is_wrapped = any(shares(optimizer, outer) for outer in self.inside)
        self.inside.append(optimizer)
        if is_wrapped:
            return  # one step of an optimizer that calls another
        rates = [rate_of(group) for group in optimizer.param_groups]
        self.rates.setdefault(optimizer, []).append(max(rates, default=math.nan))
        for parameter in parameters_of(optimizer):
            if self.was_read(parameter):
                first = self.read[id(parameter)][0]
                if first is not optimizer:
                    kinds = type(first).__name__, type(optimizer).__name__
                    self.twice.setdefault(id(parameter), kinds)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the gradients that a step has read."""
        if self.inside and self.inside[-1] is optimizer:
            self.inside.pop()
        if any(shares(optimizer, outer) for outer in self.inside):
            return
        for parameter in parameters_of(optimizer):
            grad = own_gradient(parameter)
            if grad is None:
                continue
            self.read[id(parameter)] = optimizer, TensorWeakRef(grad), grad._version
            if id(parameter) in self.clipped:
                self.clipped_in_time.add(id(parameter))
            else:
                self.clipped_in_time.discard(id(parameter))
            self.clipped.discard(id(parameter))


def own_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter; of a sharded one this rank's shard, whose version its additions change."""
    # to_local() makes a new tensor at each call, and identity is what counts here.
    grad: Tensor | None = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return grad


def shares(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return whether two optimizers have a parameter in common."""
    return not {id(p) for p in parameters_of(one)}.isdisjoint(id(p) for p in parameters_of(other))


def gradients_are_read_once(seen: StepOrder, names: dict[int, str]) -> Iterator[Found]:
    """Yield a finding if two optimizers step with the same gradients of the same parameters.

    Args:
        seen: The steps.
        names: Parameters of the models that were called, by id.

    Raises:
        NotJudged: If one optimizer steps.
    """
    if len(seen.rates) < 2:
        raise NotJudged("one optimizer steps")
    if seen.twice:
        which = [names.get(key, "a parameter outside the models") for key in seen.twice]
        first, second = next(iter(seen.twice.values()))
        yield (
            "stepped-twice",
            "error",
            f"{len(which)} parameters are updated by {first} and again by {second} with the same gradients: "
            f"{name_some(which)}; give each parameter to one optimizer",
        )


def rates_are_not_zero(seen: StepOrder) -> Iterator[Found]:
    """Yield a finding for each optimizer whose rates are all 0 after its first step.

    A first step at 0, as warm-ups have it, a rate that falls to 0 in its last step, and groups that have 0 beside
    others that do not, are allowed.

    Raises:
        NotJudged: If no optimizer with a learning rate took three steps.
    """
    judged = 0
    for optimizer, rates in seen.rates.items():
        if len(rates) < 3 or any(map(math.isnan, rates)):
            continue
        judged += 1
        if not any(rates[1:]):
            first = 0 if not rates[0] else 1
            yield (
                "rate-zero",
                "error",
                f"the learning rate of {type(optimizer).__name__} is 0 in steps {first} to {len(rates) - 1}: they move "
                "nothing; look at the schedule, and at how often it is stepped",
                first,
            )
    if not judged:
        raise NotJudged("no optimizer with a learning rate took three steps")


def clipping_precedes_the_step(seen: StepOrder, names: dict[int, str]) -> Iterator[Found]:
    """Yield a finding if gradients are clipped after the step that read them, and not before it.

    Raises:
        NotJudged: If nothing was clipped by a function of torch.
    """
    if not seen.clips:
        raise NotJudged("nothing was clipped by torch.nn.utils in these steps")
    if seen.late:
        which = [names.get(key, "a parameter outside the models") for key in seen.late]
        yield (
            "clipped-after-step",
            "error",
            f"the gradients of {len(which)} parameters are clipped after the optimizer has read them: "
            f"{name_some(which)}; clip between backward() and step()",
        )


# Check that the micro-batches of a step are parts of one batch: every target has the same weight.

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
