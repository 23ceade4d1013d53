"""What logprob-kernel-v1 claims: targets chosen by the bits of hidden states, one sum over samples, errors bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.errors import ArgumentError
from isobit.library.linear.claims import SAMPLE_LENGTHS, moved, spread
from isobit.library.linear.proofs import error_factor, longest_way
from isobit.library.log_softmax.proofs import bound_of, reach_of
from isobit.library.softmax.proofs import U
from isobit.machine import thread_count
from isobit.ops.logprob import partial, portable
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import whole_samples
from isobit.order import tree
from isobit.order.cut import Cut
from isobit.order.samples import Samples

Score = Callable[..., Tensor]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # what it is, positional, keywords

TEMPERATURE = 0.7
FEW = 40  # rows of the portable executor's gradients


@dataclass(frozen=True)
class Scored:
    """Log-probabilities as contracts draw them: the bits of each hidden state choose its target."""

    score: Score

    def __call__(self, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self.score(hidden, weight, targets_of(hidden, len(weight)), **options)


def targets_of(hidden: Tensor, vocabulary: int) -> Tensor:
    """An id a row, a function of that row's bits alone; every sixteenth or so has none."""
    first = hidden[..., 0]
    raw = bits.as_integers(first.detach().float()).long().abs() // 3
    return torch.where(raw % 17 == 0, IGNORED, raw % vocabulary)


def drawn_targets(case: Case, count: int, stream: int) -> Tensor:
    """Any id, and some without."""
    ids = torch.randint(0, case.sizes["v"], (count,), generator=case.generator(stream))
    return torch.where(torch.rand(count, generator=case.generator(stream + 1)) < 0.1, IGNORED, ids)


