"""Claims of mixture-of-experts-v1: routes, outputs and gradients in every layout; and wrong mixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import refused_calls
from isobit.library.claims import (
    forward_and_gradients,
    in_every_storage_and_thread_count,
    is_real,
    must_raise,
    placements,
    put,
    put_among_random,
    rows_of,
    with_backward,
)
from isobit.ops.experts.grouped import grouped_linear
from isobit.ops.experts.op import route
from isobit.ops.experts.portable import segments_of
from isobit.ops.experts.routes import Routes
from isobit.ops.experts.rows import combine, dispatch_rows
from isobit.ops.linear.op import linear
from isobit.order.samples import Samples
from isobit.order.tree import merge

EXPERTS, CHOSEN, OUTPUTS = 8, 3, 6
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
# One sample is empty, and one is longer than the rows that the sums of a token are computed for at once.
LENGTHS = (5, 0, 290, 1, 12, 3, 7, 2)


@dataclass(frozen=True)
class Mixture:
    """The operators of a mixture of experts."""

    route: Callable[..., Routes] = route
    grouped: Callable[..., Tensor] = grouped_linear
    combine: Callable[[Tensor, Routes], Tensor] = combine

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows of x, each as the weighted sum of copies of itself."""
        routes = self.route(torch.ones(len(x), EXPERTS, dtype=x.dtype), CHOSEN)
        return self.combine(dispatch_rows(x, routes), routes)

    def layer(
        self, x: Tensor, router: Tensor, weight: Tensor, score: str, samples: Samples
    ) -> tuple[Tensor, Routes]:
        """Return the output of a layer with one product per expert, and the routes."""
        logits = linear(x, router, samples=samples)
        routes = self.route(logits, CHOSEN, score=score, samples=samples)
        rows = self.grouped(dispatch_rows(x, routes), weight, routes=routes)
        return self.combine(rows, routes), routes


def layouts(subject: Mixture, case: Case, tally: Tally) -> None:
    """Routes, outputs and gradients are those of the packed batch in every placement, storage and thread count."""
    described = Samples.packed(LENGTHS)
    width = case.sizes["n"]
    rows = case.draw((described.rows, width), 80, "wide")
    router = case.draw((EXPERTS, width), 81)
    weight = case.draw((EXPERTS, OUTPUTS, width), 82)
    grad = case.draw((described.rows, OUTPUTS), 83, "wide")
    tally.count(described.rows)
    for score in SCORES:

        def compute(
            rows: Tensor, grad: Tensor, lying: Samples, score: str = score
        ) -> tuple[Tensor, ...]:
            found: list[Routes] = []

            def run(x: Tensor, router: Tensor, weight: Tensor) -> Tensor:
                y, routes = subject.layer(x, router, weight, score, lying)
                found.append(routes)
                return y

            y, (dx, *others) = forward_and_gradients(run, [rows, router, weight], grad)
            at = rows_of(lying)
            padding = found[0].experts[~is_real(lying)]
            tally.same(padding, torch.full_like(padding, EXPERTS), "the experts of padding")
            return found[0].experts[at], y.detach()[at], dx[at], *others

        expected = compute(rows, grad, described)
        names = ("experts", "outputs", "gradient of x", "of the router", "of experts")

        def compare(
            rows: Tensor,
            grad: Tensor,
            lying: Samples,
            where: str,
            expected: tuple[Tensor, ...] = expected,
            compute: Any = compute,
            names: tuple[str, ...] = names,
        ) -> None:
            for name, a, b in zip(names, compute(rows, grad, lying), expected, strict=True):
                tally.same(a, b, f"{name}, {where}")

        for where, lying in placements(LENGTHS, 300):
            upstream = put(grad.new_zeros(lying.rows, OUTPUTS), grad, lying)
            compare(put_among_random(case, rows, lying, 84), upstream, lying, where)
        in_every_storage_and_thread_count(compare, [rows, grad], described)


def ties(subject: Mixture, case: Case, tally: Tally) -> None:
    """Among equal scores the lowest ids are chosen, in ascending order; also where all are equal."""
    logits = torch.randint(0, 3, (64, EXPERTS), generator=torch.Generator().manual_seed(9))
    logits[0] = 1
    tally.count(64)
    order = torch.arange(EXPERTS)
    expected = (logits * -EXPERTS + order).argsort(1)[:, :CHOSEN]
    for score in SCORES:
        found = subject.route(logits.to(case.dtype), CHOSEN, score=score)
        tally.same(found.experts, expected, f"experts by {score}")


