"""Proofs about attention: bounds by intervals over the certified order, range by Bitwuzla, blindness by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import draw_values
from isobit.library.attention.orders import expected_order, prove_queries
from isobit.library.softmax.proofs import EXP_ERROR, U
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import multiply_add
from isobit.order.plan import ATTENTION_BLOCK
from isobit.order.tree import merge
from isobit.records import Proof

Subject = Callable[..., Tensor]

BOUNDED = (1, 64, 65, 200, 1024, 4096, 32768)
# What the proofs must stay within: (keys, limit), and for errors the depth and the largest Σ|q·k|·scale.
SUM_LIMIT, ERROR_LIMIT, DEPTH, LARGEST = (1024, 1.0e-5), (1024, 2.0e-4), 16, 32.0
UNDERFLOW = (
    2.0**-120
)  # of what rescaling may lose below the smallest number, beside a denominator of at least 1


@lru_cache
def share_bound(keys: int) -> float:
    """How far Σ over the computed shares of a value may be from 1, relatively: both sums have the same weights."""
    arb = load_arb()
    u, blocks = arb(U), -(-keys // ATTENTION_BLOCK)
    # A term passes its order's additions, and is rescaled once a block; then one division.
    above = (1 + u) ** (depth_of(expected_order(keys, "chain")) + 1 + blocks)
    below = (1 + u) ** (depth_of(expected_order(keys, "striped")) + blocks)
    return float((above * (1 + u) / (2 - below) - 1 + keys * arb(UNDERFLOW)).abs_upper())


def error_bound(keys: int, depth: int, largest: float) -> float:
    """|y − exact| ≤ this · max|v|, where Σ|q·k|·scale is at most `largest` for every key."""
    arb = load_arb()
    u, exp, blocks = arb(U), arb(EXP_ERROR) * 2 * arb(U), -(-keys // ATTENTION_BLOCK)
    score = ((1 + u) ** (depth + 2) - 1) * arb(
        largest
    )  # a chain over the depth, the scale, and its own rounding
    # Differences to the maxima add up to at most twice the largest score, whatever the number of blocks.
    weight = (2 * score + 3 * u * arb(largest)).exp() * (1 + exp) ** (blocks + 1) - 1
    total = (1 + weight) / (1 - weight) * (1 + arb(share_bound(keys))) - 1
    return float((total + keys * arb(UNDERFLOW)).abs_upper())


def prove_sum(subject: Subject) -> Proof:
    """The shares of a query's values sum to one within the bound of the order."""
    return _prove_bound(subject, share_bound, SUM_LIMIT, "|Σ shares − 1|")


def prove_error(subject: Subject) -> Proof:
    """The error against exact arithmetic, in units of the largest value, is within the bound."""
    what = f"the error over max|v|, depth {DEPTH} and scores of at most {LARGEST:g},"
    return _prove_bound(subject, lambda keys: error_bound(keys, DEPTH, LARGEST), ERROR_LIMIT, what)


def _prove_bound(
    subject: Subject, bound: Callable[[int], float], stated: tuple[int, float], what: str
) -> Proof:
    engine = "interval bounds over the certified order"
    order = prove_queries(subject)
    if not order.kept:
        return Proof(engine, "", order.cases, order.failure)
    worst = {keys: bound(keys) for keys in BOUNDED}
    keys, limit = stated
    if not 0 < worst[keys] <= limit:
        return Proof(
            engine, "", len(BOUNDED), f"{what} at {keys}: {worst[keys]:.3g}, limit {limit:.3g}"
        )
    said = ", ".join(f"{found:.2g} at {n}" for n, found in worst.items())
    return Proof(
        engine,
        f"all fp32 inputs without overflow: {what} is at most {said} keys",
        len(BOUNDED) + order.cases,
    )


# ---- range: IEEE arithmetic of one block ----------------------------------------------------------------


