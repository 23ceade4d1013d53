"""Claims that the contracts of both norms share: parameter gradients over samples, executors, small rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case, mirror
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library import stock
from isobit.library.certificates import (
    Question,
    feature_order,
    on_all_threads,
    prove_orders,
    token_order,
)
from isobit.library.claims import (
    SAMPLE_LENGTHS,
    Subject,
    gradients,
    in_every_storage_and_thread_count,
    is_real,
    placements,
    put_among_random,
    rows_of,
    with_backward,
)
from isobit.ops.layer_norm import portable as layer_portable
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import sum_samples
from isobit.ops.rms_norm import portable as rms_portable
from isobit.ops.rms_norm.op import rms_norm
from isobit.order.addition import Branch, chain
from isobit.order.evaluate import leaf_tree
from isobit.order.plan import FEATURE_CAP, LEAF, SAMPLE_CAP
from isobit.order.samples import Samples
from isobit.order.tree import merge_items
from isobit.reveal import targets
from isobit.reveal.targets.products import backward_of as gradient_of
from isobit.reveal.targets.tensor_target import TensorTarget

HEADS = 6  # two segments of three
EPS = 1e-6


def parameters_of(case: Case) -> list[Tensor]:
    """Return the weight, and the bias of a layer norm."""
    return [t for name, t in case.arguments.items() if name != "x"]


def cancelling_tokens(case: Case, heads: int) -> tuple[Tensor, Tensor]:
    """Return (grad, x) of packed tokens whose terms cancel: a change of order then changes the bits."""
    width = max(heads, 1) * case.sizes["n"]
    grad, x = (case.draw((sum(SAMPLE_LENGTHS), width), stream, "wide") for stream in (8, 9))
    return mirror(grad, 0, -1), mirror(x, 0, 1)


def samples(subject: Subject, case: Case, tally: Tally) -> None:
    """Gradients of parameters are one sum over the samples: packed, padded, in any storage, on any threads."""
    one_sum(subject, case, tally, 0)


def head_samples(subject: Subject, case: Case, tally: Tally) -> None:
    """Gradients of parameters are one sum over the samples, without heads and with heads."""
    one_sum(subject, case, tally, 0)
    one_sum(subject, case, tally, HEADS)


def one_sum(subject: Subject, case: Case, tally: Tally, heads: int) -> None:
    """Compare the parameters' gradients of a packed batch with those of every placement and storage."""
    parameters, lengths = parameters_of(case), SAMPLE_LENGTHS
    grad, x = cancelling_tokens(case, heads)
    options: dict[str, Any] = {"heads": True} if heads else {}

    def found(x: Tensor, grad: Tensor, described: Samples) -> tuple[Tensor, ...]:
        if heads:
            x, grad = (t.view(len(t), heads, -1) for t in (x, grad))
        return gradients(partial(subject, x), parameters, grad, samples=described, **options)

    def compare(x: Tensor, grad: Tensor, described: Samples, where: str) -> None:
        for at, (left, right) in enumerate(zip(whole, found(x, grad, described), strict=True)):
            tally.same(left, right, f"parameter {at}, {heads} heads, {where}")

    tally.count(len(x))
    whole = found(x, grad, Samples.packed(lengths))
    for where, lying in placements(lengths, max(lengths) + 5):
        moved = put_among_random(case, x, lying, 11)
        compare(moved, put_among_random(case, grad, lying, 10), lying, where)
    in_every_storage_and_thread_count(compare, (x, grad), Samples.packed(lengths))


def forward_of(x: Tensor, given: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, means, scales) of the portable executor; one parameter means rms_norm, two layer_norm."""
    if len(given) == 2:
        return layer_portable.layer_norm(x, given[0], given[1], eps)
    y, scales = rms_portable.rms_norm(x, given[0], eps)
    return y, torch.zeros_like(scales), scales


def backward_of(
    grad: Tensor,
    x: Tensor,
    given: Sequence[Tensor],
    statistics: Sequence[Tensor],
    described: Samples,
    heads: int,
) -> tuple[Tensor, ...]:
    """Return dx and the parameters' gradients of the portable executor."""
    means, scales = statistics
    if len(given) == 2:
        return layer_portable.layer_norm_backward(grad, x, given[0], means, scales, described)
    return rms_portable.rms_norm_backward(grad, x, given[0], scales, described, heads)


