"""The Triton executor of linear_logprob.

[Note: logits on a GPU]
Logits are computed by the kernels of the linear layer, unrounded, for as many tokens at a time as fit in CHUNK
elements, so that [tokens, vocabulary] never exists. The backward computes them again: for some tokens and all words
for dhidden, and for all tokens and some words for dweight. How many at a time is not part of the order. The number of
words is a constant of the compiled kernels, so it is one of a few: no number of tokens has binaries of its own.

[Note: a program per segment]
A vocabulary of 151,936 words is 8 segments, whose pairs (maximum, sum) are merged after they are whole. So the pairs of
segments come from programs of their own, and a second kernel merges them: 8 programs for one row. There is no other
form for many rows, because one program for all segments of a row has as many instructions per word (on sm_90 33.5,
against 33.3 here). The loads of STEPS steps of 16 words are in one basic block, and
ptxas issues all of them before the first sum. The sums remain ascending. The maximum has no order, so its tile is wide.

The gradients of bf16 logits are rounded to bf16 before they are multiplied, as those of a tensor core must be. Those of
fp16 logits are not rounded, since fp16 has too few exponents for them: they are multiplied in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import exp_nonpositive, log_positive, round_once, soft_cap
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run
from isobit.ops.gpu.sums import merge_columns, merge_pairs
from isobit.ops.linear.triton import multiply, sum_weight_grad
from isobit.ops.logprob.portable import inverse
from isobit.ops.portable.samples import whole_samples
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FeaturePlan

CHUNK = 1 << 26  # logits at a time
WHOLE_TILES = 128
WORDS = (65536, 8192, 1024, 128)  # at a time, for the gradient of the weight
BLOCK, WARPS = 1024, 4
ROWS, MERGED_ROWS = 2, 16  # of a program, which is one warp
WIDTH = tl.constexpr(256)  # words whose maximum is taken at a time
STEPS = tl.constexpr(8)  # steps of 16 words whose loads do not wait for each other


@triton.jit(do_not_specialize=["size"])
def cap_logits(logits: tl.tensor, size: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Replace fp32 logits [size] by cap · tanh(logit / cap)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _ = soft_cap(tl.load(logits + place, mask=place < size, other=0.0), cap)
    tl.store(logits + place, value, mask=place < size)


@triton.jit(do_not_specialize=["m"])
def sum_segments(
    logits: tl.tensor,
    pairs: tl.tensor,
    m: tl.tensor,
    inverse: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store the maximum of each segment and its sum of exp(x − maximum): pairs is [m, SEGMENTS, 2].

    x is logits · inverse; logits is fp32 [m, N]. A program computes one segment of ROWS rows.
    """
    LENGTH: tl.constexpr = N // SEGMENTS
    WHOLE: tl.constexpr = LENGTH // (16 * STEPS) * (16 * STEPS)
    segment = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    place = row * N + segment * LENGTH  # [ROWS, 1]
    column = tl.arange(0, WIDTH)[None, :]
    most = tl.full((ROWS, WIDTH), -float("inf"), tl.float32)
    for at in range(0, LENGTH, WIDTH):
        inside = (row < m) & (at + column < LENGTH)
        value = tl.load(logits + place + (at + column), mask=inside, other=-float("inf")) * inverse
        most = tl.maximum(most, value)
    top = tl.max(most, 1)[:, None]  # [ROWS, 1]
    base = tl.where(top == -float("inf"), 0.0, top)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, WHOLE, 16 * STEPS):
        for step in tl.static_range(STEPS):
            at = start + 16 * step
            value = tl.load(logits + place + (at + lane), mask=row < m, other=0.0) * inverse
            total = total + exp_nonpositive(value - base)
    for at in range(WHOLE, LENGTH, 16):  # fewer than STEPS; lanes beyond the end add nothing
        known = at + lane < LENGTH
        value = tl.load(logits + place + (at + lane), mask=(row < m) & known, other=0.0) * inverse
        total = tl.where(known, total + exp_nonpositive(value - base), total)
    pair = pairs + (row * SEGMENTS + segment) * 2
    tl.store(pair, top, mask=row < m)
    tl.store(pair + 1, merge_columns(total, ROWS, 16), mask=row < m)


@triton.jit(do_not_specialize=["m"])
def choose_words(
    logits: tl.tensor,
    targets: tl.tensor,
    pairs: tl.tensor,
    found: tl.tensor,
    stats: tl.tensor,
    m: tl.tensor,
    inverse: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store log-probabilities of targets, found [m], and each row's maximum and log of its sum, stats [m, 2].

    logits is fp32 [m, N], targets int64 [m], pairs fp32 [m, SEGMENTS, 2]. A program merges the pairs of ROWS rows.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    pair = pairs + (row * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]) * 2  # [ROWS, SEGMENTS]
    tops = tl.load(pair, mask=row < m, other=-float("inf"))
    sums = tl.load(pair + 1, mask=row < m, other=0.0)
    top, whole = merge_pairs(tops, sums, ROWS, SEGMENTS)
    log_sum = log_positive(whole)  # [ROWS, 1]
    target = tl.load(targets + row, mask=row < m, other=-1)  # [ROWS, 1]
    chosen = tl.load(logits + row * N + target, mask=target >= 0, other=0.0) * inverse
    result = tl.where(target < 0, 0.0, (chosen - top) - log_sum)
    tl.store(found + row, round_once(result, tl.float32), mask=row < m)
    tl.store(stats + row * 2, round_once(top, tl.float32), mask=row < m)
    tl.store(stats + row * 2 + 1, round_once(log_sum, tl.float32), mask=row < m)


