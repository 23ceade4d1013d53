"""Claims of knowledge-distillation-kernel-v1: no divergence is negative, none has an order, and each is accurate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs.intervals import load_arb
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.foundation.records import Proof
from isobit.library import claims as autograd
from isobit.library.certificates import U, sum_depth
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    Call,
    placements,
    put,
    put_among_random,
    refuses_each,
)
from isobit.library.cross_entropy import exact_sum_of
from isobit.library.distillation import planted
from isobit.library.distillation.planted import Distilled, stable_divergence
from isobit.library.log_softmax import bound_of, reach_of
from isobit.library.logprob.claims import drawn_targets, logits_error
from isobit.ops.distillation import portable
from isobit.ops.distillation.loss import distillation_loss
from isobit.ops.linear.op import linear_fp32
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.order.samples import Samples

ours = Distilled(distillation_loss)
DIRECTIONS = portable.DIRECTIONS
BETA = 0.3


@dataclass(frozen=True)
class Problem:
    """A student and a teacher of one case."""

    hidden: Tensor
    weight: Tensor
    other: Tensor
    head: Tensor
    targets: Tensor

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments of a loss."""
        return self.hidden, self.weight, (self.other, self.head), self.targets


def problem_of(case: Case, near: bool = False) -> Problem:
    """Return a case's student with a teacher of its own head, or of the student's head and nearby states."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 70)
    targets[0] = 0
    if not near:
        other = case.draw((case.rows, 5), 60, "normal")
        return Problem(hidden, weight, other, case.draw((len(weight), 5), 61, "normal"), targets)
    steps = torch.randint(2, 22, (case.rows, 1), generator=case.generator(62))
    noise = case.draw(tuple(hidden.shape), 63, "normal").float()
    other = (hidden.float() + torch.ldexp(noise, -steps)).to(case.dtype)
    return Problem(hidden, weight, other, weight, targets)


def is_not_negative(values: Tensor) -> Tensor:
    """Return where a value is 0 or more; neither -0 nor NaN is."""
    return (values >= 0) & ~torch.signbit(values)


def never_negative(subject: Distilled, case: Case, tally: Tally) -> None:
    """FALSIFY-ALBOR-004: no divergence is negative, of models that are alike or not, whatever the teacher is."""
    for near in (True, False):
        at = problem_of(case, near)
        tally.count(case.rows)
        known = linear_fp32(at.other, at.head).log_softmax(-1).topk(min(5, len(at.weight)))
        teachers = (at.other, at.head), linear_fp32(at.other, at.head), tuple(known)[::-1]
        for direction, teacher in itertools.product(DIRECTIONS, teachers):
            found = subject.divergence(at.hidden, at.weight, teacher, direction=direction)
            tally.true(is_not_negative(found), f"a negative {direction} divergence", found)


def itself(subject: Distilled, case: Case, tally: Tally) -> None:
    """A model and itself have the divergence 0 and gradients of 0."""
    at = problem_of(case)
    tally.count(case.rows)
    teachers = (at.hidden, at.weight), linear_fp32(at.hidden, at.weight)
    for direction, teacher in itertools.product(DIRECTIONS, teachers):
        options: dict[str, Any] = {"alpha": 1.0, "direction": direction, "temperature": 0.7}
        found = subject.divergence(at.hidden, at.weight, teacher, **options)
        tally.same(found, torch.zeros_like(found), f"{direction} divergence of a model and itself")
        for name, grad in gradients(subject, at.hidden, at.weight, teacher, at.targets, **options):
            tally.true(grad == 0, f"{name} of a model and itself, {direction}", grad)


def gradients(
    subject: Distilled,
    hidden: Tensor,
    weight: Tensor,
    teacher: Any,
    targets: Tensor | None,
    grad: Tensor | None = None,
    **options: Any,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ("dhidden", …) and ("dweight", …) of a loss, or of the losses of tokens where `grad` is [T]."""
    if grad is not None and grad.dim():
        options["reduction"] = "none"
    found = autograd.gradients(
        lambda hidden, weight: subject.loss(hidden, weight, teacher, targets, **options),
        (hidden, weight),
        torch.tensor(1.0) if grad is None else grad,
    )
    yield from zip(("dhidden", "dweight"), found, strict=True)


