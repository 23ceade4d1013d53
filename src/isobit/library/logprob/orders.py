"""The orders of linear_logprob's three sums, over the vocabulary and over tokens, and its proofs on small problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import draw_values
from isobit.library.linear.orders import with_threads
from isobit.library.log_softmax import proofs
from isobit.library.logprob.claims import TEMPERATURE, Scored, gradients
from isobit.library.questions import Question, pruned
from isobit.machine import thread_count
from isobit.ops import dispatch
from isobit.ops.logprob import portable
from isobit.ops.logprob.op import IGNORED
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.order.addition import digest
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples
from isobit.records import Proof
from isobit.reveal.certificate import certify
from isobit.reveal.targets.rows import log_or_nothing
from isobit.reveal.targets.tensor_target import TensorTarget

Picked = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets

# (words, rows, threads): one leaf, four segments, three folded leaves; a second thread where a call has rows for it.
SUMS = ((64, 5, 1), (300, 33, 1), (64, 33, 2), (1100, 33, 1), (1101, 33, 1))
TOKENS = (2, 11, 257)
DTYPES = (torch.float32, torch.bfloat16)
REACH = 100.0  # of the stated bound: logits from the largest to 100 below
ERROR_LIMIT = (1100, 3.2e-5)  # (vocabulary, limit): what the proof must stay within


def words_target(k: int, m: int, function: Picked) -> TensorTarget:
    """Σ exp over k words: hidden states are unit vectors, so that row i's logits are the weight's i-th column."""
    logits, unit = torch.zeros(m, k), torch.eye(m)

    def run() -> Tensor:
        return function(unit, logits.t().contiguous(), logits.argmax(1))

    return TensorTarget(
        f"log-probabilities of {m}×{k}", logits, run, "positive", encode=log_or_nothing
    )


def dhidden_target(
    k: int, m: int, function: Picked, dtype: torch.dtype = torch.float32
) -> TensorTarget:
    """dhidden over k − 1 words: hidden states are zero, so that all words are equally likely, and the upstream gradient
    makes each factor exactly 1. The last word is the target, and is not probed."""
    weight, hidden = (
        torch.zeros(k, 8, dtype=dtype),
        torch.zeros(m, 8, dtype=dtype, requires_grad=True),
    )
    with torch.enable_grad():
        out = function(hidden, weight, torch.full((m,), k - 1))
    grad = torch.full((m,), -inverse_probability(k))

    def run() -> Tensor:
        return torch.autograd.grad(out, hidden, grad, retain_graph=True)[0]

    return TensorTarget(
        f"dhidden of {m}×{k}", weight.data[:-1].t(), lambda: run()[-1], everywhere=run
    )


def inverse_probability(k: int) -> float:
    """What times exp(−log k), as the kernel has it, is exactly 1."""
    one = exp_nonpositive(-log_positive(torch.tensor([float(k)])))
    near = 1 / one
    for tried in (near, torch.nextafter(near, 2 * near), torch.nextafter(near, near / 2)):
        if float(one * tried) == 1:
            return float(tried)
    raise ValueError(f"1/{k} has no inverse: choose another vocabulary")


def dweight_target(k: int, function: Picked, dtype: torch.dtype = torch.float32) -> TensorTarget:
    """dweight of an unlikely word over k tokens whose target it is: 1 − exp(−200) is 1, so each term is g · hidden."""
    width = 8
    hidden, weight = torch.zeros(k, 2 * width, dtype=dtype), torch.zeros(3, 2 * width, dtype=dtype)
    hidden[:, -1], weight[0, -1] = 1, -200
    weight.requires_grad_()
    grad = torch.ones(k)
    with torch.enable_grad():
        out = function(hidden, weight, torch.zeros(k, dtype=torch.int64))

    def run() -> Tensor:
        return torch.autograd.grad(out, weight, grad, retain_graph=True)[0][0, :width]

    return TensorTarget(
        f"dweight over {k} tokens", hidden.data[:, :width].t(), run, "product", grad
    )


def words_order(k: int) -> str:
    """What the sum over k words must show."""
    return digest(expected_tree(FeaturePlan(k).segments, "striped"))


def words_question(function: Picked, k: int, m: int, threads: int) -> Question:
    """Σ exp over k words, m rows in a call."""

    def make(m: int) -> TensorTarget:
        return words_target(k, m, function)

    return f"{k} words", make, [{"m": m, "threads": threads}], words_order(k)


def prove(questions: Sequence[Question], covers: str) -> Proof:
    """Every configuration, which says its threads, has the defined order."""
    count = 0
    for what, target, shapes, expected in questions:

        def bound(
            threads: int, target: Callable[..., TensorTarget] = target, **shape: int
        ) -> TensorTarget:
            return with_threads(target(**shape), threads) if threads > 1 else target(**shape)

        found = certify(bound, shapes)
        count += found.count
        if not found.matches(expected):
            return Proof("order certificate", "", count, f"{what}: {found}")
    return Proof("order certificate", covers, count)


def prove_words(subject: Scored) -> Proof:
    """The log-sum-exp and dhidden over the vocabulary, at row counts and threads; and bits against the definition."""
    with thread_count(1):
        proof = prove([words_question(subject.score, *sizes) for sizes in SUMS], "")
        if proof.kept:
            proof = also(
                proof,
                prove(
                    [dhidden_question(subject, k, dtype) for k in (300, 1024) for dtype in DTYPES],
                    "",
                ),
            )
    for k in (64, 300, 1100) if proof.kept else ():
        logits = draw_values((33, k), "logits", torch.Generator().manual_seed(k))
        given = torch.eye(33), logits.t().contiguous(), torch.arange(33)
        known = portable.linear_logprob(*given, 1.0)[0]
        for rows in (slice(0, 1), slice(5), slice(33)):
            difference = bits.first_difference(
                subject.score(given[0][rows], given[1], given[2][rows]), known[rows]
            )
            if difference is not None:
                return Proof(
                    proof.engine, "", proof.cases, f"{k} words against the definition: {difference}"
                )
    covers = (
        f"Σ exp over words in pairs, at (words, rows, threads) of {list(SUMS)}; dhidden over 300 and 1024 words "
        "at 1, 5 or 33 rows, fp32 and bf16; bits are the definition's at 1, 5 and 33 rows; all else is elementwise"
    )
    return Proof(proof.engine, covers, proof.cases, proof.failure)


def also(first: Proof, second: Proof) -> Proof:
    """Both."""
    return Proof(second.engine, second.covers, first.cases + second.cases, second.failure)


def dhidden_question(subject: Scored, k: int, dtype: torch.dtype) -> Question:
    """dhidden over k words."""

    def make(m: int) -> TensorTarget:
        return dhidden_target(k, m, subject.score, dtype)

    order = pruned(expected_tree(FeaturePlan(k).segments, dispatch.engine_of(dtype)), k - 1)
    assert order is not None
    shapes = [{"m": m, "threads": 1} for m in ((1, 33) if k < 1024 else (5,))]
    return f"dhidden over {k} words, {dtype}", make, shapes, digest(order)


def prove_tokens(subject: Scored) -> Proof:
    """dweight over the tokens of a sample."""
    questions: list[Question] = []
    for dtype in DTYPES:
        for tokens in TOKENS:

            def make(k: int, dtype: torch.dtype = dtype) -> TensorTarget:
                return dweight_target(k, subject.score, dtype)

            order = digest(
                expected_tree(Samples.packed([tokens]).segments, dispatch.engine_of(dtype))
            )
            threads = (1, 2) if tokens == TOKENS[1] else (1,)
            shapes = [{"k": tokens, "threads": t} for t in threads]
            questions.append((f"{tokens} tokens, {dtype}", make, shapes, order))
    with thread_count(1):
        return prove(
            questions,
            f"dweight over samples of {list(TOKENS)} tokens, fp32 and bf16; all else is elementwise",
        )


def rows_of(subject: Scored) -> proofs.Rows:
    """The log-softmax that the log-probabilities are of: hidden states are unit vectors, each row with every target."""

    def rows(logits: Tensor) -> Tensor:
        # Few rows a call, so that the unit vectors stay short.
        return torch.cat([one_block(logits[at : at + 32]) for at in range(0, len(logits), 32)])

    def one_block(block: Tensor) -> Tensor:
        (count, n), unit = block.shape, torch.eye(len(block))
        every = torch.arange(n).repeat(count)
        return subject.score(unit.repeat_interleave(n, 0), block.t().contiguous(), every).reshape(
            count, n
        )

    return rows


def prove_sign(subject: Scored) -> Proof:
    """No log-probability is positive."""
    return proofs.prove_sign(rows_of(subject))


def prove_error(subject: Scored) -> Proof:
    """The order is certified, so the bound of the order is the kernel's; it is evaluated in interval arithmetic."""
    with thread_count(1):
        order = prove([words_question(subject.score, k, 5, 1) for k in (64, 300)], "")
    return bounded(order, *ERROR_LIMIT)