@triton.jit(do_not_specialize=["first", "columns"])
def differentiate_logits(
    logits: tl.tensor,
    targets: tl.tensor,
    stats: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    inverse: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store out = (onehot(target) − softmax) · grad / temperature for the words from first on.

    logits is fp32 [M, columns], without their soft cap, out has its shape, targets is int64 [M], grad fp32 [M] and
    stats fp32 [M, 2].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(targets + row)
    scaled = tl.where(target < 0, 0.0, tl.load(grad + row) * inverse)
    value = tl.load(logits + row * columns + column, mask=inside, other=0.0)
    if CAPPED:
        value, slope = soft_cap(value, cap)
    value = value * inverse
    weight = exp_nonpositive((value - tl.load(stats + row * 2)) - tl.load(stats + row * 2 + 1))
    spread = tl.where(column + first == target, 1.0 - weight, 0.0 - weight) * scaled
    if CAPPED:
        spread = spread * slope
    result = round_once(spread, out.dtype.element_ty)
    tl.store(out + row * columns + column, result, mask=inside)


def scale_of(temperature: float) -> float:
    """Return 1 / temperature in fp32."""
    return float(inverse(temperature, torch.float32))


def words_at_a_time(tokens: int) -> int:
    """Return for how many words the logits of all tokens are computed at a time."""
    return next((words for words in WORDS if words * tokens <= CHUNK), WORDS[-1])


def tokens_at_a_time(size: int) -> int:
    """Return how many rows of `size` logits are computed at a time: whole tiles, if there is memory for one."""
    rows = max(CHUNK // max(size, 1), 1)
    return rows // WHOLE_TILES * WHOLE_TILES or rows


def choose(logits: Tensor, targets: Tensor, scale: float, found: Tensor, stats: Tensor) -> None:
    """Fill found [M] and stats [M, 2] of logits [M, N] times `scale`, as `choose_words` says."""
    rows, words = logits.shape
    segments = FeaturePlan(words).count
    pairs = torch.empty(rows, segments, 2, dtype=torch.float32, device=logits.device)
    sizes = {"N": words, "SEGMENTS": segments, "warps": 1}
    grid = (-(-rows // ROWS), segments)
    run(sum_segments, grid, logits, pairs, rows, scale, ROWS=ROWS, **sizes)
    given = logits, targets, pairs, found, stats, rows, scale
    run(choose_words, (-(-rows // MERGED_ROWS),), *given, ROWS=MERGED_ROWS, **sizes)


def spread_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    grad: Tensor,
    first: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Return the gradients of the logits [tokens, words] of the words from `first` on, in the dtype of products."""
    logits = multiply(hidden, weight, None, torch.float32)
    dtype = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    grid = (logits.shape[0], -(-logits.shape[1] // BLOCK))
    given = logits, targets, stats, grad, out, first, logits.shape[1], scale, softcap
    run(differentiate_logits, grid, *given, CAPPED=softcap > 0, BLOCK=BLOCK, warps=WARPS)
    return out


def widen(tensor: Tensor) -> Tensor:
    """Return the other factor of gradients of logits: fp16 is multiplied in fp32."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


@triton_operator("linear_logprob")
def triton_linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    spans: Tensor | None,
    of: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    tokens, words = hidden.shape[0], weight.shape[0]
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    found = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    stats = torch.empty(tokens, 2, dtype=torch.float32, device=hidden.device)
    scale, step = scale_of(temperature), tokens_at_a_time(words)
    for at in range(0, tokens, step):
        part = slice(at, at + step)
        logits = multiply(hidden[part], weight, None, torch.float32)
        if softcap:
            size = logits.numel()
            run(cap_logits, (-(-size // BLOCK),), logits, size, softcap, BLOCK=BLOCK, warps=WARPS)
        choose(logits, targets[part], scale, found[part], stats[part])
    return found, stats


@triton_operator("linear_logprob_backward")
def triton_linear_logprob_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    spans: Tensor,
    temperature: float,
    want_hidden: bool,
    want_weight: bool,
    of: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    samples = whole_samples(hidden, spans, of if want_weight else 0)
    grad, hidden, weight = grad.contiguous(), hidden.contiguous(), weight.contiguous()
    targets, stats = targets.contiguous(), stats.contiguous()
    tokens, words = hidden.shape[0], weight.shape[0]
    scale = scale_of(temperature)
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    step = tokens_at_a_time(words)
    for at in range(0, tokens if want_hidden else 0, step):
        part = slice(at, at + step)
        given = hidden[part], weight, targets[part], stats[part], grad[part]
        spread = spread_of(*given, 0, scale, softcap)
        found = dhidden[part]
        multiply(spread, widen(weight), None, hidden.dtype, transposed=True, out=found)
    dtype = gradient_dtype(weight.dtype, len(samples.spans), samples.total)
    dweight = torch.empty(weight.shape, dtype=dtype, device=hidden.device)
    step = words_at_a_time(tokens)
    for at in range(0, words if want_weight else 0, step):
        part = slice(at, at + step)
        spread = spread_of(hidden, weight[part], targets, stats, grad, at, scale, softcap)
        sum_weight_grad(spread, widen(hidden), samples, dtype, out=dweight[part])
    return dhidden, dweight
