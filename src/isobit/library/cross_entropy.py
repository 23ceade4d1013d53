"""Claims of cross-entropy-kernel-v1: the loss is an exact sum, however tokens are ordered, padded or shared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.foundation.records import Proof
from isobit.library import refused_calls
from isobit.library import stock as stock_functions
from isobit.library.certificates import U, prove_orders
from isobit.library.claims import refuses_each
from isobit.library.log_softmax import bound_of, prove_log_bound, reach_of
from isobit.library.logprob import planted
from isobit.library.logprob.claims import (
    Score,
    drawn_targets,
    gradients,
    logits_error,
    targets_of,
    words_question,
)
from isobit.ops.exact_sum.op import exact_state, exact_sum, round_state
from isobit.ops.logprob import portable
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


# Proofs about the loss: every order, mask and count of a few tokens, gradients, and the error bound.

ENGINE = "enumeration of the real kernel"
ERROR_LIMIT = (300, 3.2e-5)  # (vocabulary, limit): for one token, what the proof must stay within
TOKENS = 5


def small_problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a few tokens whose losses have full mantissas."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (draw_values((rows, 8), "normal", generator) for rows in (TOKENS, 19))
    return hidden, weight, torch.randint(0, 19, (TOKENS,), generator=generator)


def prove_permutations(subject: Loss) -> Proof:
    """Try every order of five tokens: each gives the sum of fractions."""
    cases = 0
    for seed in range(6):
        hidden, weight, targets = small_problem(seed)
        values = portable.linear_logprob(hidden, weight, targets, 1.0)[0]
        total = float(
            torch.tensor(float(sum(map(Fraction, values.tolist()))), dtype=torch.float64).float()
        )
        wanted = torch.tensor(total) / -TOKENS
        for order in itertools.permutations(range(TOKENS)):
            cases += 1
            at = torch.tensor(order)
            if not bits.equal(subject.loss(hidden[at], weight, targets[at]), wanted):
                return Proof(
                    ENGINE, "", cases, f"tokens {order} of problem {seed} have another loss"
                )
    return Proof(
        ENGINE,
        f"every order of {TOKENS} tokens of 6 problems: the sum of fractions, rounded once",
        cases,
    )


def prove_masks(subject: Loss) -> Proof:
    """Try every choice of active tokens with every count up to eight: each gives the definition's value."""
    cases = 0
    hidden, weight, targets = small_problem(7)
    values = portable.linear_logprob(hidden, weight, targets, 1.0)[0]
    for mask in itertools.product((False, True), repeat=TOKENS):
        active = torch.tensor(mask)
        chosen = torch.where(active, targets, IGNORED)
        for count in (None, *range(1, 9)) if any(mask) else range(1, 9):
            cases += 1
            wanted = exact_sum_of(values[active]) / -(sum(mask) if count is None else count)
            if not bits.equal(subject.loss(hidden, weight, chosen, num_items=count), wanted):
                return Proof(ENGINE, "", cases, f"active {mask}, count {count}: another loss")
    return Proof(
        ENGINE, f"every choice of {TOKENS} tokens, every count from 1 to 8 and none", cases
    )


