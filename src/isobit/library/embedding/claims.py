"""What embedding-kernel-v1 claims: ids drawn as numbers, one sum over samples, and planted wrong embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.errors import ArgumentError
from isobit.library.linear.claims import SAMPLE_LENGTHS, moved, spread
from isobit.library.questions import prove
from isobit.machine import thread_count
from isobit.ops.embedding import portable
from isobit.ops.embedding.op import embedding
from isobit.ops.portable.samples import whole_samples
from isobit.order.addition import digest
from isobit.order.evaluate import expected_tree
from isobit.order.samples import Samples
from isobit.records import Proof
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget

Lookup = Callable[..., Tensor]

FEW = 7  # ids of the samples' claims: all of them repeat
TOKENS = (2, 11, 258)


@dataclass(frozen=True)
class Embedded:
    """An embedding as contracts draw it: rows of numbers choose the ids, by their bits."""

    lookup: Lookup

    def __call__(self, places: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self.lookup(ids_of(places, len(weight)), weight, **options)


def ids_of(places: Tensor, vocabulary: int) -> Tensor:
    """An id per row: a function of that row's bits alone; a reference in fp64 has those of the fp32 values it got."""
    chosen = places[..., 0]
    return (
        bits.as_integers(chosen.float() if chosen.dtype == torch.float64 else chosen).long().abs()
        % vocabulary
    )


