"""Claims of logprob-kernel-v1: rows and targets are independent, dweight is one sum, shares of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import refused_calls
from isobit.library.log_softmax.proofs import bound_of
from isobit.library.logprob.scored import Scored, drawn_targets, gradients
from isobit.library.placements import (
    SAMPLE_LENGTHS,
    in_every_storage_and_thread_count,
    placements,
    put,
    put_among_random,
)
from isobit.library.subjects import refuses_each
from isobit.ops.logprob import partial, portable
from isobit.ops.logprob.op import IGNORED
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import round_once
from isobit.order import tree
from isobit.order.cut import Cut
from isobit.order.samples import Samples

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