def one_value(subject: Distilled, case: Case, tally: Tally) -> None:
    """Order, padding, storage, threads and other tokens change no bit of a loss, nor of a token's."""
    at = problem_of(case)
    tally.count(case.rows)
    for direction in DIRECTIONS:
        options: dict[str, Any] = {"direction": direction, "temperature": 2.0, "beta": BETA}
        whole = subject.loss(*at.given, **options)
        each = subject.loss(*at.given, reduction="none", **options)
        for order in (
            torch.arange(case.rows - 1, -1, -1),
            torch.randperm(case.rows, generator=case.generator(31)),
        ):
            turned = at.hidden[order], at.weight, (at.other[order], at.head), at.targets[order]
            tally.same(subject.loss(*turned, **options), whole, "tokens in another order")
        for rows in (slice(0, 1), slice(3, 9)):
            part = at.hidden[rows], at.weight, (at.other[rows], at.head), at.targets[rows]
            found = subject.loss(*part, reduction="none", **options)
            tally.same(found, each[rows], "tokens alone")
        room, others = (case.draw((7, n), 33, "wide") for n in (at.hidden.shape[1], 5))
        padded = torch.cat([room, at.hidden]), torch.cat([others, at.other])
        none = torch.cat([torch.full((7,), IGNORED), at.targets])
        found = subject.loss(padded[0], at.weight, (padded[1], at.head), none, **options)
        tally.same(found, whole, "padded")
        for name, store in LAYOUTS.items():
            stored = store(at.hidden), store(at.weight), (store(at.other), store(at.head))
            tally.same(subject.loss(*stored, at.targets, **options), whole, f"stored {name}")
        for threads in THREADS:
            with thread_count(threads):
                tally.same(subject.loss(*at.given, **options), whole, f"{threads} threads")


def samples(subject: Distilled, case: Case, tally: Tally) -> None:
    """The gradient dweight is one sum over the samples, however they are packed and padded."""
    count, weight = sum(SAMPLE_LENGTHS), case.arguments["weight"]
    hidden = case.draw((count, case.sizes["k"]), 90)
    other, head = case.draw((count, 5), 91), case.draw((len(weight), 5), 92)
    targets = drawn_targets(case, count, 93)
    grad = case.draw((count, 1), 94, "wide").float()
    tally.count(count)

    def dweight(
        hidden: Tensor, other: Tensor, targets: Tensor, grad: Tensor, lying: Samples
    ) -> Tensor:
        given = hidden, weight, (other, head), targets, grad.squeeze(1)
        return dict(gradients(subject, *given, samples=lying))["dweight"]

    whole = dweight(hidden, other, targets, grad, Samples.packed(SAMPLE_LENGTHS))
    for where, lying in placements(SAMPLE_LENGTHS, 520):
        states, others = (put_among_random(case, t, lying, 95) for t in (hidden, other))
        ids = put(drawn_targets(case, lying.rows, 96), targets, lying)
        grads = put_among_random(case, grad, lying, 97).float()
        tally.same(dweight(states, others, ids, grads, lying), whole, f"dweight, {where}")


