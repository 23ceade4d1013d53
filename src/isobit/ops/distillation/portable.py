"""The portable executor of distillation_loss: the divergence of two distributions over words, and its gradient.

[Note: a divergence without cancellation]
Σ p·(log p − log q) has terms of both signs, and what is left of them where two models are alike is rounding: it is
negative as often as not. Since p and q both sum to 1, the same number is a sum of terms that cannot be negative. With
a = |log p − log q| and w the larger one of a word's p and q, its term of the forward divergence is

    p·(log p − log q) − p + q = w·rise(a) where p >= q, w·bend(a) where p < q
    rise(a) = a − (1 − e^−a)        bend(a) = 1 − (1 + a)·e^−a        fall(a) = 1 − e^−a

and both functions are computed without cancellation: for a < 1 from one polynomial P with rise(a) = a²·P(a),
0.36 < P <= 0.5 and (1 + a)·P < 0.74; from e^−a elsewhere. So a term is 0 where log p and log q have the same bits, is
never negative, and the sum has its relative accuracy. The gradient is (q − p) = ∓w·fall(a), which is 0 there too.

The reverse divergence exchanges the two functions. The one of Jensen and Shannon, β·KL(p, m) + (1 − β)·KL(q, m) with
m = β·p + (1 − β)·q, is made of the same functions: of log of the larger over m, and of m over the smaller.

A teacher that is known by its most likely words alone is taken as the distribution that spreads the rest of its
probability over the other words as the student does: its divergence is that of the known words and of one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, wide_values
from isobit.ops.logprob.portable import finish, inverse, logits_of, segments_of
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import (
    Pair,
    merge_pairs,
    one_nan,
    round_once,
    sum_last,
    sum_products,
    widen_rows,
)
from isobit.ops.share import gradient_dtype
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

# P, the lowest power first. fp32: interpolated at the nodes of Chebyshev, relative error 9.4e-9. fp64: the series.
RISE32 = tuple(
    float.fromhex(c)
    for c in (
        "0x1.000000p-1",
        "-0x1.555552p-3",
        "0x1.55548cp-5",
        "-0x1.10fdeap-7",
        "0x1.6a58aap-10",
        "-0x1.8af216p-13",
        "0x1.1c01c0p-16",
    )
)
RISE64 = tuple((-1.0) ** n / factorial(n + 2) for n in range(18))
FAR = 128.0  # e^-a is +0 long before
DIRECTIONS = ("forward", "reverse", "jsd")
# Columns of stats: maximum and log of the sum of the student and of the teacher at the temperature, of the student at
# temperature 1, what the gradient subtracts, and the log-ratio of the words that a teacher of some words leaves out.
STATS = 8


def polynomial(a: Tensor) -> Tensor:
    """Return P(a) for 0 <= a < 1."""
    terms = RISE64 if a.dtype == torch.float64 else RISE32
    total = torch.full_like(a, terms[-1])
    for coefficient in terms[-2::-1]:
        total = total * a + coefficient
    return total


def rise(a: Tensor) -> Tensor:
    """Return a − (1 − e^−a) of a >= 0."""
    return torch.where(a < 1.0, (a * a) * polynomial(a), a - (1.0 - exp_nonpositive(-a)))


def bend(a: Tensor) -> Tensor:
    """Return 1 − (1 + a)·e^−a of a >= 0."""
    near = (a * a) * (1.0 - (a + 1.0) * polynomial(a))
    return torch.where(
        a < 1.0, near, 1.0 - exp_nonpositive(-a) * (torch.where(a > FAR, FAR, a) + 1.0)
    )


def fall(a: Tensor) -> Tensor:
    """Return 1 − e^−a of a >= 0."""
    return torch.where(a < 1.0, a * (1.0 - a * polynomial(a)), 1.0 - exp_nonpositive(-a))


class Words:
    """What a word's term and gradient are made of, for all words [T, V]."""

    def __init__(self, student: Tensor, teacher: Tensor, rest: Tensor | None) -> None:
        """Take log-probabilities; where rest [T, 1] is given, +inf marks the teacher's words that are not known."""
        self.ratio = torch.where(teacher == student, 0.0, teacher - student)
        if rest is not None:
            unknown = teacher == torch.inf
            spread = student + rest
            teacher = torch.where(unknown, torch.where(spread > 0.0, 0.0, spread), teacher)
            self.ratio = torch.where(unknown, rest, self.ratio)
        self.student = exp_nonpositive(student)
        self.larger = exp_nonpositive(torch.where(teacher < student, student, teacher))
        self.student_larger = self.ratio < 0.0
        self.distance = self.ratio.abs()

    def mixture(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the weight of the smaller one, m over the larger one, and logs of larger / m and of m / smaller."""
        weight = torch.where(self.student_larger, beta, 1.0 - beta)
        part = weight * fall(self.distance)
        middle = 1.0 - part
        # log(1 − part) keeps the digits of a small part: the rounding of 1 − part cancels in the quotient.
        above = torch.where(middle == 1.0, part, -log_positive(middle) * (part / (1.0 - middle)))
        below = self.distance - above
        return weight, middle, above, torch.where(below > 0.0, below, 0.0)

    def terms(self, direction: str, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each word's part of the divergence, and of what the gradient subtracts where that is another sum."""
        if direction != "jsd":
            bends = self.student_larger if direction == "forward" else self.ratio > 0.0
            return self.weigh(torch.where(bends, bend(self.distance), rise(self.distance))), None
        weight, middle, above, below = self.mixture(beta)
        larger, smaller = rise(above), middle * bend(below)
        found = (1.0 - weight) * larger + weight * smaller
        return self.weigh(found), self.weigh(torch.where(self.student_larger, larger, smaller))

    def weigh(self, value: Tensor) -> Tensor:
        """Return value times the larger probability, 0 where that is 0, whatever the value."""
        return torch.where(self.larger == 0.0, 0.0, self.larger * value)

    def gradient(self, direction: str, beta: Tensor, offset: Tensor) -> Tensor:
        """Return the derivatives of the divergence by the student's scaled logits."""
        if direction == "forward":
            by = fall(self.distance)
            return self.larger * torch.where(self.student_larger, by, -by)
        if direction == "reverse":
            return torch.where(
                self.student == 0.0, 0.0, self.student * ((0.0 - self.ratio) - offset)
            )
        _, _, above, below = self.mixture(beta)
        log = torch.where(self.student_larger, above, 0.0 - below)
        share = (1.0 - beta) * self.student
        return torch.where(self.student == 0.0, 0.0, share * (log - offset))


def teacher_logits(
    teacher: Tensor, weight: Tensor | None, ids: Tensor | None, words: int, temperature: float
) -> Tensor:
    """Return the teacher's scaled logits [T, V]; of a teacher of some words their log-probabilities, +inf elsewhere."""
    if weight is not None:
        return logits_of(teacher, weight, temperature)
    rows = widen_rows(teacher)
    if ids is None:
        return rows if temperature == 1.0 else rows * inverse(temperature, rows.dtype)
    room = rows.new_full((len(ids), words + 1), torch.inf)
    return room.scatter(1, torch.where(ids < 0, words, ids), rows)[:, :words].contiguous()


def maximum_and_log(logits: Tensor) -> Tensor:
    """Return the maximum and the log of the sum [T, 2] of logits [T, V]."""
    total = merge_pairs(logits, segments_of(Cut(logits.shape[1], 1, 0)), Pair)
    return one_nan(torch.cat([total.max, log_positive(total.sum)], 1))


def normalised(logits: Tensor, stats: Tensor) -> Tensor:
    """Return log-probabilities from logits [T, V] and their maximum and log of the sum [T, 2]."""
    return (logits - stats[:, :1]) - stats[:, 1:]


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_ids: Tensor | None,
    teacher_rest: Tensor | None,
    temperature: float,
    direction: str,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return divergences [T] and log-probabilities of targets [T], 0 where there is no target, and stats [T, 8]."""
    plain = logits_of(hidden, weight, 1.0)
    scaled = plain if temperature == 1.0 else plain * inverse(temperature, plain.dtype)
    pairs = merge_pairs(plain, segments_of(Cut(len(weight), 1, 0)), Pair)
    chosen = plain.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    logprobs, of_targets = finish(one_nan(torch.cat([pairs.max, pairs.sum], 1)), chosen, targets)
    of_student = of_targets if temperature == 1.0 else maximum_and_log(scaled)
    others = teacher_logits(teacher, teacher_weight, teacher_ids, len(weight), temperature)
    stats = plain.new_zeros(len(plain), STATS)
    stats[:, :2], stats[:, 4:6] = of_student, of_targets
    if teacher_rest is None:
        stats[:, 2:4] = maximum_and_log(others)
    else:
        stats[:, 7] = ratio_of_rest(
            maximum_and_log(torch.where(others == torch.inf, scaled, -torch.inf)),
            of_student,
            teacher_rest.to(plain.dtype),
        )
    words = words_of(scaled, others, stats, teacher_rest is not None)
    terms, offsets = words.terms(direction, torch.tensor(beta, dtype=plain.dtype, device="cpu"))
    found = torch.where(targets < 0, 0.0, sum_last(terms).squeeze(1))
    if direction == "reverse":
        stats[:, 6] = found
    elif offsets is not None:
        stats[:, 6] = sum_last(offsets).squeeze(1)
    return one_nan(found), logprobs, one_nan(stats)


def ratio_of_rest(rest: Tensor, whole: Tensor, teacher: Tensor) -> Tensor:
    """Return log(teacher's rest / student's rest) [T], from stats [T, 2] of the student's other words and of all."""
    student = ((rest[:, 0] - whole[:, 0]) + rest[:, 1]) - whole[:, 1]
    return torch.where(teacher == student, 0.0, teacher - student)


def words_of(scaled: Tensor, others: Tensor, stats: Tensor, partly: bool) -> Words:
    """Return the words of a call, from scaled logits and stats."""
    student = normalised(scaled, stats[:, :2])
    if partly:
        return Words(student, others, stats[:, 7:])
    return Words(student, normalised(others, stats[:, 2:4]), None)


def distillation_loss_backward(
    grads: Sequence[Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_ids: Tensor | None,
    stats: Tensor,
    samples: Samples,
    temperature: float,
    direction: str,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return dhidden and dweight, from the gradients [T] of divergences and of log-probabilities."""
    plain = logits_of(hidden, weight, 1.0)
    scaled = plain if temperature == 1.0 else plain * inverse(temperature, plain.dtype)
    others = teacher_logits(teacher, teacher_weight, teacher_ids, len(weight), temperature)
    words = words_of(scaled, others, stats, teacher_ids is not None)
    per_logit = grads[0] * inverse(temperature, plain.dtype)
    by_divergence, by_target = (
        torch.where(targets < 0, 0.0, g).unsqueeze(1) for g in (per_logit, grads[1])
    )
    spread = words.gradient(
        direction, torch.tensor(beta, dtype=plain.dtype, device="cpu"), stats[:, 6:7]
    )
    likely = exp_nonpositive(normalised(plain, stats[:, 4:6]))
    at_target = torch.arange(len(weight), device="cpu") == targets.unsqueeze(1)
    toward = torch.where(at_target, 1.0 - likely, -likely)
    spread = spread * by_divergence + toward * by_target
    by_token = sum_products(FeaturePlan(len(weight)).products, spread, widen_rows(weight).t())[0]
    by_word = sum_products(samples.segments, spread.t(), widen_rows(hidden).t())
    total = by_word[0] if len(by_word) else torch.zeros_like(weight, dtype=spread.dtype)
    dtype = gradient_dtype(weight.dtype, len(samples.spans), samples.total)
    return round_once(by_token, hidden.dtype), round_once(total, dtype)


# Compare an executor's distillation_loss with the portable one, bit for bit.

VOCABULARY, WIDTH, ROWS = 1026, 3, 4  # two segments, each with a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(WIDTH)
    hidden, teacher, weight, head = (
        wide_values((n, WIDTH), dtype, generator) for n in (ROWS, ROWS, VOCABULARY, VOCABULARY)
    )
    teacher[0], head[:600] = hidden[0], weight[:600]  # words that are alike, and others
    targets = torch.tensor([0, VOCABULARY - 1, -100, 5], device="cpu")
    known = torch.tensor([[-1, 0, 3, 1025]] * ROWS, device="cpu")
    logprobs = torch.tensor([[-torch.inf, -1.5, -0.7, -3.0]] * ROWS, dtype=dtype, device="cpu")
    rest = torch.tensor([-1.7] * ROWS, dtype=dtype, device="cpu")
    samples = Samples.packed([ROWS])
    live, partly = (teacher, head, None, None), (logprobs, None, known, rest)
    kinds: list[tuple[Any, Any, Any, Any]] = [live, partly, live]
    grads = [wide_values((ROWS,), dtype, generator) for _ in range(2)]
    for direction, kind in zip(DIRECTIONS, kinds, strict=True):
        given: tuple[Any, Any, Any] = hidden, weight, targets
        how = 0.7, direction, 0.3
        spans = torch.tensor(samples.spans, device="cpu")
        found = call("distillation_loss", *given, *kind, *how, spans)
        known_result = distillation_loss(*given, *kind, *how)
        stats = known_result[2]
        back = (*given, *kind[:3], stats)
        found += call("distillation_loss_backward", *grads, *back, spans, *how, True, True)
        wanted = known_result + distillation_loss_backward(grads, *back, samples, *how)
        names = ("values", "log-probabilities", "sums", "dhidden", "dweight")
        for name, left, right in zip(names, found, wanted, strict=True):
            if not bits.equal(left, right):
                return f"distillation_loss's {name}, {direction}"
    return None
