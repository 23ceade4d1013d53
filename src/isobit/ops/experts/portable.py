"""The portable executor of routes, dispatched rows and their combination, in plain torch operations.

[Note: the order of a mixture of experts] A token's route depends on its own logits: experts are chosen by the largest
score, and among equal scores by the lowest id. Rows are dispatched by expert, then by token. A token's outputs are
added by ascending expert id, not by slot: the experts are an axis of the sum, cut into at most 8 segments of
consecutive ids, each added from left to right from +0 and merged by the tree; an expert that was not chosen adds
nothing. So a rank that owns whole segments of experts owns whole subtrees, and the bits do not depend on how many ranks
there are. The gradient of dispatched rows is the same sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit import bits
from isobit.ops import dispatch
from isobit.ops.attesting import Call, call_native, wide_values
from isobit.ops.linear.op import portable_linear
from isobit.ops.portable.elementary import sigmoid
from isobit.ops.portable.sums import round_once, widen
from isobit.ops.softmax.op import portable_softmax, portable_softmax_backward
from isobit.order.plan import FEATURE_CAP, count_segments
from isobit.order.tree import merge

ROWS_AT_ONCE = 256  # tokens whose partial sums are in memory
LEAST = 1e-20  # added to the sum of sigmoid scores before they are divided by it


def segments_of(count: int) -> int:
    """Return into how many segments experts are cut, as heads are: the most ranks that they can be split over."""
    return count_segments(count, 1, FEATURE_CAP)


def softmax(x: Tensor) -> Tensor:
    """Return softmax over the last axis, by the executor that serves the dtype."""
    native = dispatch.is_native(x.dtype)
    return torch.ops.isobit.softmax(x) if native else portable_softmax(x)  # type: ignore[no-any-return]


Softmax = Callable[[Tensor], Tensor]
Both = tuple[Softmax, Callable[[Tensor, Tensor], Tensor]]


def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of softmax, by the executor that serves the dtype."""
    native = dispatch.is_native(y.dtype)
    ops = torch.ops.isobit
    return ops.softmax_backward(grad, y) if native else portable_softmax_backward(grad, y)  # type: ignore[no-any-return]


SERVING: Both = (softmax, softmax_backward)
PORTABLE: Both = (portable_softmax, portable_softmax_backward)


def score_logits(logits: Tensor, score: str, apply: Softmax = softmax) -> Tensor:
    """Return the scores [T, E] by which experts are chosen, in the dtype of arithmetic."""
    wide = widen(logits)
    if score == "softmax":
        return apply(wide)
    return sigmoid(wide)[0] if score == "sigmoid" else wide


def choose(scores: Tensor, k: int) -> Tensor:
    """Return the k largest of each row, [T, k], the largest first; among equal ones the lowest id comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def keep_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Replace the scores of all but the best groups by -inf; a group's score is the sum of its two largest."""
    if groups == top_groups:
        return scores
    rows, count = scores.shape
    by_group = scores.view(rows, groups, count // groups)
    ordered = by_group.sort(dim=-1, descending=True, stable=True).values
    best = ordered[..., 0] + ordered[..., 1] if ordered.shape[-1] > 1 else ordered[..., 0]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, choose(best, top_groups), True)
    return torch.where(kept.unsqueeze(-1), by_group, -torch.inf).view(rows, count)


def sum_slots(values: Tensor) -> Tensor:
    """Return [T, 1], the sums over the slots [T, k] from left to right."""
    total = values[:, :1]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot : slot + 1]
    return total


def weigh(
    chosen: Tensor, score: str, normalize: bool, scale: float, apply: Softmax = softmax
) -> tuple[Tensor, Tensor]:
    """Return the weights [T, k] of the scores of chosen experts, and what they were divided by, [T, 1]."""
    total = torch.ones_like(chosen[:, :1])
    if score == "softmax_of_chosen":
        return apply(chosen) * scale, total
    if score == "sigmoid_of_chosen":
        return sigmoid(chosen)[0] * scale, total
    if normalize:
        total = sum_slots(chosen)
        if score == "sigmoid":
            total = total + LEAST
    return chosen / total * scale, total


