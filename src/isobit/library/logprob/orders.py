"""Order certificates of linear_logprob's three sums, over words and over tokens, and proofs on small problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import draw_values
from isobit.foundation.records import Proof
from isobit.library.certificates import Question, feature_order, prove_orders, token_order
from isobit.library.log_softmax import proofs
from isobit.library.logprob.claims import TEMPERATURE
from isobit.library.logprob.scored import Scored, gradients
from isobit.library.subjects import Subject
from isobit.ops import dispatch
from isobit.ops.logprob import portable
from isobit.ops.logprob.op import IGNORED
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.order.samples import Samples
from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.sums import log_or_nothing
from isobit.reveal.targets.tensor_target import TensorTarget

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
    return proofs.prove_sign(rows_of(subject))


def prove_error(subject: Scored) -> Proof:
    """Bound the error in interval arithmetic: the order is certified, so its bound is the kernel's."""
    order = prove_orders((words_question(subject.score, k, 5, 1) for k in (64, 300)), "")
    return proofs.prove_log_bound(order, ERROR_LIMIT)


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
