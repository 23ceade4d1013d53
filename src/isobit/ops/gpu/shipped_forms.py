"""Compare the products that a model runs on a GPU, each form at its shipped tile, with the exact evaluator.

[Note: the forms of a product]
A form is a kernel and what is compiled into it: tile, transposition, head size. A model runs the forms that follow from
its sizes, so an attestation at other sizes says nothing about them. Each is compared here once, on values of many
magnitudes. Rows and columns of a matrix repeat with odd periods, so a few exact sums decide every element of several
tiles; an element that is stored at a wrong place differs too, because tiles are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attention.portable import State
from isobit.ops.attesting import Call, spans_and_samples, wide_values
from isobit.ops.logprob import portable as logprob
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import Pair, merge_pairs, round_once, sum_last, sum_rows
from isobit.ops.share import gradient_dtype
from isobit.order.engines import tensor_core
from isobit.order.evaluate import ENGINES, Engine, by_leaf, evaluate, feature_segments
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK, FeaturePlan, Leaf, Segment

# Distinct rows and columns of a matrix.
ROWS, COLUMNS = 5, 3
WIDE = 2048  # features of eight segments, as every wide layer has
# Rows, columns, features and how: "T" transposes the weight, "=" adds a bias and rounds, as a layer does; without it,
# sums are compared before they are rounded. "*" asks for one program per tile, which few rows have if columns are many.
PRODUCT_FORMS = (
    (2, 64, WIDE, ""),
    (2, 64, WIDE, "*"),
    (33, 64, WIDE, "="),
    (33, 64, WIDE, "*"),
    (2, 64, WIDE, "T"),
    (33, 64, WIDE, "T="),
    (130, 144, WIDE, ""),
    (130, 144, WIDE, "="),
    (130, 144, WIDE, "T="),
    (130, 144, 512, "="),  # two segments, in registers
    (130, 130, 300, ""),  # one, which is not a multiple of a step
)
TOKENS = 310  # one of the samples has a leaf and a part of the next
HEADS = (64, 128)
QUERIES, GROUP = 70, 2
LONG = ATTENTION_CHUNK + ATTENTION_BLOCK // 2
# Queries and keys: a whole sample with its gradient; one and few queries, over one chunk and over two.
ATTENTION_FORMS = ((QUERIES, QUERIES), (1, QUERIES), (3, QUERIES), (1, LONG), (3, LONG))
VOCABULARY, WIDTH = 2056, 16  # eight segments, each with a tail


def engine_of(engine: str, dtype: torch.dtype) -> Engine:
    """Return how an engine adds a run of products of a dtype to an accumulator."""
    if engine == "chain" or dtype == torch.bfloat16:
        return ENGINES[engine]
    return by_leaf(tensor_core(engine, "f16"))


def repeated(rows: Tensor, count: int) -> Tensor:
    """Return [count, n], the rows of a matrix over and over."""
    return rows[torch.arange(count) % len(rows)]


def exact(segments: Sequence[Segment], left: Tensor, right: Tensor, add: Engine) -> Tensor:
    """Return fp32 [R, C], left [R, k] against right [C, k], by the exact evaluator."""
    columns = right.double().tolist()
    sums = [
        [evaluate(segments, list(zip(row, column, strict=True)), add) for column in columns]
        for row in left.double().tolist()
    ]
    return torch.tensor(sums, dtype=torch.float32)


# linear


def linear_difference(
    dtype: torch.dtype, call: Call, device: torch.device, engine: str
) -> str | None:
    """Return the form of linear that differs first from the exact evaluator, or None."""
    for rows, columns, extent, how in PRODUCT_FORMS:
        if not product_agrees(dtype, device, engine, rows, columns, extent, how):
            word = " transposed" if "T" in how else ""
            return f"the{word} product of {rows} rows and {columns} columns at extent {extent}"
    return gradient_difference(dtype, call, device, engine)


def product_agrees(
    dtype: torch.dtype,
    device: torch.device,
    engine: str,
    rows: int,
    columns: int,
    extent: int,
    how: str,
) -> bool:
    """Return whether a form of a product has the bits of the exact evaluator in every element."""
    generator = torch.Generator().manual_seed(extent + rows)
    left, right = (wide_values((n, extent), dtype, generator) for n in (ROWS, COLUMNS))
    offset = wide_values((COLUMNS, 1), dtype, generator)
    want = exact(feature_segments(extent, engine), left, right, engine_of(engine, dtype))
    x, weight = repeated(left, rows).to(device), repeated(right, columns).to(device)
    bias, out = None, torch.float32
    if "=" in how:
        bias, out = repeated(offset, columns)[:, 0].to(device), dtype
        want = round_once(want + offset.float().t(), dtype)
    given: dict[str, Any] = {"enough": 1} if "*" in how else {}
    if "T" in how:
        weight, given["transposed"] = weight.t().contiguous(), True
    multiply = import_module("isobit.ops.linear.triton").multiply
    want = repeated(repeated(want, rows).t(), columns).t().contiguous()
    return bits.equal(multiply(x, weight, bias, out, **given).cpu(), want)


def gradient_difference(
    dtype: torch.dtype, call: Call, device: torch.device, engine: str
) -> str | None:
    """Return the gradient of linear's parameters that differs first, or None."""
    generator = torch.Generator().manual_seed(TOKENS)
    left, right = (wide_values((n, TOKENS), dtype, generator) for n in (ROWS, COLUMNS))
    grad, x = (repeated(part, 130).t().contiguous() for part in (left, right))
    spans, samples = spans_and_samples(TOKENS)
    kind = gradient_dtype(dtype, len(spans), len(spans))
    want = exact(samples.segments, left, right, engine_of(engine, dtype))
    want = round_once(repeated(repeated(want, 130).t(), 130).t(), kind)
    # A small weight has programs for parts of the samples, a large one has not.
    whole = import_module("isobit.ops.linear.triton").sum_weight_grad
    large = whole(grad.to(device), x.to(device), samples, kind, enough=0).cpu()
    for found in (call("linear_weight_grad", grad, x, spans), large):
        if not bits.equal(found, want):
            return "the gradient of linear's weight"
    ones = torch.ones(1, TOKENS, dtype=torch.float32)
    sums = exact(samples.segments, left, ones, ENGINES["striped"])
    if not bits.equal(
        call("linear_bias_grad", grad, spans), repeated(round_once(sums, kind), 130)[:, 0]
    ):
        return "the gradient of linear's bias"
    return None


