"""Order certificates of attention: targets for its sums over keys and over queries, and the proofs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import draw_values
from isobit.foundation.records import Proof
from isobit.library.certificates import (
    EXP_ERROR,
    Configuration,
    Question,
    U,
    prove_bound,
    prove_orders,
)
from isobit.library.claims import Subject
from isobit.ops import dispatch
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import multiply_add
from isobit.order.addition import Branch, chain
from isobit.order.evaluate import leaf_tree
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK, LANES
from isobit.order.samples import Samples
from isobit.order.tree import merge
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


# Proofs about attention: bounds by intervals over the certified order, range by Bitwuzla, masks by enumeration.

BOUNDED = (1, 64, 65, 200, 1024, 4096, 32768)
# What the proofs must stay within: (keys, limit), and for errors the depth and the largest Σ|q·k|·scale.
SUM_LIMIT, ERROR_LIMIT, BOUND_DEPTH, LARGEST = (1024, 1.0e-5), (1024, 2.0e-4), 16, 32.0
UNDERFLOW = 2.0**-120  # what rescaling may lose to underflow; the denominator is at least 1


def rescalings(keys: int) -> int:
    """Return at most how often a term is rescaled: once a block of its chunk, once a merge that it is part of.

    A term of the first chunk is part of every merge, of which there are one fewer than chunks; a later one of at most
    as many.
    """
    blocks, chunks = -(-keys // ATTENTION_BLOCK), -(-keys // ATTENTION_CHUNK)
    return min(blocks, ATTENTION_CHUNK // ATTENTION_BLOCK) + max(chunks - 1, 0)


@lru_cache
def share_bound(keys: int) -> float:
    """Bound how far the computed shares are from summing to 1: both sums have the same weights."""
    arb = load_arb()
    u, rescaled = arb(U), rescalings(keys)
    # A term passes its order's additions, and is rescaled; then one division.
    above = (1 + u) ** (depth_of(expected_order(keys, "chain")) + 1 + rescaled)
    below = (1 + u) ** (depth_of(expected_order(keys, "striped")) + rescaled)
    return float((above * (1 + u) / (2 - below) - 1 + keys * arb(UNDERFLOW)).abs_upper())


def error_bound(keys: int, depth: int, largest: float) -> float:
    """Bound |y − exact| / max|v|, where Σ|q·k|·scale is at most `largest` for every key."""
    arb = load_arb()
    u, exp = arb(U), arb(EXP_ERROR) * 2 * arb(U)
    # A chain over the depth, the scale, and its own rounding.
    score = ((1 + u) ** (depth + 2) - 1) * arb(largest)
    # The maximum that a term is relative to never falls, in a block or a merge, so that the differences add up to at
    # most twice the largest score, however many there are.
    weight = (2 * score + 3 * u * arb(largest)).exp() * (1 + exp) ** (rescalings(keys) + 1) - 1
    total = (1 + weight) / (1 - weight) * (1 + arb(share_bound(keys))) - 1
    return float((total + keys * arb(UNDERFLOW)).abs_upper())


def prove_sum(subject: Subject) -> Proof:
    """Bound how far the shares of a query's values are from summing to 1."""
    covers = "all fp32 inputs without overflow: |Σ shares − 1| over so many keys is at most"
    return prove_bound(prove_queries(subject), share_bound, BOUNDED, SUM_LIMIT, covers)


def prove_error(subject: Subject) -> Proof:
    """Bound the error against exact arithmetic, in units of the largest value."""
    covers = (
        f"all fp32 inputs without overflow: the error over max|v|, depth {BOUND_DEPTH} and scores of at "
        f"most {LARGEST:g}, over so many keys is at most"
    )
    bound = partial(error_bound, depth=BOUND_DEPTH, largest=LARGEST)
    return prove_bound(prove_queries(subject), bound, BOUNDED, ERROR_LIMIT, covers)


