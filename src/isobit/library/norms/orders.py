"""The orders of a norm's sums, over features, tokens and heads: targets that show them, and certificates as proofs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.library.questions import Question, prove, pruned
from isobit.ops.rms_norm.op import rms_norm
from isobit.order.addition import Branch, chain, digest
from isobit.order.evaluate import expected_tree, leaf_tree
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, TOKEN_LEAF, FeaturePlan
from isobit.order.samples import Samples
from isobit.order.tree import merge_items
from isobit.records import Proof
from isobit.reveal import targets
from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.tensor_target import TensorTarget

Subject = Callable[..., Any]

WIDTHS, ROWS = (64, 300, 1024), (1, 33)
TOKENS = (2, 11, 257, 515)
# (lengths, heads): one sample, a tree of samples, three folded in a segment; heads in a tree, and in segments of three.
HEADS = (((5,), 4), ((3, 4), 6), ((2, 3, 2), 24))


def tokens_target(
    tokens: int,
    heads: int = 0,
    samples: Samples | None = None,
    dtype: torch.dtype = torch.float32,
    function: Subject = rms_norm,
) -> TensorTarget:
    """dweight over tokens (and their heads): rows of ±1 are their own norm, so each term is ± a gradient itself."""
    n = 16
    shape = (tokens, heads, n) if heads else (tokens, n)
    x, grad = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    x[..., 1::2] = -1
    weight = torch.ones(n, dtype=dtype, requires_grad=True)
    options: dict[str, Any] = {"eps": 2.0**-126} | ({"samples": samples} if samples else {})
    run = backward_of(
        function(x, weight, **options, **({"heads": True} if heads else {})), weight, grad
    )
    name = f"dweight of {getattr(function, '__name__', 'norm')} over {tokens} tokens, {heads} heads"
    return TensorTarget(name, grad.view(-1, n)[:, ::2].t(), lambda: run()[::2])


def head_order(samples: Samples, heads: int) -> Branch:
    """What it must show of rows token · heads + head: heads by themselves, a sample's heads, the samples."""

    def pair(a: Branch, b: Branch) -> Branch:
        return a, b

    def head(start: int, length: int, h: int) -> Branch:
        rows = [(start + i) * heads + h for i in range(length)]
        leaves = [
            leaf_tree("striped", rows[at : at + TOKEN_LEAF]) for at in range(0, length, TOKEN_LEAF)
        ]
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
    """The sum of squares of rows, whose last `more` elements are not probed."""

    def function(x: Tensor, shape: tuple[int], *rest: Any) -> Tensor:
        return subject(x, torch.ones(shape, dtype=x.dtype), eps=rest[-1])  # type: ignore[no-any-return]

    def make(m: int) -> TensorTarget:
        return target(width, m, function=function)

    order = pruned(expected_tree(FeaturePlan(width + more).segments, "striped"), width)
    assert order is not None
    expected = digest(order)
    return f"rows of {width + more}", make, [{"m": m} for m in ROWS], expected


def token_questions(subject: Subject) -> list[Question]:
    """The sum over the tokens of one sample."""

    def make(k: int) -> TensorTarget:
        return tokens_target(k, function=subject)

    orders = {k: digest(expected_tree(Samples.packed([k]).segments, "striped")) for k in TOKENS}
    return [(f"{k} tokens", make, [{"k": k}], order) for k, order in orders.items()]


def prove_rows(subject: Subject) -> Proof:
    """The sum of squares of a root-mean-square norm, over row counts and threads."""
    questions = [feature_question(subject, targets.rms_norm, width) for width in WIDTHS]
    return prove(
        questions, f"fp32 rows of {list(WIDTHS)}, {list(ROWS)} of them: the sum of squares"
    )


def prove_tokens(subject: Subject) -> Proof:
    """dweight over the tokens of a sample."""
    return prove(token_questions(subject), f"dweight of samples of {list(TOKENS)} tokens")


def prove_heads(subject: Subject) -> Proof:
    """dweight over the tokens of a sample, and over heads and samples."""
    questions = token_questions(subject)
    for lengths, heads in HEADS:
        samples = Samples.packed(lengths)

        def make(k: int, heads: int = heads, samples: Samples = samples) -> TensorTarget:
            return tokens_target(k, heads, samples, function=subject)

        what = f"{list(lengths)} tokens of {heads} heads"
        questions.append((what, make, [{"k": samples.rows}], digest(head_order(samples, heads))))
    return prove(
        questions,
        f"dweight of samples of {list(TOKENS)} tokens, and of (lengths, heads) {list(HEADS)}",
    )