# attention


class Products:
    """Sums of products of 16-bit rows, from zero, as the dots of attention's kernels compute them."""

    def __init__(self, engine: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._add = tensor_core(engine, "bf16" if dtype == torch.bfloat16 else "f16")

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Return fp32 [C], left [k] against right [C, k]; left is rounded to the operands' dtype."""
        row = left.to(self.dtype).double().tolist()
        sums = [
            self._add(None, list(zip(row, one, strict=True))) for one in right.double().tolist()
        ]
        return torch.tensor(sums, dtype=torch.float32)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, dot: Products) -> tuple[Tensor, Tensor]:
    """Return y [D] in fp32 and the log-sum-exp [1] of one query that sees the keys k [T, D]."""
    state: State | None = None
    for start in range(0, len(k), ATTENTION_CHUNK):
        chunk = State.empty(q.float()[None])
        for first in range(start, min(start + ATTENTION_CHUNK, len(k)), ATTENTION_BLOCK):
            block = slice(first, first + ATTENTION_BLOCK)
            scores = dot(q, k[block]) * scale
            most = torch.maximum(chunk.max, scores.amax())
            factor, weights = exp_nonpositive(chunk.max - most), exp_nonpositive(scores - most)
            added = sum_rows(((Leaf(0, weights.shape[1], False),),), weights.t())
            output = chunk.output * factor + dot(weights[0], v[block].t())
            chunk = State(most, chunk.sum * factor + added, output)
        state = chunk if state is None else state.merged(chunk)
    assert state is not None
    y, lse = state.finish()
    return y[0], lse


