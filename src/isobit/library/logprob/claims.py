"""Claims of logprob-kernel-v1: rows and targets are independent, dweight is one sum, shares of the vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.foundation.records import Proof
from isobit.library import claims as autograd
from isobit.library import log_softmax, refused_calls
from isobit.library.certificates import (
    Question,
    U,
    error_factor,
    feature_order,
    prove_orders,
    sum_depth,
    token_order,
)
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    Subject,
    in_every_storage_and_thread_count,
    placements,
    put,
    put_among_random,
    refuses_each,
)
from isobit.library.log_softmax import bound_of, reach_of
from isobit.ops import dispatch
from isobit.ops.logprob import partial, portable
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import round_once
from isobit.order import tree
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.sums import log_or_nothing
from isobit.reveal.targets.tensor_target import TensorTarget

# Log-probabilities as the contracts draw them, and their gradients.

Score = Callable[..., Tensor]  # (hidden, weight, targets, **options) -> a number per row, or a loss


@dataclass(frozen=True)
class Scored:
    """A subject whose targets are chosen by the bits of the hidden states."""

    score: Score

    def __call__(self, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Score each row at the target that its bits choose."""
        return self.score(hidden, weight, targets_of(hidden, len(weight)), **options)


def targets_of(hidden: Tensor, vocabulary: int) -> Tensor:
    """Return an id per row, a function of that row's bits alone; about one in 17 is ignored."""
    raw = bits.as_integers(hidden[..., 0].detach().float()).long().abs() // 3
    return torch.where(raw % 17 == 0, IGNORED, raw % vocabulary)


def drawn_targets(case: Case, count: int, stream: int) -> Tensor:
    """Return random ids; about one in ten is ignored."""
    ids = torch.randint(0, case.sizes["v"], (count,), generator=case.generator(stream))
    return torch.where(torch.rand(count, generator=case.generator(stream + 1)) < 0.1, IGNORED, ids)


