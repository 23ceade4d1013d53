"""Order certificates of attention: targets for its sums over keys and over queries, and the proofs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from isobit.foundation.records import Proof
from isobit.library.certificates import Configuration, Question, prove_orders
from isobit.library.subjects import Subject
from isobit.ops import dispatch
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.order.addition import Branch, chain
from isobit.order.evaluate import leaf_tree
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK, LANES
from isobit.order.samples import Samples
from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.sums import softmax as denominator
from isobit.reveal.targets.tensor_target import TensorTarget

KEYS = (60, 64, 65, 130, 200)  # around and across the edges of blocks
NARROW, WEIGHED = (65,), (130,)
LONG = (2113, 4225)  # across the edges of chunks; the last block has one key
HIDDEN = (
    ATTENTION_CHUNK - ATTENTION_BLOCK
)  # keys before a window that is cut by the edge of a chunk
PLACED, GRADIENTS = (65, 130), (130,)
DEPTH, PLACES = 16, 4
ON_TWO_THREADS: list[Configuration] = [{}, {"threads": 2}]


def expected_order(keys: int, engine: str, before: int = 0) -> Branch:
    """Return the order over keys: blocks of 64 folded left in chunks of 2048, then chunks folded left.

    The first key is at position `before` of the sample, a multiple of 64.
    """
    if before % ATTENTION_BLOCK:
        raise ValueError(f"keys from the start of a block, not from position {before}")
    starts = range(before, before + keys, ATTENTION_BLOCK)
    chunks = [
        chain(
            part
            for at in blocks
            for part in leaf_tree(
                engine, range(at - before, min(at - before + ATTENTION_BLOCK, keys))
            )
        )
        for _, blocks in groupby(starts, lambda at: at // ATTENTION_CHUNK)
    ]
    return chain(chunks)


def backward_order(terms: int, engine: str, heads: int = 1) -> Branch:
    """Return the order of a gradient: blocks of 64 folded left, without chunks; of a group, head by head."""
    blocks = [
        range(h * terms + at, h * terms + min(at + ATTENTION_BLOCK, terms))
        for h in range(heads)
        for at in range(0, terms, ATTENTION_BLOCK)
    ]
    return chain(part for block in blocks for part in leaf_tree(engine, block))


def defined(keys: int, dtype: torch.dtype = torch.float32, before: int = 0) -> Branch:
    """Return the order of the products with values."""
    return expected_order(keys, dispatch.engine_of(dtype), before)


def defined_backward(terms: int, heads: int = 1) -> Branch:
    """Return the order of the products of a gradient, in fp32."""
    return backward_order(terms, dispatch.engine_of(torch.float32), heads)


# ---- over keys ------------------------------------------------------------------------------------------


def queries_of(keys: int) -> list[Configuration]:
    """Return how the last query is asked: decoded, last of a piece of the prompt, in one, in a prefill.

    A prefill of many keys would take minutes: of more than 200, the last 70 queries are asked instead.
    """
    most = keys if keys <= 200 else 70
    asked = [{"queries": m, "later": later} for m, later in ((1, 0), (7, 0), (3, 4), (most, 9))]
    return [*asked, {**asked[-1], "threads": 2}]


def hidden(before: int, keys: int) -> dict[str, int]:
    """Return the option that hides `before` keys from a query that sees the `keys` after them."""
    return {"window": keys} if before else {}


def values_target(
    keys: int,
    subject: Subject,
    dtype: torch.dtype = torch.float32,
    queries: int = 1,
    later: int = 0,
    before: int = 0,
) -> TensorTarget:
    """Return the sum over values at equal weights: queries are zero, so every weight is 1.

    The `before` keys ahead of them are not seen, because of a window; they are NaN.
    """
    q = torch.zeros(queries + later, 1, DEPTH, dtype=dtype)
    k, v = (torch.zeros(before + keys + later, 1, DEPTH, dtype=dtype) for _ in range(2))
    k[: max(before - queries, 0)] = v[: max(before - queries, 0)] = torch.nan
    asked, known = Samples.packed([len(q)]), Samples.packed([len(k)])
    options = {"q_samples": asked, "k_samples": known, **hidden(before, keys)}

    def run() -> Tensor:
        return subject(q, k, v, **options)[queries - 1, 0]

    name = f"attention's values, query {queries} of {len(q)} over {keys} keys"
    return TensorTarget(name, v[before : before + keys, 0].t(), run, divided_by=keys)


def weights_target(
    keys: int, subject: Subject, queries: int = 1, later: int = 0, before: int = 0
) -> TensorTarget:
    """Return the denominator: keys are logarithms of the terms, values unit vectors, a head is a place.

    The `before` keys ahead of them are not seen, because of a window.
    """
    wide, seen = -(-keys // LANES) * LANES, slice(before, before + keys)
    q = torch.zeros(queries + later, PLACES, wide)
    q[:, :, 0] = 1
    k, v = (torch.zeros(before + keys + later, PLACES, wide) for _ in range(2))
    v[seen] = torch.eye(keys, wide).unsqueeze(1)
    asked, known = Samples.packed([len(q)]), Samples.packed([len(k)])
    options = {"q_samples": asked, "k_samples": known, **hidden(before, keys)}

    def weights(logarithms: Tensor, dim: int) -> Tensor:
        k[seen, :, 0] = logarithms.t()
        return subject(q, k, v, scale=1.0, **options)[queries - 1, :, :keys]

    return denominator(keys, PLACES, function=weights)


@lru_cache(maxsize=4)  # the proofs of bounds need it too
def prove_queries(subject: Subject) -> Proof:
    """Certify that a query has one order over keys, in decoding, in chunks and in a prefill."""

    def questions() -> Iterator[Question]:
        for dtype, sizes in ((torch.float32, KEYS + LONG), (torch.bfloat16, NARROW)):
            for keys in sizes:
                target = partial(values_target, keys, subject, dtype)
                what = f"values of {keys} keys, {dtype}"
                yield Question(what, target, queries_of(keys), defined(keys, dtype))
        for keys in WEIGHED:
            for before in (0, HIDDEN):
                where = f"{keys} keys after {before}"
                weights = partial(weights_target, keys, subject, before=before)
                order = expected_order(keys, "striped", before)
                yield Question(f"weights of {where}", weights, queries_of(keys)[:4:3], order)
            values, order = (
                partial(values_target, keys, subject, before=HIDDEN),
                defined(keys, before=HIDDEN),
            )
            yield Question(f"values of {where}", values, queries_of(keys), order)

    covers = (
        f"the sum over {list(KEYS + LONG)} fp32 and {list(NARROW)} bf16 values, both sums over "
        f"{list(WEIGHED)} keys, from the start and as a window after {HIDDEN} others, cut by a chunk's "
        "edge: values decoded, last of a piece, inside one, inside a prefill (this on 2 threads too; "
        "over 200 keys, the last 70 queries); weights decoded and inside a prefill, on 1 thread; "
        "all else is elementwise"
    )
    return prove_orders(questions(), covers)


def placed_target(keys: int, subject: Subject, place: str = "alone") -> TensorTarget:
    """Return the sum over values of a sample that is packed between two others, or padded on a side."""
    lengths = [11, keys, 13] if place != "alone" else [0, keys, 0]
    known = Samples.packed(lengths)
    if place in ("left", "right"):
        known = Samples.padded(lengths, width=keys + 9, side=place)
    start = known.spans[1][0]
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(known.rows, 1, DEPTH, generator=generator) for _ in range(3))
    for tensor in (q, k, v):
        tensor[start : start + keys] = 0

    def run() -> Tensor:
        return subject(q, k, v, q_samples=known, k_samples=known)[start + keys - 1, 0]

    return TensorTarget(
        f"attention's values, {place}", v[start : start + keys, 0].t(), run, divided_by=keys
    )


# ---- over queries, and the gradient's over keys ---------------------------------------------------------


def value_grad_target(tokens: int, subject: Subject, heads: int = 1) -> TensorTarget:
    """Return dv of the first key, which has all the weight: the sum of the gradients themselves."""
    q, k = torch.zeros(tokens, heads, DEPTH), torch.zeros(tokens, 1, DEPTH)
    q[..., 0], k[0, 0, 0] = 1, 128
    v = torch.zeros(tokens, 1, DEPTH, requires_grad=True)
    grad = torch.zeros(heads * tokens, DEPTH)
    with torch.enable_grad():
        y = subject(q, k, v, scale=1.0)
    run = backward_of(y, v, grad.view(heads, tokens, DEPTH).transpose(0, 1))
    return TensorTarget(f"dv over {tokens} queries of {heads} heads", grad.t(), lambda: run()[0, 0])


def key_grad_target(tokens: int, subject: Subject) -> TensorTarget:
    """Return dk of the first of two keys that share the weight and whose values cancel: half of each gradient."""
    q, k = torch.zeros(tokens, PLACES, DEPTH), torch.zeros(tokens, PLACES, DEPTH)
    v, grad = torch.zeros_like(k), torch.zeros_like(q)
    q[..., 0], k[2:, :, 0], v[0, :, 0], v[1, :, 0] = 1, -256, 1, -1
    k.requires_grad_()
    with torch.enable_grad():
        run = backward_of(subject(q, k, v, scale=1.0, is_causal=False), k, grad)
    return TensorTarget(
        f"dk over {tokens} queries", grad[:, :, 0].t(), lambda: run()[0, :, 0], divided_by=2
    )


def query_grad_target(tokens: int, subject: Subject) -> TensorTarget:
    """Return dq over keys of equal weight with values 1 and −1; the scale makes the factors exactly ±1."""
    weight = exp_nonpositive(-log_positive(torch.tensor([float(tokens)]))).item()
    signs = torch.ones(tokens, 1)
    signs[1::2] = -1
    q = torch.zeros(tokens, 1, DEPTH, requires_grad=True)
    v, grad = torch.zeros(tokens, 1, DEPTH), torch.zeros(tokens, 1, DEPTH)
    v[:, :, 0], grad[..., 0] = signs, 1
    terms = torch.zeros(DEPTH, tokens)

    def run() -> Tensor:
        with torch.enable_grad():
            y = subject(q, (terms.t() * signs).unsqueeze(1), v, scale=1 / weight, is_causal=False)
        return torch.autograd.grad(y, q, grad)[0][-1, 0]

    return TensorTarget(f"dq over {tokens} keys", terms, run)


def prove_samples(subject: Subject) -> Proof:
    """Certify that a sample's orders, forward and backward, do not depend on other samples."""

    def questions() -> Iterator[Question]:
        for keys in PLACED:
            places = [{"place": place} for place in ("alone", "packed", "left", "right")]
            target = partial(placed_target, keys, subject)
            yield Question(f"{keys} keys", target, places, defined(keys))
        gradients = {"dv": value_grad_target, "dk": key_grad_target, "dq": query_grad_target}
        for tokens in GRADIENTS:
            for name, made in gradients.items():
                what, target = f"{name} of {tokens} tokens", partial(made, tokens, subject)
                yield Question(what, target, ON_TWO_THREADS, defined_backward(tokens))

    covers = (
        f"{list(PLACED)} keys alone, packed, padded left and right, on 1 thread; "
        f"dq, dk and dv of {list(GRADIENTS)} tokens, on 1 and 2; all else is elementwise"
    )
    return prove_orders(questions(), covers)


def prove_group(subject: Subject) -> Proof:
    """Certify dv of a key that a group of heads shares: head by head, each over its blocks of queries."""
    questions = (
        Question(
            f"dv of {tokens} tokens and {heads} heads",
            partial(value_grad_target, tokens, subject, heads),
            ON_TWO_THREADS,
            defined_backward(tokens, heads),
        )
        for tokens in PLACED
        for heads in (2, 3)
    )
    covers = f"dv of {list(PLACED)} tokens in groups of 2 and 3 heads, on 1 and 2 threads"
    return prove_orders(questions, f"{covers}; all else is elementwise")
