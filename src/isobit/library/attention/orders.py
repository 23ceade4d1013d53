"""The orders of attention's sums over keys and over queries: targets that show them, and certificates as proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from isobit.errors import RevealError, in_one_line
from isobit.library.linear.orders import with_threads
from isobit.ops import dispatch
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.order.addition import Branch, chain, digest
from isobit.order.evaluate import leaf_tree
from isobit.order.plan import ATTENTION_BLOCK, LANES
from isobit.order.samples import Samples
from isobit.records import Proof
from isobit.reveal.certificate import check_revealing
from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.rows import softmax as denominator
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import reveal

Subject = Callable[..., Tensor]

KEYS = (60, 64, 65, 130, 200)  # around and across the edges of blocks
NARROW, WEIGHED = (65,), (130,)
PLACED, GRADIENTS = (65, 130), (130,)
DEPTH, PLACES = 16, 4

Configuration = Mapping[str, Any]
Question = tuple[str, Callable[..., TensorTarget], Sequence[Configuration], Branch]


def expected_order(terms: int, engine: str, heads: int = 1) -> Branch:
    """Blocks of 64, cut from the sample's first position and folded left; of a group, head by head."""
    blocks = [
        range(h * terms + at, h * terms + min(at + ATTENTION_BLOCK, terms))
        for h in range(heads)
        for at in range(0, terms, ATTENTION_BLOCK)
    ]
    return chain(part for block in blocks for part in leaf_tree(engine, block))


def prove_orders(questions: Iterator[Question], covers: str) -> Proof:
    """Every configuration has the defined order, and those of a question one arithmetic."""
    check_revealing()  # once for all: a certificate a question would check as often
    count = 0
    for what, target, configurations, order in questions:
        expected, seen = digest(order), set()
        for configuration in configurations:
            count += 1
            shape = {name: value for name, value in configuration.items() if name != "threads"}
            try:
                tree = reveal(with_threads(target(**shape), int(configuration.get("threads", 1))))
            except RevealError as error:
                return Proof(
                    "order certificate",
                    "",
                    count,
                    f"{what}, {configuration}: {in_one_line(error)[:200]}",
                )
            seen.add(tree.digest)
            if tree.order_digest != expected or tree.unlike or len(seen) > 1:
                return Proof("order certificate", "", count, f"{what}, {configuration}: {tree}")
    return Proof("order certificate", f"{covers}; all else is elementwise", count)


# ---- over keys ------------------------------------------------------------------------------------------


def queries_of(keys: int) -> list[Configuration]:
    """The query at position keys − 1: decoded, last of a chunk, inside one, and inside a prefill."""
    asked = [{"queries": m, "later": later} for m, later in ((1, 0), (7, 0), (3, 4), (keys, 9))]
    return [*asked, {**asked[-1], "threads": 2}]


def values_target(
    keys: int,
    subject: Subject,
    dtype: torch.dtype = torch.float32,
    queries: int = 1,
    later: int = 0,
) -> TensorTarget:
    """The sum over values at equal weights: queries are zero, so that every key weighs 1 until the division."""
    q = torch.zeros(queries + later, 1, DEPTH, dtype=dtype)
    k, v = (torch.zeros(keys + later, 1, DEPTH, dtype=dtype) for _ in range(2))
    asked, known = Samples.packed([len(q)]), Samples.packed([len(k)])

    def run() -> Tensor:
        return subject(q, k, v, q_samples=asked, k_samples=known)[queries - 1, 0]

    name = f"attention's values, query {queries} of {len(q)} over {keys} keys"
    return TensorTarget(name, v[:keys, 0].t(), run, divided_by=keys)


