"""The Triton executor of distillation_loss.

See [Note: a divergence without cancellation] in portable.py for the functions of a word, and [Note: logits on a GPU] in
isobit/ops/logprob/triton.py for how logits are computed: those of the student and of the teacher for as many tokens at
a time as fit in CHUNK elements, and for dweight for all tokens and some words, so that [tokens, vocabulary] never
exists. Gradients of logits have the dtypes of that note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.distillation.portable import DIRECTIONS, STATS
from isobit.ops.gpu.elementary import exp_nonpositive, log_positive, round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run
from isobit.ops.gpu.sums import merge_columns
from isobit.ops.linear.triton import multiply, sum_weight_grad
from isobit.ops.logprob.triton import (
    BLOCK,
    MERGED_ROWS,
    ROWS,
    WARPS,
    choose,
    scale_of,
    tokens_at_a_time,
    widen,
    words_at_a_time,
)
from isobit.ops.portable.samples import whole_samples
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FeaturePlan

STEPS = tl.constexpr(4)  # steps of 16 words whose loads do not wait for each other
FORWARD, REVERSE, JSD = (tl.constexpr(DIRECTIONS.index(d)) for d in ("forward", "reverse", "jsd"))


@triton.jit
def polynomial(a: tl.tensor) -> tl.tensor:
    """Return P(a) for 0 <= a < 1."""
    p = a * 1.6928126569837332e-05 + -0.00018832476052921265
    p = p * a + 0.0013822416076436639
    p = p * a + -0.008331050164997578
    p = p * a + 0.041666291654109955
    p = p * a + -0.166666641831398
    return p * a + 0.5


@triton.jit
def rise(a: tl.tensor) -> tl.tensor:
    """Return a − (1 − e^−a) of a >= 0."""
    return tl.where(a < 1.0, (a * a) * polynomial(a), a - (1.0 - exp_nonpositive(-a)))


@triton.jit
def bend(a: tl.tensor) -> tl.tensor:
    """Return 1 − (1 + a)·e^−a of a >= 0."""
    near = (a * a) * (1.0 - (a + 1.0) * polynomial(a))
    far = 1.0 - exp_nonpositive(-a) * (tl.where(a > 128.0, 128.0, a) + 1.0)
    return tl.where(a < 1.0, near, far)


@triton.jit
def fall(a: tl.tensor) -> tl.tensor:
    """Return 1 − e^−a of a >= 0."""
    return tl.where(a < 1.0, a * (1.0 - a * polynomial(a)), 1.0 - exp_nonpositive(-a))


@triton.jit
def compare_words(
    student: tl.tensor, teacher: tl.tensor, rest: tl.tensor, PARTLY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return log(teacher / student), the student's probability and the larger one, of log-probabilities.

    With PARTLY, +inf marks the teacher's words that are not known, whose log-ratio is `rest`.
    """
    ratio = tl.where(teacher == student, 0.0, teacher - student)
    if PARTLY:
        unknown = teacher == float("inf")
        spread = student + rest
        teacher = tl.where(unknown, tl.where(spread > 0.0, 0.0, spread), teacher)
        ratio = tl.where(unknown, rest, ratio)
    larger = exp_nonpositive(tl.where(teacher < student, student, teacher))
    return ratio, exp_nonpositive(student), larger