def prove_range(subject: Subject) -> Proof:
    """Values in [0, 1] give outputs in [0, 1], of two keys; the denominator of up to eight is at least 1.

    A fused multiply-add with a weight that is not negative never falls as its value grows, nor does a division by a
    positive number: so outputs are largest where all values are 1, and smallest, 0, where all are 0.
    """
    cases = 0
    for keys in (1, 2, 3, 8):
        generator = torch.Generator().manual_seed(keys)
        q, k, v = (
            draw_values((keys, 512, 16), kind, generator) for kind in ("normal", "normal", "unit")
        )
        found = subject(q, k, v, is_causal=False)
        if not bits.equal(found, by_model(q, k, v)):
            return Proof(
                "Bitwuzla", "", cases + 1, f"the model of {keys} keys is not what the kernel does"
            )
        cases += 1
        if not smt.is_unsatisfiable(range_formula(keys)):
            return Proof(
                "Bitwuzla",
                "",
                cases,
                f"a denominator below 1, or an output above it, of {keys} keys",
            )
    covers = (
        "all values in [0, 1], one and two keys: outputs are in [0, 1]; up to 8 keys: 1 ≤ denominator; exp abstracted "
        "by its range; the model agrees with the kernel on 7,168 rows"
    )
    return Proof("Bitwuzla on the IEEE model", covers, cases)


def by_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the formula says, carried out: weights, a chain of multiply-adds, lanes merged by the tree, a division."""

    def dot(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[:-1])
        for d in range(left.shape[-1]):
            total = multiply_add(left[..., d], right[..., d], total)
        return total

    keys = len(k)
    scores = torch.stack(
        [dot(q, k[j].expand_as(q)) * 0.25 for j in range(keys)], -1
    )  # [queries, heads, keys]
    weights = exp_nonpositive(scores - scores.amax(-1, keepdim=True))
    total = torch.zeros_like(q)
    for j in range(keys):
        total = multiply_add(weights[..., j, None], v[j].expand_as(q), total)
    lanes = [*weights.unbind(-1), *[torch.zeros_like(weights[..., 0])] * (16 - keys)]
    return total / merge(lanes, torch.add).unsqueeze(-1)


def range_formula(keys: int) -> str:
    """Satisfiable if a denominator is below 1; of two keys also if an output is above 1 where all values are 1."""
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


# ---- what is not seen -----------------------------------------------------------------------------------


def prove_blindness(subject: Subject) -> Proof:
    """Every bit pattern of a 16-bit dtype in keys and values that no query sees: later ones, and before a window."""
    cases = 0
    for dtype in (torch.bfloat16, torch.float16):
        patterns = (
            torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 4, 16)
        )
        generator = torch.Generator().manual_seed(cases)
        # Samples of 3 + 4 + 3 tokens: every pattern stands once in the middle of one.
        q, k, v = (torch.randn(1024, 10, 1, 16, generator=generator).to(dtype) for _ in range(3))
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, 3:7, 0], spoilt_v[:, 3:7, 0] = patterns, patterns
        before = bits.first_difference(
            subject(q, spoilt_k, spoilt_v)[:, :3], subject(q, k, v)[:, :3]
        )
        windowed = subject(q, spoilt_k, spoilt_v, window=1)[:, 7:]
        after = bits.first_difference(windowed, subject(q, k, v, window=1)[:, 7:])
        edge = bits.first_difference(windowed, v[:, 7:])  # one key has all the weight
        cases += 3 * patterns.numel()
        for where, found in (
            ("later", before),
            ("before the window", after),
            ("of a window of one", edge),
        ):
            if found is not None:
                return Proof(
                    "enumeration of the real kernel", "", cases, f"{dtype} keys {where}: {found}"
                )
    covers = (
        "every bf16 and fp16 bit pattern as a key and a value after a query, and before its window"
    )
    return Proof("enumeration of the real kernel", covers, cases)