def prove_gradients(subject: Loss) -> Proof:
    """Try every choice of active tokens: dhidden and dweight are the definition's."""
    cases = 0
    described = Samples.packed([TOKENS])
    for seed in range(3):
        hidden, weight, targets = small_problem(seed)
        for mask in itertools.product((False, True), repeat=TOKENS):
            if not any(mask):
                continue
            cases += 1
            chosen = torch.where(torch.tensor(mask), targets, IGNORED)
            stats = portable.linear_logprob(hidden, weight, chosen, 1.0)[1]
            grad = torch.ones(TOKENS) / -torch.tensor(float(sum(mask)))
            wanted = portable.linear_logprob_backward(
                grad, hidden, weight, chosen, stats, described, 1.0
            )
            found = gradients(
                subject.loss, hidden, weight, chosen, torch.tensor(1.0), samples=described
            )
            if not all(bits.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                return Proof(ENGINE, "", cases, f"active {mask} of problem {seed}: other gradients")
    return Proof(
        ENGINE, f"every choice of {TOKENS} tokens of 3 problems: dhidden and dweight", cases
    )


def prove_error(subject: Loss) -> Proof:
    """Bound the error: the loss of one token shows the order of its sum over words."""

    def one_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -subject.loss(hidden, weight, targets).reshape(1)

    order = prove_orders((words_question(one_token, k, 1, 1) for k in (64, 300)), "")
    return prove_log_bound(order, ERROR_LIMIT)


# Planted wrong losses, of kinds found in training code: wrong in the value or in the gradients.

Mean = Callable[[Tensor, Tensor, float], Tensor]  # log-probabilities, targets, count


def with_mean(mean: Mean, score: Score = linear_logprob) -> Loss:
    """Return a loss that takes another mean of the log-probabilities."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = IGNORED,
        num_items: float | None = None,
        **options: Any,
    ) -> Tensor:
        chosen = torch.where(targets == ignore_index, IGNORED, targets)
        active = float((chosen != IGNORED).sum()) if num_items is None else num_items
        return mean(score(hidden, weight, chosen, **options), chosen, active)

    return Loss(loss)


def _exact(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values) / -count


def _summed_plainly(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return values.sum() / -count


def _summed_in_order(values: Tensor, targets: Tensor, count: float) -> Tensor:
    total = values.new_zeros(())
    for value in values.reshape(-1):
        total = total + value
    return total / -count


def _padding_in_the_mean(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values) / -values.numel()


def _mean_of_means(values: Tensor, targets: Tensor, count: float) -> Tensor:
    halves, ids = values.reshape(-1).tensor_split(2), targets.reshape(-1).tensor_split(2)
    means = [
        exact_sum(v) / -max(float((t != IGNORED).sum()), 1.0)
        for v, t in zip(halves, ids, strict=True)
    ]
    return (means[0] + means[1]) / 2


def _ignored_at_one(values: Tensor, targets: Tensor, count: float) -> Tensor:
    """Count a loss of 1 for an ignored target."""
    return exact_sum(torch.where(targets == IGNORED, -1.0, values)) / -count


def _divided_first(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values / -count)


def _blunt(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values.bfloat16()) / -count


def _ignoring_one_id(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = 0, **named: Any
) -> Tensor:
    """Ignore −100 alone, whatever ignore_index is."""
    return linear_cross_entropy(hidden, weight, targets, **named)


def _careless(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, num_items: float | None = None, **_: Any
) -> Tensor:
    """Accept every count, and a batch without targets."""
    chosen = targets.long().clamp(0, len(weight) - 1)
    return F.cross_entropy(hidden @ weight.t(), chosen.expand(len(hidden)))


stock, careless, ignoring_one_id = (
    Loss(stock_functions.linear_cross_entropy),
    Loss(_careless),
    Loss(_ignoring_one_id),
)
summed_plainly, summed_in_order = with_mean(_summed_plainly), with_mean(_summed_in_order)
padding_in_the_mean, mean_of_means = with_mean(_padding_in_the_mean), with_mean(_mean_of_means)
ignored_at_one, blunt = with_mean(_ignored_at_one), with_mean(_blunt)
divided_first = with_mean(_divided_first)
bf16_logits = with_mean(_exact, planted.bf16_logits.score)
over_the_batch = with_mean(_exact, planted.over_the_batch.score)
neighbours_target = with_mean(_exact, planted.neighbours_target.score)
ignored_pulled = with_mean(_exact, planted.ignored_pulled.score)
tokens_backwards = with_mean(_exact, planted.tokens_backwards.score)
vocabulary_reversed = with_mean(_exact, planted.vocabulary_reversed.score)