def exact_of(at: Problem, direction: str) -> tuple[Tensor, Tensor]:
    """Return divergences in fp64 of a problem at temperature 1, and what their errors in fp32 may be."""
    q, p = (logits_error(*pair) for pair in ((at.hidden, at.weight), (at.other, at.head)))
    words = len(at.weight)
    off = [bound_of(words, reach_of(logits) + 1) + 2 * e.amax(1) for logits, e in (q, p)]
    log_q, log_p = (logits.log_softmax(-1) for logits, _ in (q, p))
    exact = stable_divergence(log_p, log_q, direction, BETA)
    slack = sum(off)  # of log p − log q, for every word of a row
    # |φ(δ + ε) − φ(δ)| <= ε · e^(δ + ε) · (|δ| + ε); the functions have 2^-20, the sum its depth.
    both = log_p.exp() + log_q.exp()
    turned = (both * ((log_p - log_q).abs() + slack.unsqueeze(1))).sum(-1)  # type: ignore[union-attr]
    relative = 2.0**-20 + sum_depth(words, torch.float32) * U + 2 * slack
    return exact, relative * exact + 1.01 * slack * turned


def error_bound(subject: Distilled, case: Case, tally: Tally) -> None:
    """Divergences of 1e-12 and more are within the derived bound, relative to the divergence; gradients to fp64."""
    for near, direction in itertools.product((True, False), DIRECTIONS):
        at = problem_of(case, near)
        exact, allowed = exact_of(at, direction)
        kept = exact >= 1e-12
        found = subject.divergence(
            at.hidden, at.weight, (at.other, at.head), direction=direction, beta=BETA
        )
        tally.count(int(kept.sum()))
        error = (found.double() - exact).abs()
        tally.true((error <= allowed)[kept], f"{direction} divergence beyond its bound", error)


def gradients_follow(subject: Distilled, case: Case, tally: Tally) -> None:
    """Gradients are those of the definition in fp64, within 2^-14 of their largest; ignored rows have none."""
    at = problem_of(case)
    tally.count(case.rows)
    at.targets[1::4] = IGNORED
    wide = [t.double().requires_grad_() for t in (at.hidden, at.weight)]
    for direction in DIRECTIONS:
        options: dict[str, Any] = {"direction": direction, "temperature": 1.5, "beta": BETA}
        with torch.enable_grad():
            loss = planted.definition(*wide, (at.other, at.head), at.targets, **options)
        wanted = torch.autograd.grad(loss, wide)
        found = dict(gradients(subject, *at.given, **options))
        for (name, left), right in zip(found.items(), wanted, strict=True):
            limit = float(right.abs().max()) * 2.0**-14
            error = float((left.double() - right).abs().max())
            tally.within(error, limit, left.numel(), f"{name}, {direction}")
        none = found["dhidden"][at.targets == IGNORED]
        tally.true(none == 0, "dhidden without a target", none)


def defined(subject: Distilled, case: Case, tally: Tally) -> None:
    """The temperature enters squared, alpha weighs both parts, and unknown words are one bucket."""
    at = problem_of(case)
    tally.count(case.rows)
    logprob = linear_logprob(at.hidden, at.weight, at.targets)
    for direction in DIRECTIONS:
        options: dict[str, Any] = {"direction": direction, "reduction": "none", "beta": BETA}
        plain = subject.loss(*at.given, alpha=1.0, **options)
        tally.same(
            subject.loss(*at.given, alpha=0.25, **options),
            plain * 0.25 + logprob * -0.75,
            "alpha",
        )
        scaled = at.hidden * 2, at.weight, (at.other * 2, at.head), at.targets
        found = subject.loss(*scaled, alpha=1.0, temperature=2.0, **options)
        tally.same(found, plain * 4, "temperature squared")
        named = dict(options, alpha=1.0, temperature=2.0)
        count = int((at.targets != IGNORED).sum())
        whole = exact_sum_of(found) / count
        tally.same(subject.loss(*scaled, **dict(named, reduction="mean")), whole, "mean")
        buckets(subject, at, direction, tally)


