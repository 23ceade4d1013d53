"""Proofs about the loss: every order, mask and count of a few tokens, gradients, and the error bound."""

from __future__ import annotations

import itertools
from fractions import Fraction

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import draw_values
from isobit.foundation.records import Proof
from isobit.library.certificates import prove_orders
from isobit.library.cross_entropy.claims import Loss, exact_sum_of
from isobit.library.log_softmax.proofs import prove_log_bound
from isobit.library.logprob.orders import words_question
from isobit.library.logprob.scored import gradients
from isobit.ops.logprob import portable
from isobit.ops.logprob.op import IGNORED
from isobit.order.samples import Samples

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
