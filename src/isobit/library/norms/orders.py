"""Order certificates of the norms: sums over features, tokens and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library.certificates import (
    Question,
    feature_order,
    on_all_threads,
    prove_orders,
    token_order,
)
from isobit.library.subjects import Subject
from isobit.ops.rms_norm.op import rms_norm
from isobit.order.addition import Branch, chain
from isobit.order.evaluate import leaf_tree
from isobit.order.plan import FEATURE_CAP, LEAF, SAMPLE_CAP
from isobit.order.samples import Samples
from isobit.order.tree import merge_items
from isobit.reveal import targets
from isobit.reveal.targets.products import backward_of as gradient_of
from isobit.reveal.targets.tensor_target import TensorTarget

WIDTHS, ROWS = (64, 300, 1024), (1, 33)
TOKENS = (2, 11, 257, 515)
# (lengths, heads): one sample, a tree of samples, three folded in a segment; heads in a tree, and in segments of three.
HEADS = (((5,), 4), ((3, 4), 6), ((2, 3, 2), 24))
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
    for lengths, heads in HEADS:
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
    covers = f"dweight of samples of {list(TOKENS)} tokens, and of (lengths, heads) {list(HEADS)}"
    return prove_orders(questions, f"{covers}, {ELSE}")