def buckets(subject: Distilled, at: Problem, direction: str, tally: Tally) -> None:
    """Compare a teacher of some words with the divergence of those words and one bucket, in fp64."""
    log_p, log_q = (
        linear_fp32(*pair).double().log_softmax(-1)
        for pair in ((at.other, at.head), (at.hidden, at.weight))
    )
    known = log_p.float().topk(min(6, len(at.weight) - 1))
    inside = [
        known.values.double(),
        log_q.gather(1, known.indices),
    ]
    rows = [torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], 1) for x in inside]
    sure = (rows[0][:, -1].exp() > 1e-3) & (rows[1][:, -1].exp() > 1e-3)
    exact = stable_divergence(rows[0], rows[1], direction, BETA)
    found = subject.divergence(
        at.hidden, at.weight, (known.indices, known.values), direction=direction, beta=BETA
    )
    error = (found.double() - exact).abs()[sure]
    tally.true(error <= 2.0**-12 * (1 + exact[sure]), f"one bucket, {direction}", error)


def refused_calls() -> Iterator[Call]:
    """Yield calls of isobit.distillation_loss that must be refused."""
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])
    teacher = hidden, weight
    ids, logs = torch.tensor([[0], [4]]), torch.full((2, 1), -1.0)
    yield "other words", (hidden, weight, (hidden, torch.ones(6, 3)), targets), {}
    yield "other tokens", (hidden, weight, (torch.ones(3, 3), weight), targets), {}
    yield "logits of other words", (hidden, weight, torch.ones(2, 4), targets), {}
    yield "an id beyond the vocabulary", (hidden, weight, (ids + 1, logs), targets), {}
    yield "no word of the teacher", (hidden, weight, (ids[:, :0], logs[:, :0]), targets), {}
    yield "logits for log-probabilities", (hidden, weight, (ids, logs + 3), targets), {}
    yield "a teacher that is a name", (hidden, weight, "teacher", targets), {}
    yield "no targets", (hidden, weight, teacher, None), {}
    yield "no target", (hidden, weight, teacher, torch.full((2,), IGNORED)), {}
    yield "a target beyond the vocabulary", (hidden, weight, teacher, targets + 1), {}
    for name, value in (("alpha", 1.5), ("direction", "up"), ("temperature", 0.0), ("beta", 1.0)):
        named = {"direction": "jsd", name: value}
        yield f"{name} {value}", (hidden, weight, teacher, targets), named