def bounded(order: Proof, width: int, limit: float) -> Proof:
    """The bound over a certified order, which must be within the stated limit."""
    engine = "interval bounds over the certified order"
    if not order.kept:
        return Proof(engine, "", order.cases, order.failure)
    found = proofs.bound_of(width, REACH)
    if not 0 < found <= limit:
        return Proof(engine, "", order.cases, f"at {width}: {found:.3g}, limit {limit:.3g}")
    covers = (
        f"fp32 logits that are at most {REACH:g} below the row's largest where they are read: the log-probability is "
        f"off by at most {proofs.say_bounds(REACH)}"
    )
    return Proof(engine, covers, order.cases + len(proofs.BOUNDED))


def prove_targets(subject: Scored) -> Proof:
    """Every target of small vocabularies, and none, at every place: values and gradients are the definition's."""
    cases = 0
    for vocabulary, width in ((1, 3), (2, 5), (17, 16), (67, 8)):
        generator = torch.Generator().manual_seed(vocabulary)
        weight = draw_values((vocabulary, width), "normal", generator)
        targets = torch.tensor([*range(vocabulary), IGNORED])
        hidden, grad = (
            draw_values((len(targets), *more), "normal", generator) for more in ((width,), ())
        )
        for temperature in (1.0, TEMPERATURE):
            for shift in range(0, len(targets), 1 if vocabulary < 20 else 13):
                cases += len(targets)
                chosen = targets.roll(shift)
                known, stats = portable.linear_logprob(hidden, weight, chosen, temperature)
                described = Samples.packed([len(targets)])
                options = {"temperature": temperature, "samples": described}
                found = subject.score(hidden, weight, chosen, **options)
                grads = gradients(subject.score, hidden, weight, chosen, grad, **options)
                given = grad, hidden, weight, chosen, stats, described, temperature
                wanted = known, *portable.linear_logprob_backward(*given)
                same = [bits.equal(a, b) for a, b in zip((found, *grads), wanted, strict=True)]
                if not all(same):
                    failure = f"{vocabulary} words, targets moved by {shift}, temperature {temperature}: {same}"
                    return Proof("enumeration of the real kernel", "", cases, failure)
    covers = "every target and none in every place (of 67 words, every thirteenth), of 1, 2, 17 and 67 words"
    return Proof("enumeration of the real kernel", covers, cases)
