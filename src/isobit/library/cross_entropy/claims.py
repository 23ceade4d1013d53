"""What cross-entropy-kernel-v1 claims: a loss that is an exact sum, whatever is moved, padded or shared out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.library.log_softmax.proofs import bound_of, reach_of
from isobit.library.logprob.claims import (
    Call,
    Score,
    drawn_targets,
    gradients,
    logits_error,
    refuses_each,
    targets_of,
)
from isobit.library.logprob.orders import bounded, prove, words_question
from isobit.library.softmax.proofs import U
from isobit.machine import thread_count
from isobit.ops.exact_sum.op import exact_state, round_state
from isobit.ops.logprob import portable
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.order.exact_sum import exact_sum_fp32
from isobit.order.samples import Samples
from isobit.records import Proof

ERROR_LIMIT = (300, 3.2e-5)  # (vocabulary, limit): for one token, what the proof must stay within
OTHER_INDEX = 3  # an ignore_index that is a word
TOKENS = 5


@dataclass(frozen=True)
class Loss:
    """A loss as contracts draw it: the bits of each hidden state choose its target."""

    loss: Score

    def __call__(self, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self.loss(hidden, weight, targets_of(hidden, len(weight)), **options)


def tokens_of(case: Case, stream: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets), of which the first has one."""
    targets = drawn_targets(case, case.rows, stream)
    targets[0] = 0
    return case.arguments["hidden"], case.arguments["weight"], targets


def one_value(subject: Loss, case: Case, tally: Tally) -> None:
    """Permuted, padded, stored otherwise, by any threads: no bit changes."""
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
    tally.same(
        subject.loss(torch.cat([room, hidden]), weight, torch.cat([none, targets])),
        whole,
        "padded before",
    )
    tally.same(
        subject.loss(torch.cat([hidden, room]), weight, torch.cat([targets, none])),
        whole,
        "padded after",
    )
    tally.same(
        subject.loss(hidden.unsqueeze(1), weight, targets.unsqueeze(1)), whole, "samples of one"
    )
    for name, store in LAYOUTS.items():
        tally.same(subject.loss(store(hidden), store(weight), targets), whole, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            tally.same(subject.loss(hidden, weight, targets), whole, f"{threads} threads")


def counted(subject: Loss, case: Case, tally: Tally) -> None:
    """The mean is over active targets; ignore_index may be any id; a count of the global batch divides a share."""
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
    """By the definition, in integers."""
    return torch.tensor(exact_sum_fp32(values.double().tolist()), dtype=torch.float32)


def gradients_follow(subject: Loss, case: Case, tally: Tally) -> None:
    """dhidden and dweight are linear_logprob's under the gradient −1/count, to the bit; ignored rows have none."""
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
    """Each call is refused with a remedy."""
    refuses_each(subject.loss, refused_calls(), tally)


def refused_calls() -> Iterator[Call]:
    """Calls that have no loss."""
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])
    yield "no active target", (hidden, weight, torch.full((2,), IGNORED)), {}
    yield "a count of 0", (hidden, weight, targets), {"num_items": 0}
    yield "a negative count", (hidden, weight, targets), {"num_items": -2}
    yield "a target beyond the vocabulary", (hidden, weight, torch.tensor([0, 5])), {}
    yield "fewer targets than rows", (hidden, weight, targets[:1]), {}
    yield "targets that are numbers", (hidden, weight, targets.float()), {}
    yield "a temperature of 0", (hidden, weight, targets), {"temperature": 0.0}


# ---- proofs ----------------------------------------------------------------------------------------------


def small_problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A few tokens whose losses have full mantissas."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (draw_values((rows, 8), "normal", generator) for rows in (TOKENS, 19))
    return hidden, weight, torch.randint(0, 19, (TOKENS,), generator=generator)


def prove_permutations(subject: Loss) -> Proof:
    """Every order of five tokens: one value, that of fractions."""
    engine, cases = "enumeration of the real kernel", 0
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
                    engine, "", cases, f"tokens {order} of problem {seed} have another loss"
                )
    return Proof(
        engine,
        f"every order of {TOKENS} tokens of 6 problems: the sum of fractions, rounded once",
        cases,
    )


def prove_masks(subject: Loss) -> Proof:
    """Every choice of active tokens, with every count up to eight: the definition's value."""
    engine, cases = "enumeration of the real kernel", 0
    hidden, weight, targets = small_problem(7)
    values = portable.linear_logprob(hidden, weight, targets, 1.0)[0]
    for mask in itertools.product((False, True), repeat=TOKENS):
        active = torch.tensor(mask)
        chosen = torch.where(active, targets, IGNORED)
        for count in (None, *range(1, 9)) if any(mask) else range(1, 9):
            cases += 1
            wanted = exact_sum_of(values[active]) / -(sum(mask) if count is None else count)
            if not bits.equal(subject.loss(hidden, weight, chosen, num_items=count), wanted):
                return Proof(engine, "", cases, f"active {mask}, count {count}: another loss")
    return Proof(
        engine, f"every choice of {TOKENS} tokens, every count from 1 to 8 and none", cases
    )


def prove_gradients(subject: Loss) -> Proof:
    """Every choice of active tokens: dhidden and dweight are the definition's."""
    engine, cases = "enumeration of the real kernel", 0
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
                return Proof(engine, "", cases, f"active {mask} of problem {seed}: other gradients")
    return Proof(
        engine, f"every choice of {TOKENS} tokens of 3 problems: dhidden and dweight", cases
    )


def prove_error(subject: Loss) -> Proof:
    """The loss of one token shows the order of its sum over words; so the bound of the order is the loss's."""

    def one_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -subject.loss(hidden, weight, targets).reshape(1)

    with thread_count(1):
        order = prove([words_question(one_token, k, 1, 1) for k in (64, 300)], "")
    return bounded(order, *ERROR_LIMIT)


ours = Loss(linear_cross_entropy)