def gradients(
    score: Score, hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return dhidden and dweight by autograd."""
    found = autograd.gradients(
        lambda hidden, weight: score(hidden, weight, targets, **options), (hidden, weight), grad
    )
    return found[0], found[1]


ours = Scored(linear_logprob)


TEMPERATURE = 0.7
FEW = slice(0, 40)  # rows of the portable executor's gradients


def other_targets(subject: Scored, case: Case, tally: Tally) -> None:
    """A row's value and dhidden depend neither on other rows' targets nor on the dtype of ids."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets, others = (drawn_targets(case, case.rows, stream) for stream in (70, 72))
    grad = case.draw((case.rows,), 74, "normal").float()
    tally.count(case.rows)
    whole = subject.score(hidden, weight, targets)
    by_row = gradients(subject.score, hidden, weight, targets, grad)[0]
    kept = torch.arange(case.rows) % 2 == 0
    mixed = torch.where(kept, targets, others)
    found = subject.score(hidden, weight, mixed)
    tally.same(found[kept], whole[kept], "values next to other targets")
    found = gradients(subject.score, hidden, weight, mixed, grad)[0]
    tally.same(found[kept], by_row[kept], "dhidden next to other targets")
    tally.same(subject.score(hidden, weight, targets.int()), whole, "ids of 32 bits")


def temperature(subject: Scored, case: Case, tally: Tally) -> None:
    """A temperature that is a power of two scales the hidden states; others have the definition's bits."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 75)
    grad = case.draw((case.rows,), 77, "normal").float()
    tally.count(case.rows)
    for scale in (0.5, 2.0):
        where, warm = f"temperature {1 / scale}", {"temperature": 1 / scale}
        found = subject.score(hidden, weight, targets, **warm)
        tally.same(found, subject.score(hidden * scale, weight, targets), where)
        mine = gradients(subject.score, hidden, weight, targets, grad, **warm)
        scaled = gradients(subject.score, hidden * scale, weight, targets, grad)
        tally.same(mine[0], scaled[0] * scale, f"dhidden, {where}")
        tally.same(mine[1], scaled[1], f"dweight, {where}")
    if case.dtype == torch.float32:
        known = portable.linear_logprob(hidden[FEW], weight, targets[FEW], TEMPERATURE)[0]
        found = subject.score(hidden[FEW], weight, targets[FEW], temperature=TEMPERATURE)
        tally.same(found, known, "temperature 0.7")


def ignored(subject: Scored, case: Case, tally: Tally) -> None:
    """An ignored row has the value +0 and no gradient, and does not change dweight, whatever it holds."""
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
    found = gradients(subject.score, other, weight, targets, grad * ~none)[1]
    tally.same(found, by_word, "dweight of other rows")


def samples(subject: Scored, case: Case, tally: Tally) -> None:
    """The gradient dweight is one sum over the samples: packed, padded, in any storage, on any threads."""
    count, weight = sum(SAMPLE_LENGTHS), case.arguments["weight"]
    hidden, targets = case.draw((count, case.sizes["k"]), 90), drawn_targets(case, count, 91)
    grad = case.draw((count, 1), 93, "wide").float()
    packed = Samples.packed(SAMPLE_LENGTHS)
    tally.count(count)

    def dweight(hidden: Tensor, grad: Tensor, described: Samples, targets: Tensor) -> Tensor:
        given = hidden, weight, targets, grad.squeeze(1)
        return gradients(subject.score, *given, samples=described)[1]

    whole = dweight(hidden, grad, packed, targets)

    def compare(
        hidden: Tensor, grad: Tensor, described: Samples, where: str, targets: Tensor = targets
    ) -> None:
        tally.same(dweight(hidden, grad, described, targets), whole, f"dweight, {where}")

    for where, lying in placements(SAMPLE_LENGTHS, 520):
        ids = put(drawn_targets(case, lying.rows, 94), targets, lying)
        moved = put_among_random(case, hidden, lying, 95)
        compare(moved, put_among_random(case, grad, lying, 96).float(), lying, where, ids)
    in_every_storage_and_thread_count(compare, (hidden, grad), packed)


def adds_up(subject: Scored, case: Case, tally: Tally) -> None:
    """No log-probability is positive, and probabilities over all targets sum to 1 within twice the bound."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    vocabulary = len(weight)
    tally.count(case.rows)
    every = torch.arange(vocabulary).repeat(case.rows)
    found = subject.score(hidden.repeat_interleave(vocabulary, 0), weight, every)
    found = found.reshape(case.rows, vocabulary)
    tally.true(found <= 0, "a positive log-probability", found)
    sums = found.double().exp().sum(1)
    # At d below the largest, the error grows with d and the probability falls with e^-d: 10 is enough.
    limit = 2 * bound_of(vocabulary, 10.0)
    tally.true((sums - 1).abs() <= limit, f"|Σp − 1| over {limit:g}", sums)


def executors_agree(subject: Scored, case: Case, tally: Tally) -> None:
    """Values, dhidden and dweight have the portable executor's bits."""
    hidden, weight = (case.arguments[name] for name in ("hidden", "weight"))
    targets, warm = drawn_targets(case, case.rows, 97), {"temperature": TEMPERATURE}
    tally.count(case.rows)
    known, stats = portable.linear_logprob(hidden, weight, targets, TEMPERATURE)
    tally.same(subject.score(hidden, weight, targets, **warm), known, "values")
    grad, few = case.draw((case.rows,), 99, "wide")[FEW], hidden[FEW]
    mine = gradients(subject.score, few, weight, targets[FEW], grad, **warm)
    described = whole_samples(few, None)
    given = grad, few, weight, targets[FEW], stats[FEW], described, TEMPERATURE
    theirs = portable.linear_logprob_backward(*given)
    for what, left, right in zip(("dhidden", "dweight"), mine, theirs, strict=True):
        tally.same(left, right, what)


def in_shares(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, described: Samples, parts: int
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return values by `parts` shares of the vocabulary, each share's root of dhidden, and dweight."""
    cuts = [Cut(len(weight), parts, index) for index in range(parts)]
    shares = [(weight[cut.start : cut.start + cut.length], cut) for cut in cuts]
    given = [partial.forward(hidden, w, targets, TEMPERATURE, cut) for w, cut in shares]
    # One share has the chosen logit, the others have 0: added as integers, its bits remain.
    bit_sum = sum(bits.as_integers(chosen) for _, chosen in given)
    assert isinstance(bit_sum, Tensor)
    merged = partial.merge(torch.stack([pairs for pairs, _ in given]))
    values, stats = partial.finish(merged, bit_sum.view(torch.float32), targets)
    spans = torch.tensor(described.spans)
    grads = [
        partial.backward(grad, hidden, w, targets, stats, spans, TEMPERATURE, cut)
        for w, cut in shares
    ]
    return values, [root for root, _ in grads], torch.cat([by_word for _, by_word in grads])


def vocabulary_shares(subject: Scored, case: Case, tally: Tally) -> None:
    """Shares of the vocabulary, merged by the tree and rounded once, have the bits of the whole."""
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
        merged = round_once(tree.merge(roots, torch.add), hidden.dtype)
        tally.same(merged, by_row, f"dhidden of {parts} shares")
        tally.same(words, by_word, f"dweight of {parts} shares")


def refuses(subject: Scored, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy; the function is called with targets of its own."""
    refuses_each(subject.score, refused_calls.linear_logprob(), tally)


# Order certificates of linear_logprob's three sums, over words and over tokens, and proofs on small problems.

Picked = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # (hidden, weight, targets) -> log-probabilities

# (words, rows, threads): one segment, four segments, one long segment; a second thread where a call has rows for it.
SUMS = ((64, 5, 1), (300, 33, 1), (64, 33, 2), (1100, 33, 1), (1101, 33, 1))
TOKENS = (2, 11, 257)
DTYPES = (torch.float32, torch.bfloat16)
ERROR_LIMIT = (1100, 3.2e-5)  # (vocabulary, limit): what the proof must stay within


def words_target(k: int, m: int, function: Picked) -> TensorTarget:
    """Return Σ exp over k words: hidden states are unit vectors, so row i's logits are the weight's i-th column."""
    logits, unit = torch.zeros(m, k), torch.eye(m)

    def run() -> Tensor:
        return function(unit, logits.t().contiguous(), logits.argmax(1))

    return TensorTarget(
        f"log-probabilities of {m}×{k}", logits, run, "positive", encode=log_or_nothing
    )


def dhidden_target(
    k: int, m: int, function: Picked, dtype: torch.dtype = torch.float32
) -> TensorTarget:
    """Return dhidden over k − 1 words.

    Hidden states are zero, so that all words are equally likely, and the upstream gradient makes each
    factor exactly 1. The last word is the target, and is not probed.
    """
    weight = torch.zeros(k, 8, dtype=dtype)
    hidden = torch.zeros(m, 8, dtype=dtype, requires_grad=True)
    with torch.enable_grad():
        out = function(hidden, weight, torch.full((m,), k - 1))
    run = backward_of(out, hidden, torch.full((m,), -inverse_probability(k)))
    terms = weight.data[:-1].t()
    return TensorTarget(f"dhidden of {m}×{k}", terms, lambda: run()[-1], everywhere=run)


def inverse_probability(k: int) -> float:
    """Return the number whose product with exp(−log k), as the kernel has it, is exactly 1."""
    one = exp_nonpositive(-log_positive(torch.tensor([float(k)])))
    near = 1 / one
    for tried in (near, torch.nextafter(near, 2 * near), torch.nextafter(near, near / 2)):
        if float(one * tried) == 1:
            return float(tried)
    raise ValueError(f"1/{k} has no inverse: choose another vocabulary")


def dweight_target(k: int, function: Picked, dtype: torch.dtype = torch.float32) -> TensorTarget:
    """Return dweight of an unlikely word over k tokens with it as target: 1 − exp(−200) is 1, a term g · hidden."""
    width = 8
    hidden, weight = torch.zeros(k, 2 * width, dtype=dtype), torch.zeros(3, 2 * width, dtype=dtype)
    hidden[:, -1], weight[0, -1] = 1, -200
    weight.requires_grad_()
    grad = torch.ones(k)
    with torch.enable_grad():
        out = function(hidden, weight, torch.zeros(k, dtype=torch.int64))
    run, terms = backward_of(out, weight, grad), hidden.data[:, :width].t()
    name = f"dweight over {k} tokens"
    return TensorTarget(name, terms, lambda: run()[0, :width], "product", grad)


def words_question(function: Picked, k: int, m: int, threads: int) -> Question:
    """Ask for the order of Σ exp over k words, m rows in a call."""

    def target(m: int) -> TensorTarget:
        return words_target(k, m, function)

    order = feature_order(k, "striped")
    return Question(f"{k} words", target, [{"m": m, "threads": threads}], order)


def dhidden_question(subject: Scored, k: int, dtype: torch.dtype) -> Question:
    """Ask for the order of dhidden over k words; the last is not probed."""

    def target(m: int) -> TensorTarget:
        return dhidden_target(k, m, subject.score, dtype)

    order = feature_order(k, dispatch.engine_of(dtype), k - 1)
    shapes = [{"m": m} for m in ((1, 33) if k < 1024 else (5,))]
    return Question(f"dhidden over {k} words, {dtype}", target, shapes, order)


def dweight_question(subject: Scored, tokens: int, dtype: torch.dtype) -> Question:
    """Ask for the order of dweight over the tokens of a sample."""

    def target() -> TensorTarget:
        return dweight_target(tokens, subject.score, dtype)

    threads = (1, 2) if tokens == TOKENS[1] else (1,)
    order = token_order(tokens, dispatch.engine_of(dtype))
    return Question(f"{tokens} tokens, {dtype}", target, [{"threads": t} for t in threads], order)


def prove_words(subject: Scored) -> Proof:
    """Certify the log-sum-exp and dhidden over the vocabulary, and compare bits with the definition."""

    def questions() -> Iterator[Question]:
        for sizes in SUMS:
            yield words_question(subject.score, *sizes)
        for k, dtype in itertools.product((300, 1024), DTYPES):
            yield dhidden_question(subject, k, dtype)

    covers = (
        f"Σ exp over words in pairs, at (words, rows, threads) of {list(SUMS)}; dhidden over 300 and "
        "1024 words at 1, 5 or 33 rows, fp32 and bf16; bits are the definition's at 1, 5 and 33 rows; "
        "all else is elementwise"
    )
    proof = prove_orders(questions(), covers)
    for k in (64, 300, 1100) if proof.kept else ():
        logits = draw_values((33, k), "logits", torch.Generator().manual_seed(k))
        unit, weight, targets = torch.eye(33), logits.t().contiguous(), torch.arange(33)
        known = portable.linear_logprob(unit, weight, targets, 1.0)[0]
        for rows in (slice(0, 1), slice(5), slice(33)):
            found = subject.score(unit[rows], weight, targets[rows])
            difference = bits.first_difference(found, known[rows])
            if difference is not None:
                failure = f"{k} words against the definition: {difference}"
                return Proof(proof.engine, "", proof.cases, failure)
    return proof


def prove_tokens(subject: Scored) -> Proof:
    """Certify dweight over the tokens of a sample."""
    pairs = itertools.product(DTYPES, TOKENS)
    covers = (
        f"dweight over samples of {list(TOKENS)} tokens, fp32 and bf16; all else is elementwise"
    )
    return prove_orders((dweight_question(subject, n, dtype) for dtype, n in pairs), covers)


def rows_of(subject: Scored) -> Subject:
    """Return the log-softmax behind the scores: hidden states are unit vectors, each row with every target."""

    def one_block(block: Tensor) -> Tensor:
        (count, n), unit = block.shape, torch.eye(len(block))
        every = torch.arange(n).repeat(count)
        found = subject.score(unit.repeat_interleave(n, 0), block.t().contiguous(), every)
        return found.reshape(count, n)

    # 32 rows per call, so that the unit vectors stay short.
    return lambda logits: torch.cat([one_block(block) for block in logits.split(32)])


def prove_sign(subject: Scored) -> Proof:
    """Prove that no log-probability is positive."""
    return log_softmax.prove_sign(rows_of(subject))


def prove_error(subject: Scored) -> Proof:
    """Bound the error in interval arithmetic: the order is certified, so its bound is the kernel's."""
    order = prove_orders((words_question(subject.score, k, 5, 1) for k in (64, 300)), "")
    return log_softmax.prove_log_bound(order, ERROR_LIMIT)


def prove_targets(subject: Scored) -> Proof:
    """Try every target of small vocabularies, and none, at every place: values and gradients are defined."""
    engine, cases = "enumeration of the real kernel", 0
    for vocabulary, width in ((1, 3), (2, 5), (17, 16), (67, 8)):
        generator = torch.Generator().manual_seed(vocabulary)
        weight = draw_values((vocabulary, width), "normal", generator)
        targets = torch.tensor([*range(vocabulary), IGNORED])
        shapes = (len(targets), width), (len(targets),)
        hidden, grad = (draw_values(shape, "normal", generator) for shape in shapes)
        shifts = range(0, len(targets), 1 if vocabulary < 20 else 13)
        for warmth, shift in itertools.product((1.0, TEMPERATURE), shifts):
            cases += len(targets)
            given = hidden, weight, targets.roll(shift)
            if not is_defined(subject, given, grad, warmth):
                where = f"targets moved by {shift}, temperature {warmth}"
                return Proof(engine, "", cases, f"{vocabulary} words, {where}")
    covers = "every target and none in every place (of 67 words, every thirteenth), of 1, 2, 17 and 67 words"
    return Proof(engine, covers, cases)


def is_defined(
    subject: Scored, given: tuple[Tensor, Tensor, Tensor], grad: Tensor, temperature: float
) -> bool:
    """Compare values, dhidden and dweight with the portable executor's."""
    known, stats = portable.linear_logprob(*given, temperature)
    described = Samples.packed([len(grad)])
    found = subject.score(*given, temperature=temperature, samples=described)
    mine = gradients(subject.score, *given, grad, temperature=temperature, samples=described)
    theirs = portable.linear_logprob_backward(grad, *given, stats, described, temperature)
    pairs = zip((found, *mine), (known, *theirs), strict=True)
    return all(bits.equal(a, b) for a, b in pairs)


# Claims of logprob-kernel-v1 about errors: values and gradients against fp64, with limits from the orders.


def logits_error(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact logits, and how far those of the certified order are from them at most."""
    h, w = hidden.double(), weight.double()
    return h @ w.t(), error_factor(hidden.shape[1], hidden.dtype) * (h.abs() @ w.abs().t())


def error_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """|value − exact| is within the bound of the order plus twice the error of the logits.

    An error of the logits counts once at the target and once in the sum.
    """
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 82).clamp(min=0)
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    exact = logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    allowed = bound_of(len(weight), reach_of(logits) + 1) + 2 * off.amax(1)
    error = (subject.score(hidden, weight, targets).double() - exact).abs()
    tally.true(error <= allowed, "error over the bound of the order", error / allowed)


def gradient_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """Errors of dhidden and dweight are within those of the probabilities, two roundings and the sum."""
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
    described = Samples.packed([case.rows])
    found = gradients(subject.score, hidden, weight, targets, grad, samples=described)
    size, w, h = exact.abs() + each, weight.double(), hidden.double()
    over_words = (1 + U) ** sum_depth(len(weight), case.dtype) - 1
    # A leaf of 256 tokens, leaves folded.
    over_tokens = ((1 + U) ** (1 + 256 + case.rows // 256) - 1) * 1.001
    limits = (
        each @ w.abs() + (over_words + U) * (size @ w.abs()),
        each.t() @ h.abs() + (over_tokens + U) * (size.t() @ h.abs()),
    )
    names, true = ("dhidden", "dweight"), (exact @ w, exact.t() @ h)
    for what, mine, wanted, limit in zip(names, found, true, limits, strict=True):
        error = (mine.double() - wanted).abs()
        tally.true(error <= limit, f"{what} over its bound", error / limit)
