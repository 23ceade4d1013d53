"""The Triton executor of a mixture of experts: routes, dispatched rows and their combination.

[Note: routes on a GPU]
A program chooses the experts of one token: k times the largest score, and among equal ones the lowest id. Scores are
compared as integers that have the order of the floats, with one zero and with NaN above +inf, as a stable sort of torch
has it; maxima and minima of integers have no order. What is moved and not computed (sorts of ids, rows and slots) is
done by torch's functions of integers. The number of rows of each expert, and of each sample among them, is the one
thing for which the host waits: once per `Routes`, which all layers of experts with these routes share, and their
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.device_tables import kept, values_of
from isobit.ops.embedding.triton import run_columns
from isobit.ops.experts.portable import LEAST, segments_of
from isobit.ops.gpu.elementary import round_once, sigmoid
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, run_elements
from isobit.ops.gpu.sums import merge_columns
from isobit.ops.linear.triton import multiply
from isobit.ops.softmax.triton import triton_softmax, triton_softmax_backward

LOWEST = tl.constexpr(-(2**31))
TOKENS = 64  # of a program that computes weights


@triton.jit
def key_of(bits: tl.tensor) -> tl.tensor:
    """Return int32 keys in the order of the fp32 numbers that have these bits; both zeros are 0, NaN is the largest."""
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -size, size)
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, key)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """Return the bits of fp32 numbers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def read_scores(
    scores: tl.tensor,
    bias: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    known: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Return the numbers by which experts `at` are chosen."""
    value = tl.load(scores + row + at, mask=known, other=0.0)
    if HAS_BIAS:
        value = value + tl.load(bias + at, mask=known, other=0.0)
    return value


@triton.jit
def choose_experts(
    scores: tl.tensor,
    bias: tl.tensor,
    padding: tl.tensor,
    experts: tl.tensor,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
    WIDE_SIZE: tl.constexpr,
) -> None:
    """Store experts [tokens, CHOSEN] of a token: scores are fp32 [tokens, E], padding bool [tokens].

    A tile is [WIDE_GROUPS, WIDE_SIZE], powers of two: one row per group of E / GROUPS experts.
    """
    SIZE: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, WIDE_GROUPS)[:, None], tl.arange(0, WIDE_SIZE)[None, :]
    at = group * SIZE + member
    known = (group < GROUPS) & (member < SIZE)
    value = read_scores(scores, bias, token * E, at, known, HAS_BIAS)
    key = tl.where(known, key_of(bits_of(value)), LOWEST)
    if GROUPS > TOP_GROUPS:
        # A group's score is the sum of its two largest; of one alone, where a group has one.
        bits = bits_of(value)
        top = tl.max(key, 1)[:, None]  # [WIDE_GROUPS, 1]
        first = tl.min(tl.where(key == top, member, WIDE_SIZE), 1)[:, None]
        best = tl.max(tl.where(member == first, bits, LOWEST), 1).to(tl.float32, bitcast=True)
        if SIZE > 1:
            rest = tl.where(member == first, LOWEST, key)
            top = tl.max(rest, 1)[:, None]
            other = tl.min(tl.where(rest == top, member, WIDE_SIZE), 1)[:, None]
            second = tl.max(tl.where(member == other, bits, LOWEST), 1)
            best = best + second.to(tl.float32, bitcast=True)
        number = tl.arange(0, WIDE_GROUPS)
        left = tl.where(number < GROUPS, key_of(bits_of(best)), LOWEST)  # [WIDE_GROUPS]
        kept = number < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = tl.min(tl.where(left == tl.max(left, 0), number, WIDE_GROUPS), 0)
            kept = kept | (number == chosen)
            left = tl.where(number == chosen, LOWEST, left)
        # As if -inf were the score of all others: they are chosen only where no better one is left.
        lost = known & (kept[:, None] == 0)
        key = tl.where(lost, -0x7F800000, key)
    is_padding = tl.load(padding + token) != 0
    for slot in tl.static_range(CHOSEN):
        top = tl.max(tl.max(key, 1), 0)
        expert = tl.min(tl.min(tl.where(key == top, at, E), 1), 0)
        tl.store(experts + token * CHOSEN + slot, tl.where(is_padding, E, expert).to(tl.int64))
        key = tl.where(at == expert, LOWEST, key)


@triton.jit
def sum_slots(
    values: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    CHOSEN: tl.constexpr,
    LEAST: tl.constexpr,
) -> tl.tensor:
    """Return the sums of values fp32 [tokens, CHOSEN] over the slots from left to right, then + LEAST if any."""
    total = tl.load(values + token * CHOSEN, mask=inside, other=1.0)
    for slot in tl.static_range(1, CHOSEN):
        total = total + tl.load(values + token * CHOSEN + slot, mask=inside, other=1.0)
    if LEAST != 0.0:
        total = total + LEAST
    return total


@triton.jit(do_not_specialize=["size", "scale"])
def weigh_slots(
    chosen: tl.tensor,
    padding: tl.tensor,
    weights: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store weights fp32 [tokens, CHOSEN] of scores chosen, times scale; size is the number of tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    padded = tl.load(padding + token, mask=inside, other=1) != 0
    total = tl.full((BLOCK,), 1.0, tl.float32)
    if NORMALIZE:
        total = sum_slots(chosen, token, inside, CHOSEN, LEAST)
    for slot in tl.static_range(CHOSEN):
        value = tl.load(chosen + token * CHOSEN + slot, mask=inside, other=0.0)
        if SIGMOID:
            value, _ = sigmoid(value)
        if NORMALIZE:
            value = tl.div_rn(value, total)
        weight = tl.where(padded, 0.0, value * scale)
        tl.store(weights + token * CHOSEN + slot, round_once(weight, tl.float32), mask=inside)


@triton.jit(do_not_specialize=["size", "scale"])
def slot_grad(
    grad: tl.tensor,
    chosen: tl.tensor,
    logits: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the gradients of chosen scores, or of chosen logits if SIGMOID; all are fp32 [tokens, CHOSEN]."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    total = tl.full((BLOCK,), 1.0, tl.float32)
    pulled = tl.zeros((BLOCK,), tl.float32)
    if NORMALIZE:
        total = sum_slots(chosen, token, inside, CHOSEN, LEAST)
        for slot in tl.static_range(CHOSEN):
            upstream = tl.load(grad + token * CHOSEN + slot, mask=inside, other=0.0) * scale
            value = tl.load(chosen + token * CHOSEN + slot, mask=inside, other=0.0)
            term = upstream * tl.div_rn(value, total)
            pulled = term if slot == 0 else pulled + term
    for slot in tl.static_range(CHOSEN):
        upstream = tl.load(grad + token * CHOSEN + slot, mask=inside, other=0.0) * scale
        if NORMALIZE:
            upstream = tl.div_rn(upstream - pulled, total)
        if SIGMOID:
            value, rest = sigmoid(tl.load(logits + token * CHOSEN + slot, mask=inside, other=0.0))
            upstream = upstream * (value * rest)
        tl.store(out + token * CHOSEN + slot, upstream, mask=inside)


@triton.jit
def spread_slots(
    slots: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store out fp32 [tokens, WIDTH]: the slots of a token at its experts, and +0 elsewhere."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(CHOSEN):
        expert = tl.load(experts + token * CHOSEN + slot)
        value = tl.where(column == expert, tl.load(slots + token * CHOSEN + slot), value)
    tl.store(out + token * WIDTH + column, value, mask=column < WIDTH)


@triton.jit
def round_rows(
    rows: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round rows fp32 [tokens, WIDTH] into out; a token whose first expert is WIDTH is padding, and +0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + token * WIDTH + column, mask=column < WIDTH, other=0.0)
    value = tl.where(tl.load(experts + token * CHOSEN) == WIDTH, 0.0, value)
    place = out + token * WIDTH + column
    tl.store(place, round_once(value, out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["size"])
def logistic_scores(x: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Store the logistic function of x in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _ = sigmoid(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(y + at, value, mask=at < size)


def score_logits(logits: Tensor, score: str) -> Tensor:
    """Return the scores fp32 [T, E] by which experts are chosen."""
    wide = logits.float().contiguous()
    if score == "softmax":
        return triton_softmax(wide)  # type: ignore[no-any-return]
    if score != "sigmoid":
        return wide
    scores = torch.empty_like(wide)
    run_elements("route", logistic_scores, (wide,), (scores,))
    return scores


def is_padding(spans: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Return int8 [T], whether a row belongs to no sample."""
    if spans is None:
        return torch.zeros(rows, dtype=torch.int8, device=device)
    known = tuple((start, length) for start, length in values_of(spans))

    def make() -> Tensor:
        found = torch.ones(rows, dtype=torch.int8, device="cpu")
        for start, length in known:
            found[start : start + length] = 0
        return found.to(device)

    return kept((is_padding, known, rows), device, make)


def how_to_weigh(score: str, normalize: bool) -> dict[str, Any]:
    """Return the constants of a kernel of slots."""
    divides = normalize and score in ("softmax", "sigmoid")
    return {"NORMALIZE": divides, "LEAST": LEAST if divides and score == "sigmoid" else 0.0}


def run_tokens(kernel: object, tokens: int, *args: Tensor | float, **constants: Any) -> None:
    """Launch a kernel of slots over blocks of tokens."""
    run(kernel, (-(-tokens // TOKENS),), *args, warps=2, BLOCK=TOKENS, **constants)


@triton_operator("route")
def triton_route(
    logits: Tensor,
    bias: Tensor | None,
    spans: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Return weights and experts."""
    tokens, count = logits.shape
    scores, padding = score_logits(logits, score), is_padding(spans, tokens, logits.device)
    # Not uninitialised: ids are addresses, and a backend may only record its launches.
    experts = torch.full((tokens, k), count, dtype=torch.int64, device=logits.device)
    run(
        choose_experts,
        (tokens,),
        scores,
        scores if bias is None else bias.float().contiguous(),
        padding,
        experts,
        warps=1,
        E=count,
        CHOSEN=k,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        HAS_BIAS=bias is not None,
        WIDE_GROUPS=triton.next_power_of_2(groups),
        WIDE_SIZE=triton.next_power_of_2(count // groups),
    )
    chosen = scores.gather(1, experts.clamp(max=count - 1))
    if score == "softmax_of_chosen":
        chosen = triton_softmax(chosen)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    how = {**how_to_weigh(score, normalize), "SIGMOID": score == "sigmoid_of_chosen"}
    run_tokens(weigh_slots, tokens, chosen, padding, weights, tokens, scale, CHOSEN=k, **how)
    return weights, experts


@triton_operator("route_backward")
def triton_route_backward(
    grad: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits."""
    (tokens, count), k = logits.shape, experts.shape[1]
    scores, known = score_logits(logits, score), experts.clamp(max=count - 1)
    chosen, slots = scores.gather(1, known), torch.empty_like(grad, dtype=torch.float32)
    slots = slots.contiguous()
    how = {**how_to_weigh(score, normalize), "SIGMOID": score.startswith("sigmoid")}
    own = logits.float().gather(1, known)
    given = grad.float().contiguous(), chosen, own, slots
    run_tokens(slot_grad, tokens, *given, tokens, scale, CHOSEN=k, **how)
    if score == "softmax_of_chosen":
        slots = triton_softmax_backward(slots, triton_softmax(chosen))
    spread = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    run_columns(spread_slots, tokens, count, slots, experts, spread, CHOSEN=k)
    if score == "softmax":
        spread = triton_softmax_backward(spread, scores)
    out = torch.empty(tokens, count, dtype=logits.dtype, device=logits.device)
    run_columns(round_rows, tokens, count, spread, experts, out, CHOSEN=k)
    return out


# ---- rows --------------------------------------------------------------------------------------------------------


@triton.jit
def add_experts(
    rows: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    places: tl.tensor,
    order: tl.tensor,
    y: tl.tensor,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store y [tokens, WIDTH]: a token's rows times their weights, by ascending expert.

    SEGMENTS segments of SIZE experts each are added from left to right from +0, and merged by the tree. order is
    int64 [tokens, CHOSEN], a token's slots by ascending expert; places is -1 for a slot without a row.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    segment = tl.arange(0, SEGMENTS)[None, :]
    total = tl.zeros((BLOCK, SEGMENTS), tl.float32)
    for at in tl.static_range(CHOSEN):
        slot = token * CHOSEN + tl.load(order + token * CHOSEN + at)
        place, owner = tl.load(places + slot), tl.load(experts + slot) // SIZE
        inside = (column < WIDTH) & (place >= 0)
        term = tl.load(rows + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            term = term * tl.load(weights + slot).to(tl.float32)
        total = tl.where((segment == owner) & (place >= 0), total + term, total)
    merged = round_once(merge_columns(total, BLOCK, SEGMENTS), y.dtype.element_ty)
    tl.store(y + token * WIDTH + column, merged, mask=column < WIDTH)


@triton.jit
def copy_rows(
    x: tl.tensor, tokens: tl.tensor, y: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copy the row of x [., WIDTH] of the token of each row of y."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + tl.load(tokens + row) * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(y + row * WIDTH + column, value, mask=column < WIDTH)


@triton.jit
def combine_grad(
    grad: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    terms: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the gradient of a row, and the terms fp32 [rows, WIDTH] of that of its weight; scales is fp32 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    upstream = tl.load(grad + tl.load(tokens + row) * WIDTH + column, mask=inside, other=0.0)
    upstream = upstream.to(tl.float32)
    into = round_once(upstream * tl.load(scales + row), out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, into, mask=inside)
    own = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(terms + row * WIDTH + column, upstream * own, mask=inside)


def combined(
    rows: Tensor, weights: Tensor | None, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return [T, n]: each token's rows times their weights, added by ascending expert and rounded once."""
    (tokens, k), width, segments = experts.shape, rows.shape[1], segments_of(count)
    y = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    given, ids = rows.contiguous(), experts.contiguous()
    run_columns(
        add_experts,
        tokens,
        width,
        given,
        given if weights is None else weights.contiguous(),
        ids,
        places.contiguous(),
        ids.argsort(dim=1, stable=True),
        y,
        CHOSEN=k,
        SEGMENTS=segments,
        SIZE=count // segments,
        HAS_WEIGHTS=weights is not None,
    )
    return y


@triton_operator("dispatch_rows")
def triton_dispatch_rows(
    x: Tensor, tokens: Tensor, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return the rows of all experts."""
    y = torch.empty(len(tokens), x.shape[-1], dtype=x.dtype, device=x.device)
    run_columns(copy_rows, len(tokens), x.shape[-1], x.contiguous(), tokens, y)
    return y


@triton_operator("dispatch_rows_backward")
def triton_dispatch_rows_backward(
    grad: Tensor, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return dx."""
    return combined(grad, None, experts, places, count)


@triton_operator("combine")
def triton_combine(
    rows: Tensor, weights: Tensor, experts: Tensor, places: Tensor, tokens: Tensor, count: int
) -> Tensor:
    """Return the sums of each token."""
    return combined(rows, weights, experts, places, count)


@triton_operator("combine_backward")
def triton_combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights; that of a weight is a sum over features, a product with ones."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if not len(rows):
        return out, torch.zeros_like(weights)
    count, width = rows.shape
    # Slots without a row write behind the last scale.
    scales = torch.zeros(count + 1, dtype=torch.float32, device=rows.device)
    into = torch.where(places >= 0, places, count).reshape(-1)
    scales.scatter_(0, into, weights.float().reshape(-1))
    terms = torch.empty(count, width, dtype=torch.float32, device=rows.device)
    given = grad.contiguous(), rows.contiguous(), tokens, scales, out, terms
    run_columns(combine_grad, count, width, *given)
    ones = torch.ones(1, width, dtype=torch.float32, device=rows.device)
    sums = multiply(terms, ones, None, weights.dtype)[:, 0]
    return out, torch.where(places >= 0, sums[places.clamp(min=0)], 0.0)