def score_gradients(
    q: Tensor,
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dots: Tensor,
    scale: float,
    dot: Products,
) -> tuple[Tensor, Tensor]:
    """Return the weights [T] of one query over keys, and the gradients [T] of its scores."""
    weights = exp_nonpositive(dot(q, k) * scale - lse)
    return weights, (weights * (dot(grad, v) - dots)) * scale


def attention_difference(dtype: torch.dtype, call: Call, engine: str) -> str | None:
    """Return what of attention differs first from the exact evaluator, or None: every form, per size of a head."""
    dot = Products(engine, dtype)
    for depth in HEADS:
        for queries, keys in ATTENTION_FORMS:
            found = sample_difference(queries, keys, depth, call, dot)
            if found:
                return (
                    f"attention's {found} for {queries} queries, {keys} keys and heads of {depth}"
                )
    return None


def sample_difference(queries: int, keys: int, depth: int, call: Call, dot: Products) -> str | None:
    """Return what differs first in one causal sample of two heads over one head of keys, or None."""
    generator = torch.Generator().manual_seed(depth + keys)
    q, grad = (wide_values((queries, GROUP, depth), dot.dtype, generator) for _ in range(2))
    k, v = (wide_values((keys, 1, depth), dot.dtype, generator) for _ in range(2))
    scale = 2.0**-6
    where = (
        torch.tensor([[0, queries]], dtype=torch.int64),
        torch.arange(0, keys, ATTENTION_BLOCK, dtype=torch.int64)[None],
        torch.tensor([keys], dtype=torch.int64),
    )
    y, lse = call("attention", q, k, v, *where, scale, True, 0)
    # An exact query over thousands of keys takes time, so of a long sample only the last is computed.
    for query, head in (
        {(0, 0), (queries - 1, GROUP - 1)} if keys == queries else ((queries - 1, 1),)
    ):
        seen = slice(0, keys - queries + query + 1)
        want, want_lse = attend(q[query, head], k[seen, 0], v[seen, 0], scale, dot)
        if not bits.equal(y[query, head], round_once(want, dot.dtype)):
            return "outputs"
        if not bits.equal(lse[query, head], want_lse[0]):
            return "log-sum-exp"
    if queries < keys:
        return None
    found = call("attention_backward", grad, q, k, v, y, lse, *where, scale, True, 0)
    return backward_difference((grad, q, k[:, 0], v[:, 0], y, lse), found, scale, dot)