def gradients(
    score: Score, hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """dhidden and dweight, by autograd."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        found = torch.autograd.grad(score(*leaves, targets, **options), leaves, grad)
    return found[0], found[1]


def other_targets(subject: Scored, case: Case, tally: Tally) -> None:
    """A row's value and dhidden do not know the other rows' targets, nor how ids are stored."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets, others = (drawn_targets(case, case.rows, stream) for stream in (70, 72))
    grad = case.draw((case.rows,), 74, "normal").float()
    tally.count(case.rows)
    whole = (
        subject.score(hidden, weight, targets),
        gradients(subject.score, hidden, weight, targets, grad)[0],
    )
    kept = torch.arange(case.rows) % 2 == 0
    mixed = torch.where(kept, targets, others)
    tally.same(
        subject.score(hidden, weight, mixed)[kept], whole[0][kept], "values beside other targets"
    )
    found = gradients(subject.score, hidden, weight, mixed, grad)[0]
    tally.same(found[kept], whole[1][kept], "dhidden beside other targets")
    tally.same(subject.score(hidden, weight, targets.int()), whole[0], "ids of 32 bits")


def temperature(subject: Scored, case: Case, tally: Tally) -> None:
    """A temperature of a power of two is a scale of the hidden states, values and gradients; others are defined."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 75)
    grad = case.draw((case.rows,), 77, "normal").float()
    tally.count(case.rows)
    for power in (-1, 1):
        scale = 2.0**power
        found = subject.score(hidden, weight, targets, temperature=1 / scale)
        tally.same(
            found, subject.score(hidden * scale, weight, targets), f"temperature {1 / scale}"
        )
        warm = gradients(subject.score, hidden, weight, targets, grad, temperature=1 / scale)
        scaled = gradients(subject.score, hidden * scale, weight, targets, grad)
        tally.same(warm[0], scaled[0] * scale, f"dhidden, temperature {1 / scale}")
        tally.same(warm[1], scaled[1], f"dweight, temperature {1 / scale}")
    if case.dtype == torch.float32:
        few = slice(0, FEW)
        known = portable.linear_logprob(hidden[few], weight, targets[few], TEMPERATURE)[0]
        tally.same(
            subject.score(hidden[few], weight, targets[few], temperature=TEMPERATURE),
            known,
            "temperature 0.7",
        )


def ignored(subject: Scored, case: Case, tally: Tally) -> None:
    """A row without a target has the value +0 and no gradient, and is not in dweight, whatever it holds."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 78)
    targets[::5] = IGNORED
    none = targets == IGNORED
    grad = case.draw((case.rows,), 80, "normal").float()
    tally.count(case.rows)
    values = subject.score(hidden, weight, targets)
    tally.same(values[none], torch.zeros_like(values[none]), "values without a target")
    by_row, by_word = gradients(subject.score, hidden, weight, targets, grad)
    tally.true(by_row[none] == 0, "dhidden without a target", by_row[none])
    other = torch.where(none.unsqueeze(1), case.draw(tuple(hidden.shape), 81), hidden)
    tally.same(
        gradients(subject.score, other, weight, targets, grad * ~none)[1],
        by_word,
        "dweight of other rows",
    )


def samples(subject: Scored, case: Case, tally: Tally) -> None:
    """dweight is one sum over the samples: packed, padded, in any storage, by any threads."""
    count, weight = sum(SAMPLE_LENGTHS), case.arguments["weight"]
    hidden, targets = case.draw((count, case.sizes["k"]), 90), drawn_targets(case, count, 91)
    grad = case.draw((count,), 93, "wide").float()
    described = Samples.packed(SAMPLE_LENGTHS)
    tally.count(count)
    whole = gradients(subject.score, hidden, weight, targets, grad, samples=described)[1]

    def compare(
        hidden: Tensor, targets: Tensor, grad: Tensor, described: Samples, where: str
    ) -> None:
        found = gradients(subject.score, hidden, weight, targets, grad, samples=described)[1]
        tally.same(found, whole, f"dweight, {where}")

    for where, placed in {
        "padded left": Samples.padded(SAMPLE_LENGTHS, width=520, side="left"),
        "padded right": Samples.padded(SAMPLE_LENGTHS, width=520),
        "stored in reverse": Samples(*moved(described)),
    }.items():
        room, at = drawn_targets(case, placed.rows, 94), 0
        for start, length in placed.spans:
            room[start : start + length] = targets[at : at + length]
            at += length
        put = spread(case, grad.unsqueeze(1), placed, 96).float().squeeze(1)
        compare(spread(case, hidden, placed, 95), room, put, placed, where)
    for name, store in LAYOUTS.items():
        compare(
            store(hidden), targets, store(grad.unsqueeze(1)).squeeze(1), described, f"stored {name}"
        )
    for threads in THREADS:
        with thread_count(threads):
            compare(hidden, targets, grad, described, f"{threads} threads")


def adds_up(subject: Scored, case: Case, tally: Tally) -> None:
    """Over all targets no log-probability is positive, and the probabilities sum to 1 within twice the bound."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    vocabulary = len(weight)
    tally.count(case.rows)
    every = torch.arange(vocabulary).repeat(case.rows)
    found = subject.score(hidden.repeat_interleave(vocabulary, 0), weight, every).reshape(
        case.rows, vocabulary
    )
    tally.true(found <= 0, "a positive log-probability", found)
    sums = found.double().exp().sum(1)
    limit = 2 * bound_of(
        vocabulary, 10.0
    )  # beyond 10 below the largest, e^-d outweighs what d adds to the error
    tally.true((sums - 1).abs() <= limit, f"|Σp − 1| over {limit:g}", sums)


def executors_agree(subject: Scored, case: Case, tally: Tally) -> None:
    """Values, dhidden and dweight have the portable executor's bits."""
    hidden, weight = (case.arguments[name] for name in ("hidden", "weight"))
    targets = drawn_targets(case, case.rows, 97)
    tally.count(case.rows)
    found = subject.score(hidden, weight, targets, temperature=TEMPERATURE)
    known, stats = portable.linear_logprob(hidden, weight, targets, TEMPERATURE)
    tally.same(found, known, "values")
    few = slice(0, FEW)
    grad = case.draw((case.rows,), 99, "wide")[few]
    mine = gradients(
        subject.score, hidden[few], weight, targets[few], grad, temperature=TEMPERATURE
    )
    described = whole_samples(hidden[few], None)
    given = grad, hidden[few], weight, targets[few], stats[few], described, TEMPERATURE
    for what, left, right in zip(
        ("dhidden", "dweight"), mine, portable.linear_logprob_backward(*given), strict=True
    ):
        tally.same(left, right, what)


def in_shares(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, described: Samples, parts: int
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Values by `parts` shares of the vocabulary, their roots of dhidden, and dweight."""
    cuts = [Cut(len(weight), parts, index) for index in range(parts)]
    words = [weight[cut.start : cut.start + cut.length] for cut in cuts]
    given = [
        partial.forward(hidden, w, targets, TEMPERATURE, cut)
        for w, cut in zip(words, cuts, strict=True)
    ]
    bit_sum = sum(bits.as_integers(chosen) for _, chosen in given)
    assert isinstance(bit_sum, Tensor)
    merged = partial.merge(torch.stack([pairs for pairs, _ in given]))
    values, stats = partial.finish(merged, bit_sum.view(torch.float32), targets)
    spans = torch.tensor(described.spans)
    grads = [
        partial.backward(grad, hidden, w, targets, stats, spans, TEMPERATURE, cut)
        for w, cut in zip(words, cuts, strict=True)
    ]
    return values, [root for root, _ in grads], torch.cat([by_word for _, by_word in grads])


def vocabulary_shares(subject: Scored, case: Case, tally: Tally) -> None:
    """Shares of the vocabulary, merged by the tree and rounded once, have the values and gradients of the whole."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 100)
    grad, described = case.draw((case.rows,), 102, "wide").float(), Samples.packed([case.rows])
    options: dict[str, Any] = {"temperature": TEMPERATURE, "samples": described}
    tally.count(case.rows)
    whole = subject.score(hidden, weight, targets, **options)
    by_row, by_word = gradients(subject.score, hidden, weight, targets, grad, **options)
    for parts in (2, 4):
        values, roots, words = in_shares(hidden, weight, targets, grad, described, parts)
        tally.same(values, whole, f"values of {parts} shares")
        tally.same(
            round_once(tree.merge(roots, torch.add), hidden.dtype),
            by_row,
            f"dhidden of {parts} shares",
        )
        tally.same(words, by_word, f"dweight of {parts} shares")


# ---- errors, with limits from the orders -----------------------------------------------------------------


def logits_error(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(exact logits, how far those of the certified order are from them, at most)."""
    h, w = hidden.double(), weight.double()
    return h @ w.t(), error_factor(hidden.shape[1], hidden.dtype) * (h.abs() @ w.abs().t())


def error_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """|value − exact| is at most the bound of the order, and what the logits may be off: once at the target, once in
    the sum."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 82).clamp(min=0)
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    exact = logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    allowed = bound_of(len(weight), reach_of(logits) + 1) + 2 * off.amax(1)
    error = (subject.score(hidden, weight, targets).double() - exact).abs()
    tally.true(error <= allowed, "error over the bound of the order", error / allowed)


def gradient_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """dhidden and dweight against fp64: probabilities off by the bound, two roundings, then the bound of each sum."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 83).clamp(min=0)
    grad = case.draw((case.rows,), 85, "normal").float()
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    p = logits.softmax(1)
    chosen = torch.nn.functional.one_hot(targets, len(weight)).double()
    exact = (chosen - p) * grad.double().unsqueeze(1)
    # log p is off by the bound and the logits' errors, its exponential by 2 u more; 1 − p and the product round once.
    relative = bound_of(len(weight), reach_of(logits) + 1) + off + off.amax(1, keepdim=True) + 4 * U
    each = 1.01 * relative * p * grad.double().abs().unsqueeze(1) + 3 * U * exact.abs() + 2.0**-100
    found = gradients(
        subject.score, hidden, weight, targets, grad, samples=Samples.packed([case.rows])
    )
    size, w, h = exact.abs() + each, weight.double(), hidden.double()
    chain = (
        (1 + U) ** (1 + 256 + case.rows // 256) - 1
    ) * 1.001  # a leaf of 256 tokens, leaves folded
    over_words = (1 + U) ** longest_way(len(weight), case.dtype) - 1
    limits = (
        each @ w.abs() + (over_words + U) * (size @ w.abs()),
        each.t() @ h.abs() + (chain + U) * (size.t() @ h.abs()),
    )
    for what, mine, true, limit in zip(
        ("dhidden", "dweight"), found, (exact @ w, exact.t() @ h), limits, strict=True
    ):
        error = (mine.double() - true).abs()
        tally.true(error <= limit, f"{what} over its bound", error / limit)


# ---- refusals --------------------------------------------------------------------------------------------


def refuses(subject: Scored, case: Case, tally: Tally) -> None:
    """Each call is refused by an ArgumentError, with words: the function itself is called, since ids are not drawn."""
    refuses_each(subject.score, refused_calls(), tally)


def refuses_each(function: Callable[..., Any], calls: Iterator[Call], tally: Tally) -> None:
    """An ArgumentError with a remedy for each call."""
    for what, given, named in calls:
        tally.count(1)
        tally.compared += 1
        try:
            function(*given, **named)
        except ArgumentError as refusal:
            if "remedy" not in str(refusal):
                tally.fail(f"{what}: refused without a remedy")
        except Exception as other:
            tally.fail(f"{what}: {type(other).__name__} instead of ArgumentError")
        else:
            tally.fail(f"{what}: accepted")


def refused_calls() -> Iterator[Call]:
    """Calls that have no log-probability."""
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])
    yield "a target beyond the vocabulary", (hidden, weight, torch.tensor([0, 5])), {}
    yield "a negative target", (hidden, weight, torch.tensor([0, -1])), {}
    yield "targets that are numbers", (hidden, weight, targets.float()), {}
    yield "fewer targets than rows", (hidden, weight, targets[:1]), {}
    yield "widths that differ", (hidden[:, :2], weight, targets), {}
    yield "two dtypes", (hidden.bfloat16(), weight, targets), {}
    yield "integers", (hidden.int(), weight.int(), targets), {}
    yield "a temperature of 0", (hidden, weight, targets), {"temperature": 0.0}
    yield (
        "a temperature that is no number",
        (hidden, weight, targets),
        {"temperature": float("nan")},
    )
    yield (
        "samples that do not describe the rows",
        (hidden, weight, targets),
        {"samples": Samples.packed([3])},
    )


ours = Scored(linear_logprob)