def refuses(subject: Distilled, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    refuses_each(subject.loss, refused_calls(), tally)


# Proofs: the functions of a term by intervals, all values of 16 bits, and all choices of a few tokens.

ENGINE = "enumeration of the real kernel"
TOKENS = 4


def every_value() -> Tensor:
    """Return every bf16 value up to 2^120, as fp32: beyond, a quarter more or a temperature would be infinite."""
    found = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    return found[found.abs() <= 2.0**120]


def prove_functions() -> str:
    """Bound the functions of a term in interval arithmetic; return why a term might be negative, or nothing.

    For a < 1 a term is (w · a²) times P(a), or 1 − (1 + a)·P(a), both of which must be positive whatever the
    roundings; for a >= 1, fl(1 − e^−a) <= 1 <= a, and (1 + a)·e^−a with its roundings must stay below 1.
    """
    arb = load_arb()
    u = arb(0, 2.0**-24)  # an interval of relative roundings
    parts = 64
    for part in range(parts):
        a = arb((part + 0.5) / parts, 0.5 / parts)
        total = arb(portable.RISE32[-1])
        for coefficient in portable.RISE32[-2::-1]:
            total = (total * a * (1 + u) + coefficient) * (1 + u)
        if not total > 0:
            return f"P(a) may be negative at {a}"
        if not (a + 1) * (1 + u) * total * (1 + u) < 1:
            return f"(1 + a) · P(a) may be 1 at {a}"
    # (1 + a)·e^−a falls from a = 1 on; the exponential is within one ulp, 2u.
    if not (arb(2) * (arb(-1)).exp()) * (1 + 2 * u) * (1 + u) * (1 + u) < 1:
        return "(1 + a)·e^−a may be 1 at 1"
    return ""


def pairs_of_logits() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (student's, teacher's) logits [n, 3] whose first is any bf16 value and a neighbour of it."""
    x = every_value()
    steps = x.abs().clamp(min=1e-3)
    for moved in (x + steps * 2.0**-20, x - steps * 2.0**-12, x * 1.25, x.flip(0)):
        rows = (torch.stack([y, 0 * y, y.clamp(-30, 30) * 0.5], 1) for y in (x, moved))
        yield next(rows), next(rows)


def prove_sign(subject: Distilled) -> Proof:
    """Prove that terms are not negative by intervals, and try every bf16 value against its neighbours."""
    failure, cases = prove_functions(), 64
    if failure:
        return Proof("interval bounds of the functions of a term", "", cases, failure)
    unit = torch.eye(3)
    for (student, teacher), direction in itertools.product(pairs_of_logits(), DIRECTIONS):
        cases += len(student)
        found = subject.divergence(student, unit, teacher, direction=direction)
        wrong = ~is_not_negative(found)
        if bool(wrong.any()):
            at = student[wrong][0].tolist(), teacher[wrong][0].tolist()
            return Proof(ENGINE, "", cases, f"{direction}, logits {at}: {float(found[wrong][0])}")
    return Proof(
        "interval bounds of the functions of a term, and enumeration of the real kernel",
        "every term is w·f with w >= 0 and f >= 0 for every a, whatever the roundings; every bf16 logit against "
        "four teachers, three directions",
        cases,
    )


def prove_itself(subject: Distilled) -> Proof:
    """Try every bf16 value as a logit of a model and itself."""
    cases, unit = 0, torch.eye(3)
    logits = next(pairs_of_logits())[0]
    for direction, warmth in itertools.product(DIRECTIONS, (1.0, 0.7)):
        cases += len(logits)
        options: dict[str, Any] = {"alpha": 1.0, "direction": direction, "temperature": warmth}
        found = subject.divergence(logits, unit, logits, **options)
        grads = gradients(subject, logits, unit, logits, None, torch.ones(len(logits)), **options)
        if not bits.equal(found, torch.zeros_like(found)) or any(bool(g.any()) for _, g in grads):
            return Proof(ENGINE, "", cases, f"{direction}, temperature {warmth}: not 0")
    return Proof(ENGINE, "every bf16 logit, three directions, two temperatures", cases)


def small_problem(seed: int) -> Problem:
    """Return a few tokens whose losses have full mantissas."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, other, head = (
        draw_values((rows, 6), "normal", generator) for rows in (TOKENS, 19, TOKENS, 19)
    )
    return Problem(
        hidden, weight, other, head, torch.randint(0, 19, (TOKENS,), generator=generator)
    )


def prove_permutations(subject: Distilled) -> Proof:
    """Try every order of four tokens: each gives the exact sum of the tokens' losses."""
    cases = 0
    for seed, direction in itertools.product(range(4), DIRECTIONS):
        at = small_problem(seed)
        options: dict[str, Any] = {"direction": direction, "temperature": 2.0}
        wanted = exact_sum_of(distillation_loss(*at.given, reduction="none", **options)) / TOKENS
        for order in itertools.permutations(range(TOKENS)):
            cases += 1
            by = torch.tensor(order)
            turned = at.hidden[by], at.weight, (at.other[by], at.head), at.targets[by]
            if not bits.equal(subject.loss(*turned, **options), wanted):
                return Proof(ENGINE, "", cases, f"tokens {order} of problem {seed}, {direction}")
    return Proof(ENGINE, f"every order of {TOKENS} tokens of 4 problems: the exact sum", cases)