def backward_difference(
    saved: tuple[Tensor, ...], found: tuple[Tensor, Tensor, Tensor], scale: float, dot: Products
) -> str | None:
    """Return the gradient of attention that differs first, or None: the last query, and a key of either block."""
    grad, q, k, v, y, lse = saved
    tokens = len(q)
    dots = [sum_last(grad[:, head].float() * y[:, head].float()) for head in range(GROUP)]

    def of(query: int, head: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        given = q[query, head], grad[query, head], keys, values, lse[query, head], dots[head][query]
        return score_gradients(*given, scale, dot)

    last, head = tokens - 1, GROUP - 1
    spread, dq = of(last, head, k, v)[1], torch.zeros(q.shape[-1], dtype=torch.float32)
    for block in blocks(tokens):
        dq = dq + dot(spread[block], k[block].t())
    if not bits.equal(found[0][last, head], round_once(dq + 0.0, dot.dtype)):
        return "dq"
    for key in (1, last):
        one, value = k[key : key + 1], v[key : key + 1]
        dk = dv = torch.zeros(q.shape[-1], dtype=torch.float32)
        for head in range(GROUP):
            pairs = [of(query, head, one, value) for query in range(key, tokens)]
            hidden = [torch.zeros(1, dtype=torch.float32)] * key
            weights, spread = (torch.cat([*hidden, *side]) for side in zip(*pairs, strict=True))
            for block in blocks(tokens)[key // ATTENTION_BLOCK :]:
                dv = dv + dot(weights[block], grad[block, head].t())
                dk = dk + dot(spread[block], q[block, head].t())
        if not bits.equal(found[1][key, 0], round_once(dk + 0.0, dot.dtype)):
            return "dk"
        if not bits.equal(found[2][key, 0], round_once(dv + 0.0, dot.dtype)):
            return "dv"
    return None


def blocks(tokens: int) -> list[slice]:
    """Return the blocks of a sample."""
    return [
        slice(at, min(at + ATTENTION_BLOCK, tokens)) for at in range(0, tokens, ATTENTION_BLOCK)
    ]


# linear_logprob


def logprob_difference(dtype: torch.dtype, call: Call, engine: str) -> str | None:
    """Return what of linear_logprob differs first from the exact evaluator, or None: many rows, both directions."""
    add, rows = engine_of(engine, dtype), 130
    generator = torch.Generator().manual_seed(VOCABULARY)
    few, weight = (wide_values((n, WIDTH), dtype, generator) for n in (ROWS, VOCABULARY))
    few_targets = torch.tensor([0, VOCABULARY - 1, -100, 7, 300], dtype=torch.int64)
    few_grad = torch.tensor([1.0, -0.3, 2.0, 0.7, -1.1], dtype=torch.float32)
    hidden, targets, grad = (repeated(part, rows) for part in (few, few_targets, few_grad))
    spans = torch.tensor([[0, rows]], dtype=torch.int64)
    found, stats = call("linear_logprob", hidden, weight, targets, 1.0, spans)
    logits = exact(feature_segments(WIDTH, engine), few, weight, add)
    total = merge_pairs(logits, FeaturePlan(VOCABULARY).segments, Pair)
    chosen = logits.gather(1, few_targets.clamp(min=0)[:, None])[:, 0]
    want, want_stats = logprob.finish(torch.cat([total.max, total.sum], 1), chosen, few_targets)
    if not bits.equal(found, repeated(want, rows)) or not bits.equal(
        stats, repeated(want_stats, rows)
    ):
        return "linear_logprob's values"
    given = call(
        "linear_logprob_backward", grad, hidden, weight, targets, stats, spans, 1.0, True, True
    )
    weights = exp_nonpositive((logits - want_stats[:, :1]) - want_stats[:, 1:])
    own = torch.arange(VOCABULARY) == few_targets[:, None]
    scaled = torch.where(few_targets < 0, 0.0, few_grad)[:, None]
    spread = torch.where(own, 1.0 - weights, 0.0 - weights) * scaled
    if dtype == torch.bfloat16:
        spread = spread.to(dtype)
    else:  # fp16 is widened, because its range is too small for these gradients
        add, engine = ENGINES["chain"], "chain"
    columns = torch.tensor([0, WIDTH - 1])
    dhidden = exact(feature_segments(VOCABULARY, engine), spread, weight[:, columns].t(), add)
    if not bits.equal(given[0][:, columns], round_once(repeated(dhidden, rows), dtype)):
        return "linear_logprob's dhidden"
    words = torch.tensor([0, 300, VOCABULARY - 1])
    terms = repeated(spread, rows)[:, words].t(), hidden[:, columns].t()
    dweight = exact(whole_samples(hidden, spans).segments, *terms, add)
    if not bits.equal(
        given[1][words][:, columns], round_once(dweight, gradient_dtype(dtype, 1, 1))
    ):
        return "linear_logprob's dweight"
    return None


Difference = Callable[[torch.dtype, Call, str], "str | None"]
OF_HALVES: dict[str, Difference] = {
    "attention": attention_difference,
    "logprob": logprob_difference,
}