def prove_range(subject: Subject) -> Proof:
    """Prove that values in [0, 1] give outputs in [0, 1] for two keys; up to eight, the denominator is ≥ 1.

    A fused multiply-add with a weight that is not negative never falls as its value grows, nor does a
    division by a positive number: so outputs are largest where all values are 1, and 0 where all are 0.
    """
    engine, cases = "Bitwuzla on the IEEE model", 0
    for keys in (1, 2, 3, 8):
        generator = torch.Generator().manual_seed(keys)
        kinds = ("normal", "normal", "unit")
        q, k, v = (draw_values((keys, 512, 16), kind, generator) for kind in kinds)
        cases += 1
        if not bits.equal(subject(q, k, v, is_causal=False), by_model(q, k, v)):
            return Proof(engine, "", cases, f"the model of {keys} keys is not what the kernel does")
        if not smt.is_unsatisfiable(range_formula(keys)):
            failure = f"a denominator below 1, or an output above it, of {keys} keys"
            return Proof(engine, "", cases, failure)
    covers = (
        "all values in [0, 1], one and two keys: outputs are in [0, 1]; up to 8 keys: 1 ≤ denominator; "
        "exp abstracted by its range; the model agrees with the kernel on 7,168 rows"
    )
    return Proof(engine, covers, cases)


def by_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute what the formula models: weights, a chain of multiply-adds, lanes merged by the tree, a division."""

    def dot(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[:-1])
        for d in range(left.shape[-1]):
            total = multiply_add(left[..., d], right[..., d], total)
        return total

    keys = len(k)
    # [queries, heads, keys]
    scores = torch.stack([dot(q, k[j].expand_as(q)) * 0.25 for j in range(keys)], -1)
    weights = exp_nonpositive(scores - scores.amax(-1, keepdim=True))
    total = torch.zeros_like(q)
    for j in range(keys):
        total = multiply_add(weights[..., j, None], v[j].expand_as(q), total)
    lanes = [*weights.unbind(-1), *[torch.zeros_like(weights[..., 0])] * (16 - keys)]
    return total / merge(lanes, torch.add).unsqueeze(-1)


def range_formula(keys: int) -> str:
    """Return a formula that is satisfiable if a denominator is below 1; of two keys also if an output is above 1."""
    names, zero, one = [f"e{i}" for i in range(keys)], smt.number(0.0), smt.number(1.0)
    text = smt.declare(names)
    text += "".join(f"(assert (and (fp.leq {zero} {n}) (fp.leq {n} {one})))\n" for n in names)
    text += f"(assert (or {' '.join(f'(fp.eq {n} {one})' for n in [*names, names[0]])}))\n"
    total = merge([*names, *[zero] * (16 - keys)], smt.add)
    chain = zero
    for name in names:
        chain = smt.add(chain, name)  # a fused multiply-add with 1
    wrong = [f"(not (fp.leq {one} {total}))"] + (
        [f"(not (fp.leq {chain} {total}))"] if keys <= 2 else []
    )
    return text + f"(assert (or {' '.join([*wrong, 'false'])}))\n"


def prove_blindness(subject: Subject) -> Proof:
    """Try every bit pattern of a 16-bit dtype in masked keys and values: later ones, and before a window."""
    engine, cases = "enumeration of the real kernel", 0
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        generator = torch.Generator().manual_seed(cases)
        # Samples of 3 + 4 + 3 tokens: every pattern is once in the middle of one.
        q, k, v = (torch.randn(1024, 10, 1, 16, generator=generator).to(dtype) for _ in range(3))
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, 3:7, 0] = spoilt_v[:, 3:7, 0] = every.view(1024, 4, 16)
        windowed = subject(q, spoilt_k, spoilt_v, window=1)[:, 7:]
        compared = {
            "later": (subject(q, spoilt_k, spoilt_v)[:, :3], subject(q, k, v)[:, :3]),
            "before the window": (windowed, subject(q, k, v, window=1)[:, 7:]),
            "of a window of one": (windowed, v[:, 7:]),  # one key has all the weight
        }
        cases += 3 * every.numel()
        for where, pair in compared.items():
            found = bits.first_difference(*pair)
            if found is not None:
                return Proof(engine, "", cases, f"{dtype} keys {where}: {found}")
    covers = (
        "every bf16 and fp16 bit pattern as a key and a value after a query, and before its window"
    )
    return Proof(engine, covers, cases)
