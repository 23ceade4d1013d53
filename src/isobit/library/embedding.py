"""Claims of embedding-kernel-v1: the table's gradient is one sum over samples; padding_idx has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library import refused_calls
from isobit.library import stock as stock_functions
from isobit.library.certificates import Question, on_all_threads, prove_orders, token_order
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    gradients,
    in_every_storage_and_thread_count,
    must_raise,
    placements,
    put,
    put_among_random,
    rows_of,
    with_backward,
)
from isobit.ops.embedding import portable
from isobit.ops.embedding.op import embedding
from isobit.ops.portable.samples import whole_samples
from isobit.order.samples import Samples
from isobit.reveal import targets

Lookup = Callable[..., Tensor]

FEW = 7  # ids of the samples' claims: all of them repeat
TOKENS = (2, 11, 258)


@dataclass(frozen=True)
class Embedded:
    """An embedding whose ids are chosen by the bits of rows of numbers."""

    lookup: Lookup

    def __call__(self, places: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Look up the ids that the bits choose."""
        return self.lookup(ids_of(places, len(weight)), weight, **options)


def ids_of(places: Tensor, vocabulary: int) -> Tensor:
    """Return an id per row, a function of that row's bits in at most fp32."""
    chosen = places[..., 0]
    narrow = chosen.float() if chosen.dtype == torch.float64 else chosen
    return bits.as_integers(narrow).long().abs() % vocabulary


def table_grad(lookup: Lookup, ids: Tensor, weight: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """Return the gradient of the table."""
    return gradients(partial(lookup, ids), [weight], grad, **options)[0]


def tokens_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids, table, gradients) of packed samples; gradients of each id cancel, and some are −0."""
    count, n = sum(SAMPLE_LENGTHS), case.sizes["n"]
    ids = torch.randint(0, FEW - 1, (count,), generator=case.generator(60))
    grad = case.draw((count, n), 61, "wide")
    for v in range(FEW - 2):
        at = (ids == v).nonzero().flatten()
        half = len(at) // 2
        grad[at[half : 2 * half]] = -grad[at[:half]]
    grad[ids == FEW - 2] = -0.0
    return ids, case.draw((FEW, n), 62, "wide"), grad


def samples(subject: Embedded, case: Case, tally: Tally) -> None:
    """The table's gradient is one sum over the samples: packed, padded, in any storage, on any threads."""
    ids, weight, grad = tokens_of(case)
    described = Samples.packed(SAMPLE_LENGTHS)
    tally.count(len(ids))
    whole = table_grad(subject.lookup, ids, weight, grad, samples=described)
    zero = torch.zeros_like(whole[FEW - 2 :])
    tally.same(whole[FEW - 2 :], zero, "an id of −0 gradients, and one that is absent")
    tally.same(whole, by_definition(ids, weight, grad, described), "against the definition")

    narrow = ids.int()

    def compare(grad: Tensor, described: Samples, where: str, ids: Tensor = narrow) -> None:
        tally.same(table_grad(subject.lookup, ids, weight, grad, samples=described), whole, where)

    for where, lying in placements(SAMPLE_LENGTHS, 520):
        room = torch.randint(0, FEW, (lying.rows,), generator=case.generator(63))
        moved = put_among_random(case, grad, lying, 64)
        compare(moved, lying, where, put(room, ids, lying))
    in_every_storage_and_thread_count(compare, [grad], described)


def by_definition(
    ids: Tensor, weight: Tensor, grad: Tensor, described: Samples, padding: int = -1
) -> Tensor:
    """Return the portable executor's gradient."""
    return portable.embedding_weight_grad(grad, ids, described, len(weight), padding)


def padding_has_none(subject: Embedded, case: Case, tally: Tally) -> None:
    """The row of padding_idx has gradient zero; the others are unchanged."""
    ids, weight, grad = tokens_of(case)
    described = Samples.packed(SAMPLE_LENGTHS)
    tally.count(len(ids))
    for padding in (2, -FEW):
        options = {"samples": described, "padding_idx": padding}
        found = table_grad(subject.lookup, ids, weight, grad, **options)
        expected = by_definition(ids, weight, grad, described, padding % FEW)
        tally.same(found, expected, f"padding_idx {padding}")
        row = found[padding % FEW]
        tally.same(row, torch.zeros_like(row), f"the row of padding_idx {padding}")


def prove_tokens(subject: Embedded) -> Proof:
    """Certify the gradient of a row that all tokens of a sample share: a chain per leaf, leaves folded."""

    def lookup(ids: Tensor, weight: Tensor) -> Tensor:
        return subject.lookup(ids, weight)

    def question(k: int) -> Question:
        target = partial(targets.embedding_grad, k, 8, function=lookup)
        return Question(f"{k} tokens", target, on_all_threads([{}]), token_order(k, "chain"))

    covers = (
        f"the gradient of one row that {list(TOKENS)} tokens of a sample share, {list(THREADS)} "
        "threads; all else is elementwise"
    )
    return prove_orders((question(k) for k in TOKENS), covers)


def refuses(subject: Embedded, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy; the lookup itself is called with ids of its own."""
    tally.count(1)
    for what, given, named in refused_calls.embedding():
        must_raise(partial(subject.lookup, *given, **named), what, tally)


ours = Embedded(embedding)


# Planted wrong embeddings: other sums of the table's gradient, other rows, ids that wrap.

# (a table of zeros, ids, gradients, samples) -> the table's gradient
Sums = Callable[[Tensor, Tensor, Tensor, Samples], Tensor]


def with_sums(sums: Sums) -> Embedded:
    """Return a lookup whose table's gradient is computed by `sums`."""

    def lookup(ids: Tensor, weight: Tensor, *, samples: Any = None, **_: Any) -> Tensor:
        described = samples or whole_samples(ids.unsqueeze(-1), None)

        def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
            rows = grad.reshape(-1, grad.shape[-1]).float()
            found = sums(torch.zeros(weight.shape), ids.reshape(-1).long(), rows, described)
            return (found.to(weight.dtype),)

        return with_backward(lambda weight: weight[ids], backward, weight)

    return Embedded(lookup)


def _chained(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    for token in rows_of(described).tolist():
        zeros[ids[token]] += grad[token]
    return zeros


def _once_each(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    real = rows_of(described)
    zeros[ids[real]] = grad[real]
    return zeros


def _narrow(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    return _chained(zeros.bfloat16(), ids, grad.bfloat16(), described).float()


def _from_the_first(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    """Start sums from the first gradient instead of +0, so that the result can be −0."""
    found, real = _chained(zeros, ids, grad, described), rows_of(described)
    negative = torch.full_like(zeros, -0.0)
    return torch.where(
        (found == 0) & (negative.index_add(0, ids[real], grad[real]) == 0), negative, found
    )


stock = Embedded(stock_functions.embedding)
plain_index_add = with_sums(lambda zeros, ids, grad, described: zeros.index_add(0, ids, grad))
one_chain = with_sums(_chained)
duplicates_dropped = with_sums(_once_each)
bf16_sums = with_sums(_narrow)
negative_zeros = with_sums(_from_the_first)
without_padding_idx = Embedded(
    lambda ids, weight, samples=None, **_: embedding(ids, weight, samples=samples)
)
wrapping_ids = Embedded(lambda ids, weight, **_: weight[ids.long() % len(weight)])
off_by_one = Embedded(lambda ids, weight, **_: weight[(ids + 1) % len(weight)])
