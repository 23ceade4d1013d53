"""Claims of cross-entropy-kernel-v1: the loss is an exact sum, however tokens are ordered, padded or shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.library import refused_calls
from isobit.library.bounds import U
from isobit.library.log_softmax.proofs import bound_of, reach_of
from isobit.library.logprob.error_bounds import logits_error
from isobit.library.logprob.scored import Score, drawn_targets, gradients, targets_of
from isobit.library.subjects import refuses_each
from isobit.ops.exact_sum.op import exact_state, round_state
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.order.exact_sum import exact_sum_fp32
from isobit.order.samples import Samples

OTHER_INDEX = 3  # an ignore_index that is a word


@dataclass(frozen=True)
class Loss:
    """A loss whose targets are chosen by the bits of the hidden states."""

    loss: Score

    def __call__(self, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Return the loss at the targets that the bits choose."""
        return self.loss(hidden, weight, targets_of(hidden, len(weight)), **options)


def tokens_of(case: Case, stream: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden, weight, targets); the first target is never ignored."""
    targets = drawn_targets(case, case.rows, stream)
    targets[0] = 0
    return case.arguments["hidden"], case.arguments["weight"], targets


def one_value(subject: Loss, case: Case, tally: Tally) -> None:
    """Permuting or padding tokens, storage and threads change no bit."""
    hidden, weight, targets = tokens_of(case)
    tally.count(case.rows)
    whole = subject.loss(hidden, weight, targets)
    orders = {
        "reversed": torch.arange(case.rows - 1, -1, -1),
        "shuffled": torch.randperm(case.rows, generator=case.generator(31)),
        "by target": targets.argsort(stable=True),
    }
    for name, order in orders.items():
        tally.same(subject.loss(hidden[order], weight, targets[order]), whole, name)
    room = case.draw((7, hidden.shape[1]), 33, "wide")
    none = torch.full((7,), IGNORED)
    found = subject.loss(torch.cat([room, hidden]), weight, torch.cat([none, targets]))
    tally.same(found, whole, "padded before")
    found = subject.loss(torch.cat([hidden, room]), weight, torch.cat([targets, none]))
    tally.same(found, whole, "padded after")
    found = subject.loss(hidden.unsqueeze(1), weight, targets.unsqueeze(1))
    tally.same(found, whole, "samples of one")
    for name, store in LAYOUTS.items():
        tally.same(subject.loss(store(hidden), store(weight), targets), whole, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            tally.same(subject.loss(hidden, weight, targets), whole, f"{threads} threads")


def counted(subject: Loss, case: Case, tally: Tally) -> None:
    """The mean is over active targets; ignore_index may be any id; a share is divided by the global count."""
    hidden, weight, targets = tokens_of(case)
    tally.count(case.rows)
    whole, active = subject.loss(hidden, weight, targets), int((targets != IGNORED).sum())
    kept = targets != IGNORED
    tally.same(subject.loss(hidden[kept], weight, targets[kept]), whole, "active targets alone")
    tally.same(subject.loss(hidden, weight, targets, num_items=active), whole, "the count given")
    other = torch.where(torch.arange(case.rows) % 3 == 1, OTHER_INDEX, targets.clamp(min=0))
    other[0] = 0
    masked = torch.where(other == OTHER_INDEX, IGNORED, other)
    found = subject.loss(hidden, weight, other, ignore_index=OTHER_INDEX)
    tally.same(found, subject.loss(hidden, weight, masked), f"ignore_index {OTHER_INDEX}")
    parts = [slice(0, case.rows // 3), slice(case.rows // 3, case.rows)]
    values = [linear_logprob(hidden[part], weight, targets[part]) for part in parts]
    merged = round_state(exact_state(values[:1]) + exact_state(values[1:])) / -active
    tally.same(merged, whole, "digits of two shares, added")
    shares = [subject.loss(hidden[p], weight, targets[p], num_items=active) for p in parts]
    wanted = [exact_sum_of(v) / -active for v in values]
    for left, right in zip(shares, wanted, strict=True):
        tally.same(left, right, "a share over the count of the whole")


def exact_sum_of(values: Tensor) -> Tensor:
    """Return the exact sum by the definition, in integers."""
    return torch.tensor(exact_sum_fp32(values.double().tolist()), dtype=torch.float32)


def gradients_follow(subject: Loss, case: Case, tally: Tally) -> None:
    """Gradients are those of linear_logprob under −1/count, to the bit; ignored rows have none."""
    hidden, weight, targets = tokens_of(case, 80)
    targets[1::4] = IGNORED
    tally.count(case.rows)
    active = int((targets != IGNORED).sum())
    described = Samples.packed([case.rows])
    upstream = torch.full((case.rows,), 0.5) / -torch.tensor(float(active))
    wanted = gradients(linear_logprob, hidden, weight, targets, upstream, samples=described)
    found = gradients(subject.loss, hidden, weight, targets, torch.tensor(0.5), samples=described)
    for what, left, right in zip(("dhidden", "dweight"), found, wanted, strict=True):
        tally.same(left, right, what)
    none = found[0][targets == IGNORED]
    tally.true(none == 0, "dhidden without a target", none)


def error_bound(subject: Loss, case: Case, tally: Tally) -> None:
    """|loss − exact| is at most the mean of the tokens' bounds, and two roundings of the loss."""
    hidden, weight, targets = tokens_of(case, 84)
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    exact = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    tokens = bound_of(len(weight), reach_of(logits) + 1) + 2 * off.amax(1)
    allowed = float(tokens[targets != IGNORED].mean() + 2.001 * U * exact)
    error = abs(subject.loss(hidden, weight, targets).double() - exact).item()
    tally.within(error, allowed, 1, "the loss")


def refuses(subject: Loss, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    refuses_each(subject.loss, refused_calls.linear_cross_entropy(), tally)


ours = Loss(linear_cross_entropy)