def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """All gradients have the portable executor's bits: padding, several samples, heads."""
    parameters = parameters_of(case)
    described = Samples.padded((40, 0, 257), width=260, side="left")
    for heads in (0, HEADS) if len(parameters) == 1 else (0,):
        shape = (described.rows, *([heads] if heads else []), case.sizes["n"])
        x, grad = case.draw(shape, 20, "wide"), case.draw(shape, 21, "wide")
        options: dict[str, Any] = {"samples": described, "eps": EPS}
        options |= {"heads": True} if heads else {}
        tally.count(described.rows)
        found = gradients(subject, (x, *parameters), grad, **options)
        statistics = forward_of(x, parameters, EPS)[1:]
        expected = backward_of(grad, x, parameters, statistics, described, heads)
        for at, (mine, other) in enumerate(zip(found, expected, strict=True)):
            tally.same(mine, other, f"gradient of argument {at}, {heads} heads")


def near_eps(subject: Subject, case: Case, tally: Tally) -> None:
    """Rows whose mean square is about eps are accurate: an eps in the wrong place would show."""
    x = case.arguments["x"] * 2.0**-10
    norm: Subject = stock.rms_norm if len(parameters_of(case)) == 1 else stock.layer_norm
    exact = norm(x.double(), *(p.double() for p in parameters_of(case)), eps=EPS)
    error = (subject(x, *parameters_of(case), eps=EPS).double() - exact).abs()
    tally.count(case.rows)
    allowed = 2e-6 * exact.abs().amax(-1, keepdim=True)
    tally.true(error <= allowed, "over 2e-6 of the row's largest", error)


# Order certificates of the norms: sums over features, tokens and heads.

WIDTHS, ROWS = (64, 300, 1024), (1, 33)
TOKENS = (2, 11, 257, 515)
# (lengths, heads): one sample, a tree of samples, three folded in a segment; heads in a tree, and in segments of three.
REVEALED_HEADS = (((5,), 4), ((3, 4), 6), ((2, 3, 2), 24))
ELSE = f"{list(THREADS)} threads; all else is elementwise"


def tokens_target(
    tokens: int,
    heads: int = 0,
    samples: Samples | None = None,
    dtype: torch.dtype = torch.float32,
    function: Subject = rms_norm,
) -> TensorTarget:
    """Return dweight over tokens (and heads): rows of ±1 are their own norm, so each term is ± a gradient."""
    n = 16
    shape = (tokens, heads, n) if heads else (tokens, n)
    x, grad = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    x[..., 1::2] = -1
    weight = torch.ones(n, dtype=dtype, requires_grad=True)
    options: dict[str, Any] = {"eps": 2.0**-126} | ({"samples": samples} if samples else {})
    run = gradient_of(
        function(x, weight, **options, **({"heads": True} if heads else {})), weight, grad
    )
    name = f"dweight of {getattr(function, '__name__', 'norm')} over {tokens} tokens, {heads} heads"
    return TensorTarget(name, grad.view(-1, n)[:, ::2].t(), lambda: run()[::2])


def head_order(samples: Samples, heads: int) -> Branch:
    """Return the order of rows token · heads + head: each head, then a sample's heads, then the samples."""

    def pair(a: Branch, b: Branch) -> Branch:
        return a, b

    def head(start: int, length: int, h: int) -> Branch:
        rows = [(start + i) * heads + h for i in range(length)]
        leaves = [leaf_tree("striped", rows[at : at + LEAF]) for at in range(0, length, LEAF)]
        return chain(term for leaf in leaves for term in leaf)

    totals = [
        merge_items([head(*span, h) for h in range(heads)], FEATURE_CAP, pair)
        for span in samples.spans
        if span[1]
    ]
    return merge_items(totals, SAMPLE_CAP, pair)


def feature_question(
    subject: Subject, target: Callable[..., TensorTarget], width: int, more: int = 0
) -> Question:
    """Ask for the order of the sum of squares of rows, whose last `more` elements are not probed."""

    def function(x: Tensor, shape: tuple[int], *rest: Any) -> Tensor:
        return subject(x, torch.ones(shape, dtype=x.dtype), eps=rest[-1])

    def make(m: int) -> TensorTarget:
        return target(width, m, function=function)

    shapes = on_all_threads({"m": m} for m in ROWS)
    order = feature_order(width + more, "striped", width)
    return Question(f"rows of {width + more}", make, shapes, order)


def token_questions(subject: Subject) -> Iterator[Question]:
    """Ask for the order of dweight over the tokens of one sample."""
    for k in TOKENS:
        target = partial(tokens_target, k, function=subject)
        yield Question(f"{k} tokens", target, on_all_threads([{}]), token_order(k, "striped"))