@triton.jit
def mix(ratio: tl.tensor, beta: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the weight of the smaller one, m over the larger one, and logs of larger / m and of m / smaller."""
    distance = tl.abs(ratio)
    weight = tl.where(ratio < 0.0, beta, 1.0 - beta)
    part = weight * fall(distance)
    middle = 1.0 - part
    # The rounding of 1 − part cancels in the quotient, so that a small part keeps its digits.
    above = -log_positive(middle) * tl.div_rn(part, 1.0 - middle)
    above = tl.where(middle == 1.0, part, above)
    below = distance - above
    return weight, middle, above, tl.where(below > 0.0, below, 0.0)


@triton.jit
def weigh(larger: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Return value times the larger probability, 0 where that is 0, whatever the value."""
    return tl.where(larger == 0.0, 0.0, larger * value)


@triton.jit
def terms_of(
    ratio: tl.tensor, larger: tl.tensor, beta: tl.tensor, DIRECTION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return each word's part of the divergence, and of what the gradient subtracts; the same unless it is jsd."""
    if DIRECTION == JSD:
        weight, middle, above, below = mix(ratio, beta)
        more, less = rise(above), middle * bend(below)
        found = weigh(larger, (1.0 - weight) * more + weight * less)
        offset = weigh(larger, tl.where(ratio < 0.0, more, less))
    else:
        distance = tl.abs(ratio)
        bends = ratio < 0.0 if DIRECTION == FORWARD else ratio > 0.0
        found = weigh(larger, tl.where(bends, bend(distance), rise(distance)))
        offset = found
    return found, offset


@triton.jit
def differentiate_terms(
    ratio: tl.tensor,
    student: tl.tensor,
    larger: tl.tensor,
    offset: tl.tensor,
    beta: tl.tensor,
    DIRECTION: tl.constexpr,
) -> tl.tensor:
    """Return the derivatives of the divergence by the student's scaled logits; `student` is its probability."""
    if DIRECTION == FORWARD:
        by = fall(tl.abs(ratio))
        found = larger * tl.where(ratio < 0.0, by, by * -1.0)
    elif DIRECTION == REVERSE:
        found = tl.where(student == 0.0, 0.0, student * ((0.0 - ratio) - offset))
    else:
        _weight, _middle, above, below = mix(ratio, beta)
        log = tl.where(ratio < 0.0, above, 0.0 - below)
        share = (1.0 - beta) * student
        found = tl.where(student == 0.0, 0.0, share * (log - offset))
    return found


@triton.jit
def load_pair(pairs: tl.tensor, row: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the maximum and the log of the sum of rows, of pairs [M, 2]."""
    top = tl.load(pairs + row * 2, mask=inside, other=0.0)
    return top, tl.load(pairs + row * 2 + 1, mask=inside, other=0.0)


@triton.jit
def load_rest(
    teacher_rest: tl.tensor,
    of_student: tl.tensor,
    of_others: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Return the log-ratio of rows' words that are not known, of teacher_rest [M] and pairs [M, 2]."""
    top, log_sum = load_pair(of_student, row, inside)
    other_top, other_log_sum = load_pair(of_others, row, inside)
    own_rest = ((other_top - top) + other_log_sum) - log_sum
    given_rest = tl.load(teacher_rest + row, mask=inside, other=0.0)
    return tl.where(given_rest == own_rest, 0.0, given_rest - own_rest)


@triton.jit
def terms_of_words(
    logits: tl.tensor,
    others: tl.tensor,
    inside: tl.tensor,
    inverse: tl.tensor,
    top: tl.tensor,
    log_sum: tl.tensor,
    other_top: tl.tensor,
    other_log_sum: tl.tensor,
    rest: tl.tensor,
    beta: tl.tensor,
    DIRECTION: tl.constexpr,
    PARTLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return `terms_of` words at the places `logits` and `others`; maxima and logs of sums are [ROWS, 1]."""
    student = tl.load(logits, mask=inside, other=0.0) * inverse
    student = (student - top) - log_sum
    teacher = tl.load(others, mask=inside, other=0.0)
    if not PARTLY:
        teacher = (teacher * inverse - other_top) - other_log_sum
    ratio, _, larger = compare_words(student, teacher, rest, PARTLY)
    return terms_of(ratio, larger, beta, DIRECTION)  # type: ignore[no-any-return]


@triton.jit(do_not_specialize=["m"])
def sum_terms(
    logits: tl.tensor,
    others: tl.tensor,
    of_student: tl.tensor,
    of_others: tl.tensor,
    teacher_rest: tl.tensor,
    sums: tl.tensor,
    m: tl.tensor,
    inverse: tl.tensor,
    beta: tl.tensor,
    DIRECTION: tl.constexpr,
    PARTLY: tl.constexpr,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store the sums of the terms of each segment, [m, SEGMENTS, 2]: the second one is of the offsets, for jsd.

    logits and others are fp32 [m, N], and the pairs of_... fp32 [m, 2] are maxima and logs of sums: of the student,
    scaled, and of the teacher. With PARTLY, `others` are log-probabilities, +inf where they are not known, of_others
    is of the student's words there, and teacher_rest [m] the log of the teacher's probability of them. A program
    computes one segment of ROWS rows; see [Note: a program per segment] in isobit/ops/logprob/triton.py.
    """
    LENGTH: tl.constexpr = N // SEGMENTS
    WHOLE: tl.constexpr = LENGTH // (16 * STEPS) * (16 * STEPS)
    segment = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    lane = tl.arange(0, 16)[None, :]
    place = row * N + segment * LENGTH + lane  # [ROWS, 16]
    logits += place
    others += place
    top, log_sum = load_pair(of_student, row, row < m)  # [ROWS, 1]
    other_top, other_log_sum = load_pair(of_others, row, row < m)
    rest = top * 0.0
    if PARTLY:
        rest = load_rest(teacher_rest, of_student, of_others, row, row < m)
    total = tl.zeros((ROWS, 16), tl.float32)
    offsets = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, WHOLE, 16 * STEPS):
        for step in tl.static_range(STEPS):
            at = start + 16 * step
            term, offset = terms_of_words(
                logits + at, others + at, row < m, inverse,
                top, log_sum, other_top, other_log_sum, rest, beta, DIRECTION, PARTLY,
            )  # fmt: skip
            total = total + term
            if DIRECTION == JSD:
                offsets = offsets + offset
    for at in range(WHOLE, LENGTH, 16):  # fewer than STEPS; lanes beyond the end add nothing
        known = at + lane < LENGTH
        term, offset = terms_of_words(
            logits + at, others + at, (row < m) & known, inverse,
            top, log_sum, other_top, other_log_sum, rest, beta, DIRECTION, PARTLY,
        )  # fmt: skip
        total = tl.where(known, total + term, total)
        if DIRECTION == JSD:
            offsets = tl.where(known, offsets + offset, offsets)
    place = sums + (row * SEGMENTS + segment) * 2
    tl.store(place, merge_columns(total, ROWS, 16), mask=row < m)
    if DIRECTION == JSD:
        tl.store(place + 1, merge_columns(offsets, ROWS, 16), mask=row < m)


@triton.jit
def store_stats(
    stats: tl.tensor, row: tl.tensor, inside: tl.tensor, AT: tl.constexpr, value: tl.tensor
) -> None:
    """Store column AT of stats [M, 8]."""
    tl.store(stats + row * 8 + AT, round_once(value, tl.float32), mask=inside)


@triton.jit(do_not_specialize=["m"])
def merge_terms(
    sums: tl.tensor,
    targets: tl.tensor,
    of_targets: tl.tensor,
    of_student: tl.tensor,
    of_others: tl.tensor,
    teacher_rest: tl.tensor,
    found: tl.tensor,
    stats: tl.tensor,
    m: tl.tensor,
    DIRECTION: tl.constexpr,
    PARTLY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store divergences, found [m], and stats [m, 8]; see STATS in portable.py for its columns.

    sums is fp32 [m, SEGMENTS, 2], targets int64 [m], of_targets [m, 2] the student's pair at temperature 1, and the
    others are as in sum_terms.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    place = sums + (row * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]) * 2  # [ROWS, SEGMENTS]
    total = tl.load(place, mask=row < m, other=0.0)
    target = tl.load(targets + row, mask=row < m, other=-1)
    result = merge_columns(total, ROWS, SEGMENTS)  # [ROWS, 1]
    result = tl.where(target < 0, 0.0, result)
    tl.store(found + row, round_once(result, tl.float32), mask=row < m)
    top, log_sum = load_pair(of_student, row, row < m)
    store_stats(stats, row, row < m, 0, top)
    store_stats(stats, row, row < m, 1, log_sum)
    plain_top, plain_log_sum = load_pair(of_targets, row, row < m)
    store_stats(stats, row, row < m, 4, plain_top)
    store_stats(stats, row, row < m, 5, plain_log_sum)
    if PARTLY:
        rest = load_rest(teacher_rest, of_student, of_others, row, row < m)
        store_stats(stats, row, row < m, 7, rest)
    else:
        other_top, other_log_sum = load_pair(of_others, row, row < m)
        store_stats(stats, row, row < m, 2, other_top)
        store_stats(stats, row, row < m, 3, other_log_sum)
    if DIRECTION == JSD:
        offsets = tl.load(place + 1, mask=row < m, other=0.0)
        store_stats(stats, row, row < m, 6, merge_columns(offsets, ROWS, SEGMENTS))
    elif DIRECTION == REVERSE:
        store_stats(stats, row, row < m, 6, result)


@triton.jit(do_not_specialize=["first", "columns"])
def differentiate_words(
    logits: tl.tensor,
    others: tl.tensor,
    targets: tl.tensor,
    stats: tl.tensor,
    by_divergence: tl.tensor,
    by_target: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    inverse: tl.tensor,
    beta: tl.tensor,
    DIRECTION: tl.constexpr,
    PARTLY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the gradients of the logits of the words from first on, out [M, columns].

    logits and others are fp32 [M, columns], targets int64 [M], stats fp32 [M, 8], and the gradients of divergences and
    of log-probabilities of targets fp32 [M].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    of_row = stats + row * 8
    plain = tl.load(logits + row * columns + column, mask=inside, other=0.0)
    teacher = tl.load(others + row * columns + column, mask=inside, other=0.0)
    student = (plain * inverse - tl.load(of_row)) - tl.load(of_row + 1)
    if not PARTLY:
        teacher = (teacher * inverse - tl.load(of_row + 2)) - tl.load(of_row + 3)
    ratio, own, larger = compare_words(student, teacher, tl.load(of_row + 7), PARTLY)
    spread = differentiate_terms(ratio, own, larger, tl.load(of_row + 6), beta, DIRECTION)
    likely = exp_nonpositive((plain - tl.load(of_row + 4)) - tl.load(of_row + 5))
    target = tl.load(targets + row)
    toward = tl.where(column + first == target, 1.0 - likely, 0.0 - likely)
    divergence = tl.where(target < 0, 0.0, tl.load(by_divergence + row) * inverse)
    logprob = tl.where(target < 0, 0.0, tl.load(by_target + row))
    result = round_once(spread * divergence + toward * logprob, out.dtype.element_ty)
    tl.store(out + row * columns + column, result, mask=inside)


@dataclass(frozen=True)
class Models:
    """The student and the teacher of a call, and the constants of its kernels."""

    hidden: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor | None
    teacher_ids: Tensor | None
    temperature: float
    direction: str
    beta: float

    @property
    def scale(self) -> float:
        """1 / temperature in fp32."""
        return scale_of(self.temperature)

    @property
    def constants(self) -> dict[str, Any]:
        """DIRECTION and PARTLY."""
        return {
            "DIRECTION": DIRECTIONS.index(self.direction),
            "PARTLY": self.teacher_ids is not None,
        }

    @property
    def tokens(self) -> int:
        """How many tokens are computed at a time, of all words."""
        return tokens_at_a_time(2 * len(self.weight))

    def logits(self, rows: slice, words: slice) -> tuple[Tensor, Tensor]:
        """Return fp32 logits of some tokens and words, the student's and the teacher's; none of them is scaled."""
        own = multiply(self.hidden[rows], self.weight[words], None, torch.float32)
        given = self.teacher[rows]
        if self.teacher_weight is not None:
            return own, multiply(given, self.teacher_weight[words], None, torch.float32)
        if self.teacher_ids is None:
            return own, given[:, words].float().contiguous()
        # The column after the last is for words that are not among these.
        count = own.shape[1]
        at = self.teacher_ids[rows] - (words.start or 0)
        at = torch.where((at >= 0) & (at < count), at, count)
        room = torch.full((len(own), count + 1), torch.inf, dtype=own.dtype, device=own.device)
        return own, room.scatter_(1, at, given.float())[:, :count].contiguous()


def scores(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of targets [M], and maxima and logs of sums [M, 2], of logits times `scale`."""
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    pairs = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    choose(logits, targets, scale, found, pairs)
    return found, pairs


@triton_operator("distillation_loss")
def triton_distillation_loss(
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
    spans: Tensor | None,
    of: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    how = temperature, direction, beta
    models = Models(hidden, weight, teacher, teacher_weight, teacher_ids, *how)
    tokens, device, step = len(hidden), hidden.device, models.tokens
    found, logprobs = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(2))
    stats = torch.zeros(tokens, STATS, dtype=torch.float32, device=device)
    targets = targets.contiguous()
    for at in range(0, tokens, step):
        part = slice(at, at + step)
        chosen = targets[part]
        logits, others = models.logits(part, slice(None))
        logprobs[part], of_targets = scores(logits, chosen, 1.0)
        _, of_student = scores(logits, chosen, models.scale)
        rest = of_student  # not read, unless there is one
        if teacher_rest is None:
            _, of_others = scores(others, chosen, models.scale)
        else:
            unknown = torch.where(others == torch.inf, logits, -torch.inf)
            _, of_others = scores(unknown, chosen, models.scale)
            rest = teacher_rest[part].float().contiguous()
        rows, words = logits.shape
        segments = FeaturePlan(words).count
        sums = torch.empty(rows, segments, 2, dtype=torch.float32, device=device)
        sizes = {"SEGMENTS": segments, "warps": 1, **models.constants}
        terms = logits, others, of_student, of_others, rest, sums, rows, models.scale, beta
        run(sum_terms, (-(-rows // ROWS), segments), *terms, N=words, ROWS=ROWS, **sizes)
        pairs = of_targets, of_student, of_others, rest
        merged = sums, chosen, *pairs, found[part], stats[part], rows
        run(merge_terms, (-(-rows // MERGED_ROWS),), *merged, ROWS=MERGED_ROWS, **sizes)
    return found, logprobs, stats


def spread_of(
    models: Models, rows: slice, words: slice, targets: Tensor, stats: Tensor, *grads: Tensor
) -> Tensor:
    """Return the gradients of the logits of some tokens and words, in the dtype of products."""
    logits, others = models.logits(rows, words)
    dtype = torch.bfloat16 if models.hidden.dtype == torch.bfloat16 else torch.float32
    out = torch.empty_like(logits, dtype=dtype)
    grid = (logits.shape[0], -(-logits.shape[1] // BLOCK))
    of_rows = (t[rows] for t in (targets, stats, *grads))
    sizes = words.start or 0, logits.shape[1], models.scale, models.beta
    given = logits, others, *of_rows, out, *sizes
    run(differentiate_words, grid, *given, BLOCK=BLOCK, warps=WARPS, **models.constants)
    return out


@triton_operator("distillation_loss_backward")
def triton_distillation_loss_backward(
    divergence: Tensor,
    logprob: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_ids: Tensor | None,
    stats: Tensor,
    spans: Tensor,
    temperature: float,
    direction: str,
    beta: float,
    want_hidden: bool,
    want_weight: bool,
    of: int = 0,
) -> tuple[Tensor, Tensor]:
    samples = whole_samples(hidden, spans, of if want_weight else 0)
    how = temperature, direction, beta
    models = Models(hidden, weight, teacher, teacher_weight, teacher_ids, *how)
    tokens, words = len(hidden), len(weight)
    given = tuple(t.contiguous() for t in (targets, stats, divergence, logprob))
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    for at in range(0, tokens if want_hidden else 0, models.tokens):
        part = slice(at, at + models.tokens)
        spread = spread_of(models, part, slice(None), *given)
        out = dhidden[part]
        multiply(spread, widen(weight), None, hidden.dtype, transposed=True, out=out)
    dtype = gradient_dtype(weight.dtype, len(samples.spans), samples.total)
    dweight = torch.empty(weight.shape, dtype=dtype, device=hidden.device)
    step = words_at_a_time(2 * tokens)
    for at in range(0, words if want_weight else 0, step):
        part = slice(at, at + step)
        spread = spread_of(models, slice(None), part, *given)
        sum_weight_grad(spread, widen(hidden), samples, dtype, out=dweight[part])
    return dhidden, dweight