def order(subject: Mixture, case: Case, tally: Tally) -> None:
    """A token's output is the sum over all experts by id: segments from left to right from +0, then the tree."""
    width = case.sizes["n"]
    for count in (8, 12, 64):
        drawn = torch.Generator().manual_seed(count)
        experts = torch.stack([torch.randperm(count, generator=drawn)[:6] for _ in range(40)])
        weights = torch.randn(40, 6, generator=drawn)
        routes = Routes.chosen(experts, weights, total=count)
        rows = case.draw((240, width), count, "wide")
        tally.count(40)
        terms = rows.float()[routes.places] * weights.unsqueeze(-1)
        every = torch.zeros(40, count, width)
        every = every.scatter(1, experts.unsqueeze(-1).expand(-1, -1, width), terms)
        sums = torch.zeros(segments_of(count), 40, width)
        for expert in range(count):
            sums[expert * len(sums) // count] += every[:, expert]
        total = merge(list(sums.unbind(0)), torch.add).to(rows.dtype)
        tally.same(subject.combine(rows, routes), total, f"{count} experts")


def weight_gradients(subject: Mixture, case: Case, tally: Tally) -> None:
    """An expert's weight gradient is that of isobit.linear on its rows; that of an expert without rows is +0."""
    described, width = Samples.packed(LENGTHS), case.sizes["n"]
    drawn = torch.Generator().manual_seed(3)
    experts = torch.stack(
        [torch.randperm(EXPERTS - 1, generator=drawn)[:CHOSEN] for _ in range(described.rows)]
    )  # the last expert has no tokens
    weights = torch.ones(experts.shape)
    routes = Routes.chosen(experts, weights, total=EXPERTS, samples=described)
    rows = case.draw((len(routes.tokens), width), 85, "wide")
    weight = case.draw((EXPERTS, OUTPUTS, width), 86)
    grad = case.draw((len(rows), OUTPUTS), 87, "wide")
    tally.count(len(rows))
    _, (dx, dw) = forward_and_gradients(
        lambda x, w: subject.grouped(x, w, routes=routes), [rows, weight], grad
    )
    for expert, (first, stop) in enumerate(routes.bounds):
        tokens = routes.tokens[first:stop]
        lengths = [int(((tokens >= a) & (tokens < a + n)).sum()) for a, n in described.spans]
        if first == stop:
            zeros = torch.zeros_like(dw[expert])
            tally.same(dw[expert], zeros, f"the weight of expert {expert}, which has no tokens")
            continue
        wanted = forward_and_gradients(
            partial(linear, samples=Samples.packed(lengths)),
            [rows[first:stop], weight[expert]],
            grad[first:stop],
        )[1]
        tally.same(dx[first:stop], wanted[0], f"the rows of expert {expert}")
        tally.same(dw[expert], wanted[1], f"the weight of expert {expert}")


def refuses(subject: Mixture, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    tally.count(1)
    for what, given, named in refused_calls.route():
        must_raise(partial(subject.route, *given, **named), what, tally)


# ---- planted --------------------------------------------------------------------------------------------------


def by_the_highest_id(logits: Tensor, k: int, **options: Any) -> Routes:
    """Break ties by the highest id: choose among the experts in reverse."""
    found = route(logits.flip(-1), k, **options)
    count = logits.shape[-1]
    ids = torch.where(found.experts < count, count - 1 - found.experts, count)
    return Routes.planned(ids, found.weights, count, found.samples)


def padding_too(logits: Tensor, k: int, *, samples: Any = None, **options: Any) -> Routes:
    """Route padded rows as if they were tokens."""
    found = route(logits, k, **options)
    return found if samples is None else found._replace(samples=samples)


def depends_on_the_batch(logits: Tensor, k: int, **options: Any) -> Routes:
    """Choose by logits minus the batch's mean, as capacity factors and balancing by batch do."""
    return route(logits - logits.mean(0), k, **options)


def stock_route(logits: Tensor, k: int, *, score: str = "softmax", samples: Any = None) -> Routes:
    """Choose as transformers' routers do, with torch's operators."""
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(score, logits)
    chosen, ids = scores.topk(k, -1)
    weights = chosen.softmax(-1) if "chosen" in score else chosen / chosen.sum(-1, keepdim=True)
    known = samples or Samples.packed([len(logits)])
    return Routes.planned(ids, weights.float(), logits.shape[-1], known)


def anything_goes(logits: Tensor, k: int, **options: Any) -> Routes:
    """Take what fits of wrong arguments."""
    count = logits.shape[-1]
    ids = torch.arange(min(max(k, 1), count)).expand(logits.shape[0], -1)
    return Routes.planned(ids, torch.ones(ids.shape), count, Samples.packed([len(logits)]))


def by_slot(rows: Tensor, routes: Routes) -> Tensor:
    """Add a token's rows in the order of its slots, the largest weight first."""
    total = torch.zeros(len(routes.experts), rows.shape[1])
    for slot in range(routes.experts.shape[1]):
        held = routes.places[:, slot] >= 0
        terms = rows[routes.places[held, slot]].float() * routes.weights[held, slot, None].float()
        total = total.index_put((held.nonzero().flatten(),), total[held] + terms)
    return total.to(rows.dtype)


def by_one_chain(rows: Tensor, routes: Routes) -> Tensor:
    """Add by ascending expert without segments: no rank could own a part of the sum."""
    ids, at = routes.experts.sort(1)
    places, weights = routes.places.gather(1, at), routes.weights.gather(1, at)
    return by_slot(rows, routes._replace(experts=ids, places=places, weights=weights))


def stock_combine(rows: Tensor, routes: Routes) -> Tensor:
    """Add into the output expert by expert, rounded after each, as transformers does."""
    weights = routes.weights.new_zeros(len(rows))
    held = routes.places >= 0
    weights = weights.index_put((routes.places[held],), routes.weights[held])
    terms = (rows.float() * weights.unsqueeze(1)).to(rows.dtype)
    return rows.new_zeros(len(routes.experts), rows.shape[1]).index_add(0, routes.tokens, terms)


def with_weight_gradient(wrong: Callable[[Tensor, Tensor, Routes], Tensor]) -> Mixture:
    """Return a mixture whose gradient of experts' weights is `wrong(right one, grad, routes)`."""

    def grouped(x: Tensor, weight: Tensor, *, routes: Routes) -> Tensor:
        def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            _, (dx, dw) = forward_and_gradients(
                lambda x, w: grouped_linear(x, w, routes=routes), [x, weight], grad
            )
            return dx, wrong(dw, x, routes)

        return with_backward(lambda x, w: grouped_linear(x, w, routes=routes), backward, x, weight)

    return Mixture(grouped=grouped)


def left_over(dw: Tensor, x: Tensor, routes: Routes) -> Tensor:
    """Leave memory of before in the gradient of an expert without tokens."""
    empty = torch.tensor(routes.rows) == 0
    return torch.where(empty[:, None, None], torch.full_like(dw, 2.0**-20), dw)


def without_samples(x: Tensor, weight: Tensor, *, routes: Routes) -> Tensor:
    """Sum gradients over an expert's rows as if they were of one sample."""
    rows = max(len(routes.experts), 1)
    return grouped_linear(x, weight, routes=routes._replace(samples=Samples.packed([rows])))


def stock_grouped(x: Tensor, weight: Tensor, *, routes: Routes) -> Tensor:
    """Multiply expert by expert, with torch's products."""
    parts = [x[a:b] @ weight[e].T for e, (a, b) in enumerate(routes.bounds)]
    return torch.cat(parts)


ours = Mixture()
stock = Mixture(stock_route, stock_grouped, stock_combine)
highest_id = replace(ours, route=by_the_highest_id)
padded_row_routed = replace(ours, route=padding_too)
balanced_by_batch = replace(ours, route=depends_on_the_batch)
combined_by_slot = replace(ours, combine=by_slot)
combined_by_one_chain = replace(ours, combine=by_one_chain)
expert_without_tokens = with_weight_gradient(left_over)
one_sample = replace(ours, grouped=without_samples)
unchecked = replace(ours, route=anything_goes)