def head_questions(subject: Subject) -> Iterator[Question]:
    """Ask for the order of dweight over tokens, heads and samples."""
    for lengths, heads in REVEALED_HEADS:
        samples = Samples.packed(lengths)
        target = partial(tokens_target, samples.rows, heads, samples, function=subject)
        what, order = f"{list(lengths)} tokens of {heads} heads", head_order(samples, heads)
        yield Question(what, target, on_all_threads([{}]), order)


def prove_rows(subject: Subject) -> Proof:
    """Certify the sum of squares of a root-mean-square norm, over row counts and threads."""
    questions = (feature_question(subject, targets.rms_norm, width) for width in WIDTHS)
    covers = f"fp32 rows of {list(WIDTHS)}, {list(ROWS)} of them: the sum of squares"
    return prove_orders(questions, f"{covers}, {ELSE}")


def prove_tokens(subject: Subject) -> Proof:
    """Certify dweight over the tokens of a sample."""
    covers = f"dweight of samples of {list(TOKENS)} tokens, {ELSE}"
    return prove_orders(token_questions(subject), covers)


def prove_heads(subject: Subject) -> Proof:
    """Certify dweight over the tokens of a sample, and over heads and samples."""
    questions = (*token_questions(subject), *head_questions(subject))
    covers = f"dweight of samples of {list(TOKENS)} tokens, and of (lengths, heads) {list(REVEALED_HEADS)}"
    return prove_orders(questions, f"{covers}, {ELSE}")


# Planted wrong norms whose parameter gradients are summed in other ways; y and dx are right.

Sums = Callable[[Tensor, Samples, int], Tensor]  # (terms, samples, heads) -> the sum


def with_sums(sums: Sums) -> Subject:
    """Return a subject of either norm's contract whose parameter gradients are added by `sums`."""

    def norm(
        x: Tensor,
        *parameters: Tensor,
        eps: float = EPS,
        samples: Samples | None = None,
        heads: bool = False,
    ) -> Tensor:
        described = samples or whole_samples(x.select(-2, 0) if heads else x, None)
        count = x.shape[-2] if heads else 0

        def backward(grad: Tensor, x: Tensor, *given: Tensor) -> Any:
            _, means, scales = forward_of(x, given, eps)
            dx, *_ = backward_of(grad, x, given, (means, scales), described, count)
            rows, grads = (t.reshape(-1, x.shape[-1]).float() for t in (x, grad))
            normal = (rows - means.reshape(-1, 1)) * scales.reshape(-1, 1)
            terms = [grads * normal, grads][: len(given)]
            return dx, *(sums(t, described, count).to(x.dtype) for t in terms)

        return with_backward(
            lambda x, *given: forward_of(x, given, eps)[0], backward, x, *parameters
        )

    return norm


def tokens_of(terms: Tensor, heads: int) -> Tensor:
    """Return the terms as [tokens, heads, n]."""
    return terms.view(-1, max(heads, 1), terms.shape[1])


def real_rows(terms: Tensor, described: Samples, heads: int) -> Tensor:
    """Return the terms of real tokens, [tokens, heads, n], in the order of the samples."""
    return tokens_of(terms, heads)[rows_of(described)]


def chain_of(rows: Tensor) -> Tensor:
    """Return one running sum over the first axis, rounded at every step."""
    return reduce(torch.add, rows, torch.zeros_like(rows[0]))


def _one_chain(terms: Tensor, described: Samples, heads: int) -> Tensor:
    return chain_of(real_rows(terms, described, heads).flatten(0, 1))


def _heads_first(terms: Tensor, described: Samples, heads: int) -> Tensor:
    return sum_samples(tokens_of(terms, heads).sum(1), described)


def _anchored(terms: Tensor, described: Samples, heads: int) -> Tensor:
    """Count leaves from the padded start of each row of the batch."""
    masked = torch.where(is_real(described)[:, None, None], tokens_of(terms, heads), 0.0).flatten(1)
    count = max(len(described.spans), 1)
    width = described.rows // count
    grid = Samples.packed([*[width] * (count - 1), described.rows - width * (count - 1)])
    return rms_portable.sum_heads(masked.reshape(-1, terms.shape[1]), grid, max(heads, 1))


padding_counted = with_sums(lambda terms, described, heads: tokens_of(terms, heads).sum((0, 1)))
one_chain, heads_before_samples = with_sums(_one_chain), with_sums(_heads_first)
bf16_sums = with_sums(lambda terms, *given: _one_chain(terms.bfloat16(), *given))
leaves_at_padding = with_sums(_anchored)