def route(
    logits: Tensor,
    bias: Tensor | None,
    spans: Tensor | None,
    k: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    apply: Softmax = softmax,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, k] in the dtype of arithmetic, and experts [T, k]: E, and a weight of 0, for padding."""
    scores = score_logits(logits, score, apply)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    experts = choose(keep_groups(choice, groups, top_groups), k)
    weights = weigh(scores.gather(1, experts), score, normalize, scale, apply)[0]
    padding = is_padding(spans, len(logits)).unsqueeze(1)
    weights = torch.where(padding, 0.0, weights)
    return round_once(weights, weights.dtype), experts.masked_fill(padding, logits.shape[1])


def is_padding(spans: Tensor | None, rows: int) -> Tensor:
    """Return [T], whether a row belongs to no sample."""
    if spans is None:
        return torch.zeros(rows, dtype=torch.bool, device="cpu")
    found = torch.ones(rows, dtype=torch.bool, device="cpu")
    for start, length in spans.tolist():
        found[start : start + length] = False
    return found


def route_backward(
    grad: Tensor,
    logits: Tensor,
    experts: Tensor,
    score: str,
    normalize: bool,
    scale: float,
    executor: Both = SERVING,
) -> Tensor:
    """Return the gradient of the logits; that of a padded row is +0."""
    count, (apply, differentiate) = logits.shape[1], executor
    scores = score_logits(logits, score, apply)
    padding = experts[:, :1] == count
    experts = experts.masked_fill(padding, 0)
    grad = widen(grad) * scale
    chosen = scores.gather(1, experts)
    if score == "softmax_of_chosen":
        grad = differentiate(grad, apply(chosen))
    elif normalize and score != "sigmoid_of_chosen":
        total = weigh(chosen, score, normalize, 1.0)[1]
        grad = (grad - sum_slots(grad * (chosen / total))) / total
    if score in ("sigmoid", "sigmoid_of_chosen"):
        values, complements = sigmoid(widen(logits).gather(1, experts))
        grad = grad * (values * complements)
    spread = torch.zeros_like(scores).scatter_(1, experts, grad)
    if score == "softmax":
        spread = differentiate(spread, scores)
    return round_once(torch.where(padding, 0.0, spread), logits.dtype)


# ---- rows --------------------------------------------------------------------------------------------------------


def sum_experts(
    rows: Tensor,
    weights: Tensor | None,
    experts: Tensor,
    places: Tensor,
    count: int,
    segments: int,
) -> Tensor:
    """Return [segments, T, n]: the partial sums over each segment of experts, in the dtype of arithmetic.

    Args:
        rows: The rows of all experts, [R, n].
        weights: What each slot's row is multiplied by, [T, k]; None for 1.
        experts: The expert of each slot, [T, k].
        places: The row of each slot, [T, k]; -1 for none.
        count: The number of experts.
        segments: Into how many segments these experts are cut.
    """
    tokens, slots = places.shape
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    # One segment more takes what belongs to no row, and is dropped.
    totals = torch.zeros((segments + 1) * tokens, rows.shape[1], dtype=dtype, device="cpu")
    if len(rows):
        order = experts.argsort(dim=1, stable=True)
        places, owners = places.gather(1, order), experts.gather(1, order) // (count // segments)
        owners = torch.where(places >= 0, owners, segments)
        terms = widen(rows[places.clamp(min=0)])
        if weights is not None:
            terms = terms * widen(weights).to(dtype).gather(1, order).unsqueeze(-1)
        into = owners * tokens + torch.arange(tokens, device="cpu").unsqueeze(1)
        for slot in range(slots):
            at = into[:, slot]
            totals.index_copy_(0, at, totals.index_select(0, at) + terms[:, slot])
    return totals.view(segments + 1, tokens, -1)[:segments]


def combine(
    rows: Tensor, weights: Tensor | None, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return [T, n]: each token's rows times their weights, added by ascending expert and rounded once."""
    y, segments = rows.new_empty(len(experts), rows.shape[1]), segments_of(count)
    for start in range(0, len(experts), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        scales = None if weights is None else weights[part]
        totals = sum_experts(rows, scales, experts[part], places[part], count, segments)
        y[part] = round_once(merge(list(totals.unbind(0)), torch.add), rows.dtype)
    return y


def combine_backward(
    grad: Tensor,
    rows: Tensor,
    weights: Tensor,
    places: Tensor,
    tokens: Tensor,
    product: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [R, n] and of weights [T, k]; that of a weight is a sum over features."""
    upstream = widen(grad)[tokens]
    held = places.reshape(-1) >= 0
    at = places.reshape(-1)[held]
    scales = torch.empty(len(rows), dtype=upstream.dtype, device="cpu")
    scales[at] = widen(weights).to(upstream.dtype).reshape(-1)[held]
    into_rows = round_once(upstream * scales.unsqueeze(1), rows.dtype)
    sums = sum_features(upstream * widen(rows), product)
    into_weights = torch.zeros(places.numel(), dtype=upstream.dtype, device="cpu")
    into_weights[held] = sums[at]
    return into_rows, round_once(into_weights, weights.dtype).view(places.shape)


def sum_features(terms: Tensor, product: Callable[..., Tensor] | None = None) -> Tensor:
    """Return [R], the sums of terms [R, n] as a product with ones, by the executor that serves their dtype."""
    ones = torch.ones(1, terms.shape[1], dtype=terms.dtype, device="cpu")
    if product is None:
        native = dispatch.is_native(terms.dtype)
        product = torch.ops.isobit.linear if native else portable_linear
    return product(terms, ones, None, None, None, 0).squeeze(1)


def dispatch_rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the row of each token that was dispatched, [R, n]."""
    return x.reshape(-1, x.shape[-1]).index_select(0, tokens)


# Compare an executor's routes and sums with the portable ones, bit for bit.

TOKENS, EXPERTS, CHOSEN, WIDTH = (
    7,
    12,
    3,
    19,
)  # 12 experts are 4 segments; a row is a vector and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXPERTS)
    logits = wide_values((TOKENS, EXPERTS), dtype, generator)
    logits[1] = logits[1, :1]  # all are equal
    spans = torch.tensor([[0, 3], [4, 3]], device="cpu")  # the fourth row is padding
    bias = wide_values((EXPERTS,), torch.float32, generator)
    for score, chosen_by, groups in (
        ("softmax", None, 1),
        ("sigmoid", bias, 4),
        ("softmax_of_chosen", None, 1),
        ("sigmoid_of_chosen", None, 1),
    ):
        how = (CHOSEN, score, True, 2.5, groups, 2 if groups > 1 else 1)
        found = call("route", logits, chosen_by, spans, *how)
        known = route(logits, chosen_by, spans, *how, portable_softmax)
        if not all(bits.equal(a, b) for a, b in zip(found, known, strict=True)):
            return f"route by {score}"
    how = (CHOSEN, "sigmoid", True, 1.0, 1, 1)
    weights, experts = route(logits, None, spans, *how)
    order = experts.reshape(-1).argsort(stable=True)[: (TOKENS - 1) * CHOSEN]
    places = torch.full_like(experts, -1).reshape(-1)
    places[order] = torch.arange(len(order), device="cpu")
    places, tokens = places.view(experts.shape), order // CHOSEN
    rows = wide_values((len(order), WIDTH), dtype, generator)
    made = call("combine", rows, weights, experts, places, tokens, EXPERTS)
    if not bits.equal(made, combine(rows, weights, experts, places, EXPERTS)):
        return "combine"
    made = call("dispatch_rows_backward", rows, experts, places, EXPERTS)
    if not bits.equal(made, combine(rows, None, experts, places, EXPERTS)):
        return "dispatch_rows' gradient"
    return None


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, or None: of a GPU's own gradients too, which the CPU's executors share."""
    found = difference(dtype, call)
    if found is not None:
        return found
    generator = torch.Generator().manual_seed(CHOSEN)
    logits = wide_values((TOKENS, EXPERTS), dtype, generator)
    spans = torch.tensor([[0, 3], [4, 3]], device="cpu")
    grad = wide_values((TOKENS, CHOSEN), torch.float32, generator)
    for score in ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"):
        how = (score, True, 2.5)
        experts = route(logits, None, spans, CHOSEN, *how, 1, 1, portable_softmax)[1]
        wanted = route_backward(grad, logits, experts, *how, PORTABLE)
        if not bits.equal(call("route_backward", grad, logits, experts, *how), wanted):
            return f"the gradient of route by {score}"
    tokens = torch.tensor([0, 2, 1, 2], device="cpu")
    places = torch.tensor([[0, -1], [2, -1], [1, 3]], device="cpu")
    rows = wide_values((len(tokens), WIDTH), dtype, generator)
    upstream, weights = (
        wide_values((3, n), kind, generator) for n, kind in ((WIDTH, dtype), (2, torch.float32))
    )
    sums = combine_backward(upstream, rows, weights, places, tokens, portable_linear)
    made = call("combine_backward", upstream, rows, weights, places, tokens)
    if not all(bits.equal(a, b) for a, b in zip(made, sums, strict=True)):
        return "combine's gradient"
    return None
