"""Proofs about attention: bounds by intervals over the certified order, range by Bitwuzla, masks by enumeration."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import draw_values
from isobit.foundation.records import Proof
from isobit.library.attention.orders import expected_order, prove_queries
from isobit.library.bounds import EXP_ERROR, U, prove_bound
from isobit.library.subjects import Subject
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import multiply_add
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK
from isobit.order.tree import merge

BOUNDED = (1, 64, 65, 200, 1024, 4096, 32768)
# What the proofs must stay within: (keys, limit), and for errors the depth and the largest Σ|q·k|·scale.
SUM_LIMIT, ERROR_LIMIT, DEPTH, LARGEST = (1024, 1.0e-5), (1024, 2.0e-4), 16, 32.0
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
        f"all fp32 inputs without overflow: the error over max|v|, depth {DEPTH} and scores of at "
        f"most {LARGEST:g}, over so many keys is at most"
    )
    bound = partial(error_bound, depth=DEPTH, largest=LARGEST)
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