def prove_gradients(subject: Distilled) -> Proof:
    """Try every choice of active tokens: dhidden and dweight are the definition's, in its order."""
    cases, lying = 0, Samples.packed([TOKENS])
    for seed, direction in itertools.product(range(2), DIRECTIONS):
        at = small_problem(seed)
        for mask in itertools.product((False, True), repeat=TOKENS):
            if not any(mask):
                continue
            cases += 1
            chosen = torch.where(torch.tensor(mask), at.targets, IGNORED)
            student, teacher = (at.hidden, at.weight, chosen), (at.other, at.head, None)
            how = 1.5, direction, BETA
            stats = portable.distillation_loss(*student, *teacher, None, *how)[2]
            one = torch.tensor(1.0) / torch.tensor(float(sum(mask)))
            pair = [(one * factor).expand(TOKENS) for factor in (0.5 * 1.5 * 1.5, -0.5)]
            wanted = portable.distillation_loss_backward(
                pair, *student, *teacher, stats, lying, *how
            )
            found = gradients(
                subject,
                at.hidden,
                at.weight,
                (at.other, at.head),
                chosen,
                direction=direction,
                temperature=1.5,
                beta=BETA,
                samples=lying,
            )
            if not all(bits.equal(a, b) for (_, a), b in zip(found, wanted, strict=True)):
                return Proof(ENGINE, "", cases, f"active {mask} of problem {seed}, {direction}")
    return Proof(ENGINE, f"every choice of {TOKENS} tokens of 2 problems, both gradients", cases)


def prove_error(subject: Distilled) -> Proof:
    """Try every bf16 difference of two logits from 2^-18 to 16: the divergence is the exact one, relative to itself."""
    x = every_value()
    x = x[(x.abs() >= 2.0**-18) & (x.abs() <= 16)]
    student = torch.zeros(len(x), 2)
    teacher = torch.stack([x, 0 * x], 1)
    log_p, log_q = (t.double().log_softmax(-1) for t in (teacher, student))
    for direction in DIRECTIONS:
        exact = stable_divergence(log_p, log_q, direction, BETA)
        found = subject.divergence(student, torch.eye(2), teacher, direction=direction, beta=BETA)
        # log p and log q are each within 3 ulp of their size: a sum of two terms, its log, two differences.
        slack = 2.0**-22 * (1 + (log_p - log_q).abs().amax(1))
        both = ((log_p.exp() + log_q.exp()) * ((log_p - log_q).abs() + slack.unsqueeze(1))).sum(1)
        allowed = (2.0**-20 + 2 * slack) * exact + 1.01 * slack * both
        error = (found.double() - exact).abs()
        if bool((error > allowed).any()):
            at = int((error - allowed).argmax())
            failure = (
                f"{direction}, logits {float(x[at])} and 0: {error[at]:.3g} of {exact[at]:.3g}"
            )
            return Proof(ENGINE, "", len(x), failure)
    return Proof(ENGINE, "every bf16 difference of two logits up to 16", 3 * len(x))


def prove_parts(subject: Distilled) -> Proof:
    """Try every eighth of alpha with four temperatures: the loss is the sum of its parts, each rounded once."""
    cases, at = 0, small_problem(3)
    logprob = linear_logprob(at.hidden, at.weight, at.targets)
    eighths = [i / 8 for i in range(9)]
    for direction, warmth in itertools.product(DIRECTIONS, (0.5, 1.0, 2.0, 4.0)):
        given = at.hidden * warmth, at.weight, (at.other * warmth, at.head), at.targets
        plain = distillation_loss(*at.given, alpha=1.0, direction=direction, reduction="none")
        logprob = linear_logprob(*given[:2], at.targets)
        for alpha in eighths:
            cases += 1
            wanted = plain * torch.tensor(alpha * warmth * warmth)
            wanted = wanted + logprob * torch.tensor(alpha - 1.0) if alpha < 1 else wanted
            options = {"direction": direction, "temperature": warmth, "reduction": "none"}
            if not bits.equal(subject.loss(*given, alpha=alpha, **options), wanted):
                failure = f"{direction}, alpha {alpha}, temperature {warmth}"
                return Proof(ENGINE, "", cases, failure)
    return Proof(ENGINE, "alpha in eighths, temperatures ½, 1, 2 and 4, three directions", cases)