def table_grad(lookup: Lookup, ids: Tensor, weight: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """By autograd."""
    leaf = weight.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(lookup(ids, leaf, **options), leaf, grad)[0]


def tokens_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, table, gradients) of packed samples; gradients of each id cancel, and some are −0."""
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
    """The table's gradient is one sum over the samples: packed, padded, in any storage, by any threads."""
    ids, weight, grad = tokens_of(case)
    described = Samples.packed(SAMPLE_LENGTHS)
    tally.count(len(ids))
    whole = table_grad(subject.lookup, ids, weight, grad, samples=described)
    tally.same(
        whole[FEW - 2 :],
        torch.zeros_like(whole[FEW - 2 :]),
        "an id of −0 gradients, and one that is absent",
    )
    tally.same(whole, by_definition(ids, weight, grad, described), "against the definition")

    def compare(ids: Tensor, grad: Tensor, described: Samples, where: str) -> None:
        tally.same(table_grad(subject.lookup, ids, weight, grad, samples=described), whole, where)

    for where, placed in {
        "padded left": Samples.padded(SAMPLE_LENGTHS, width=520, side="left"),
        "padded right": Samples.padded(SAMPLE_LENGTHS, width=520),
        "stored in reverse": Samples(*moved(described)),
    }.items():
        room = torch.randint(0, FEW, (placed.rows,), generator=case.generator(63))
        at = 0
        for start, length in placed.spans:
            room[start : start + length] = ids[at : at + length]
            at += length
        compare(room, spread(case, grad, placed, 64), placed, where)
    for name, store in LAYOUTS.items():
        compare(ids, store(grad), described, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(ids.int(), grad, described, f"{threads} threads")


def by_definition(
    ids: Tensor, weight: Tensor, grad: Tensor, described: Samples, padding: int = -1
) -> Tensor:
    """The portable executor's."""
    return portable.embedding_weight_grad(grad, ids, described, len(weight), padding)


def padding_has_none(subject: Embedded, case: Case, tally: Tally) -> None:
    """The row of padding_idx has gradient zero; all others have what they had."""
    ids, weight, grad = tokens_of(case)
    described = Samples.packed(SAMPLE_LENGTHS)
    tally.count(len(ids))
    for padding in (2, -FEW):
        found = table_grad(
            subject.lookup, ids, weight, grad, samples=described, padding_idx=padding
        )
        expected = by_definition(ids, weight, grad, described, padding % FEW)
        tally.same(found, expected, f"padding_idx {padding}")
        tally.same(
            found[padding % FEW], torch.zeros_like(found[0]), f"the row of padding_idx {padding}"
        )


def prove_tokens(subject: Embedded) -> Proof:
    """The gradient of a row that all tokens of a sample share: a chain a leaf, leaves folded."""

    def make(k: int) -> TensorTarget:
        def lookup(ids: Tensor, weight: Tensor) -> Tensor:
            return subject.lookup(ids, weight)

        return targets.embedding_grad(k, 8, function=lookup)

    orders = {k: digest(expected_tree(Samples.packed([k]).segments, "chain")) for k in TOKENS}
    questions = [(f"{k} tokens", make, [{"k": k}], order) for k, order in orders.items()]
    return prove(questions, f"the gradient of one row that {list(TOKENS)} tokens of a sample share")


def refuses(subject: Embedded, case: Case, tally: Tally) -> None:
    """Each call is refused by an ArgumentError, with words: the lookup itself is called, since ids are not drawn."""
    tally.count(1)
    for what, given, named in refused_calls():
        tally.compared += 1
        try:
            subject.lookup(*given, **named)
        except ArgumentError as refusal:
            if "remedy" not in str(refusal):
                tally.fail(f"{what}: refused without a remedy")
        except Exception as other:
            tally.fail(f"{what}: {type(other).__name__} instead of ArgumentError")
        else:
            tally.fail(f"{what}: accepted")


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that no embedding takes."""
    ids, weight = torch.tensor([0, 1]), torch.ones(3, 4)
    yield "an id beyond the table", (torch.tensor([3]), weight), {}
    yield "a negative id", (torch.tensor([-1]), weight), {}
    yield "ids that are numbers", (ids.float(), weight), {}
    yield "ids that are a list", ([0, 1], weight), {}
    yield "a table that is a vector", (ids, weight[0]), {}
    yield "a table of integers", (ids, weight.int()), {}
    yield "a padding_idx beyond the table", (ids, weight), {"padding_idx": 3}
    yield "samples that do not describe the ids", (ids, weight), {"samples": Samples.packed([3])}


# ---- stock, and planted ---------------------------------------------------------------------------------


def stock_lookup(
    ids: Tensor, weight: Tensor, *, samples: Samples | None = None, padding_idx: int | None = None
) -> Tensor:
    """torch's own, which knows no samples."""
    return F.embedding(ids, weight, padding_idx)


Sums = Callable[[Tensor, Tensor, Tensor, Samples], Tensor]


class WithSums(torch.autograd.Function):
    """A lookup whose table's gradient is `sums(table of zeros, ids, gradients, samples)`."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, described: Samples, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.sums, ctx.described = sums, described
        ctx.save_for_backward(ids, weight)
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        zeros = torch.zeros(weight.shape)
        found = ctx.sums(
            zeros, ids.reshape(-1).long(), grad.reshape(-1, grad.shape[-1]).float(), ctx.described
        )
        return None, None, None, found.to(weight.dtype)


def with_sums(sums: Sums) -> Embedded:
    """A subject of the contract."""

    def lookup(
        ids: Tensor,
        weight: Tensor,
        *,
        samples: Samples | None = None,
        padding_idx: int | None = None,
    ) -> Tensor:
        described = samples or whole_samples(ids.unsqueeze(-1), None)
        return WithSums.apply(sums, described, ids, weight)  # type: ignore[no-any-return, no-untyped-call]

    return Embedded(lookup)


def real_tokens(described: Samples) -> Tensor:
    """Rows of samples, in order."""
    return torch.cat([torch.arange(start, start + length) for start, length in described.spans])


def _chained(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    for token in real_tokens(described).tolist():
        zeros[ids[token]] += grad[token]
    return zeros


def _once_each(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    real = real_tokens(described)
    zeros[ids[real]] = grad[real]
    return zeros


def _narrow(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    return _chained(zeros.bfloat16(), ids, grad.bfloat16(), described).float()


def _from_the_first(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    """Sums start from the first gradient instead of +0, so that −0 comes out."""
    found, real = _chained(zeros, ids, grad, described), real_tokens(described)
    negative = torch.full_like(zeros, -0.0)
    return torch.where(
        (found == 0) & (negative.index_add(0, ids[real], grad[real]) == 0), negative, found
    )


stock = Embedded(stock_lookup)
ours = Embedded(embedding)
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