def weights_target(keys: int, subject: Subject, queries: int = 1, later: int = 0) -> TensorTarget:
    """The denominator: keys are logarithms of the terms, values the unit vectors, a head is a place."""
    wide = -(-keys // LANES) * LANES
    q = torch.zeros(queries + later, PLACES, wide)
    q[:, :, 0] = 1
    k, v = torch.zeros(keys + later, PLACES, wide), torch.zeros(keys + later, PLACES, wide)
    v[:keys] = torch.eye(keys, wide).unsqueeze(1)
    asked, known = Samples.packed([len(q)]), Samples.packed([len(k)])

    def weights(logarithms: Tensor, dim: int) -> Tensor:
        k[:keys, :, 0] = logarithms.t()
        return subject(q, k, v, scale=1.0, q_samples=asked, k_samples=known)[queries - 1, :, :keys]

    return denominator(keys, PLACES, function=weights)


@lru_cache(maxsize=4)  # bounds rest on it too
def prove_queries(subject: Subject) -> Proof:
    """Over keys, a query has one order of values and of weights wherever it is asked."""

    def questions() -> Iterator[Question]:
        for keys in KEYS:
            order = expected_order(keys, dispatch.engine_of(torch.float32))
            yield (
                f"values of {keys} keys",
                partial(values_target, keys, subject),
                queries_of(keys),
                order,
            )
        for keys in NARROW:
            order = expected_order(keys, dispatch.engine_of(torch.bfloat16))
            target = partial(values_target, keys, subject, torch.bfloat16)
            yield f"values of {keys} bf16 keys", target, queries_of(keys), order
        for keys in WEIGHED:
            target = partial(weights_target, keys, subject)
            yield (
                f"weights of {keys} keys",
                target,
                queries_of(keys)[:4:3],
                expected_order(keys, "striped"),
            )

    covers = (
        f"the sum over {list(KEYS)} fp32 and {list(NARROW)} bf16 values, the denominator over {list(WEIGHED)} keys: "
        "values decoded, last of a chunk, inside one, inside a prefill (this by 2 threads too); weights decoded and "
        "inside a prefill, on 1 thread"
    )
    return prove_orders(questions(), covers)


def placed_target(keys: int, subject: Subject, place: str = "alone") -> TensorTarget:
    """The same for a sample beside others: packed between two, or padded on a side."""
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
    """dv of the first key, which has all the weight: the sum of the gradients themselves, head by head of a group."""
    q, k = torch.zeros(tokens, heads, DEPTH), torch.zeros(tokens, 1, DEPTH)
    q[..., 0], k[0, 0, 0] = 1, 128
    v = torch.zeros(tokens, 1, DEPTH, requires_grad=True)
    grad = torch.zeros(heads * tokens, DEPTH)
    with torch.enable_grad():
        y = subject(q, k, v, scale=1.0)
    run = backward_of(y, v, grad.view(heads, tokens, DEPTH).transpose(0, 1))
    return TensorTarget(f"dv over {tokens} queries of {heads} heads", grad.t(), lambda: run()[0, 0])


def key_grad_target(tokens: int, subject: Subject) -> TensorTarget:
    """dk of the first of two keys that share the weight, and whose values cancel: half of each gradient."""
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
    """dq over keys of equal weight, whose values are 1 and −1 in turn; the scale makes the factors exactly ±1."""
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
    """A sample's order is its own beside others, and so are those of its gradients."""

    def questions() -> Iterator[Question]:
        chain_of = dispatch.engine_of(torch.float32)
        for keys in PLACED:
            places = [{"place": place} for place in ("alone", "packed", "left", "right")]
            yield (
                f"{keys} keys",
                partial(placed_target, keys, subject),
                places,
                expected_order(keys, chain_of),
            )
        for tokens in GRADIENTS:
            order = expected_order(tokens, chain_of)
            for what, target in (
                ("dv", value_grad_target),
                ("dk", key_grad_target),
                ("dq", query_grad_target),
            ):
                yield (
                    f"{what} of {tokens} tokens",
                    partial(target, tokens, subject),
                    [{}, {"threads": 2}],
                    order,
                )

    covers = (
        f"{list(PLACED)} keys alone, packed, padded left and right, on 1 thread; "
        f"dq, dk and dv of {list(GRADIENTS)} tokens, on 1 and 2"
    )
    return prove_orders(questions(), covers)


def prove_group(subject: Subject) -> Proof:
    """dv of a key that a group of heads shares: head by head, each over its blocks of queries."""

    def questions() -> Iterator[Question]:
        for tokens in PLACED:
            for heads in (2, 3):
                order = expected_order(tokens, dispatch.engine_of(torch.float32), heads)
                target = partial(value_grad_target, tokens, subject, heads)
                yield (
                    f"dv of {tokens} tokens and {heads} heads",
                    target,
                    [{}, {"threads": 2}],
                    order,
                )

    return prove_orders(
        questions(), f"dv of {list(PLACED)} tokens in groups of 2 and 3 heads, on 1 and 2 threads"
    )
