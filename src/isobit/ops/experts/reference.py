"""The definitions of isobit's operators for mixtures of experts in fp64, and arguments to try them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw
from isobit.ops.experts.routes import Routes
from isobit.order.samples import Samples


def route(
    logits: Tensor, k: int, *, normalize: bool = True, samples: Any = None
) -> tuple[Tensor, ...]:
    """Return the k largest probabilities of each row, divided by their sum."""
    chosen = logits.double().softmax(-1).topk(k, -1).values
    return (chosen / chosen.sum(-1, keepdim=True) if normalize else chosen,)


def dispatch_rows(x: Tensor, routes: Routes) -> Tensor:
    """Return the row of each route's token."""
    return x.double()[routes.tokens]


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """Return Σ weight · row of each token."""
    weights = torch.zeros(len(rows), dtype=torch.float64)
    held = routes.places >= 0
    weights[routes.places[held]] = routes.weights.detach().double()[held]
    terms = rows.double() * weights.unsqueeze(1)
    total = torch.zeros(len(routes.experts), rows.shape[1], dtype=torch.float64)
    return total.index_add(0, routes.tokens, terms)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, routes: Routes
) -> Tensor:
    """Return x @ weight[e].T + bias[e] for the rows of each expert."""
    made, at = [], 0
    for expert, rows in enumerate(routes.rows):
        y = x[at : at + rows].double() @ weight[expert].double().T
        made.append(y if bias is None else y + bias[expert].double())
        at += rows
    return torch.cat(made)


def some_routes(tokens: int) -> Routes:
    """Return routes of tokens to two of four experts, of which one has no tokens; three rows are of one expert."""
    ids = torch.tensor([[3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0]], device=torch.device("cpu"))
    weights = draw(6, 2, dtype=torch.float32, seed=3)
    lengths = [1, tokens - 1]
    return Routes.chosen(ids[:tokens], weights[:tokens], total=4, samples=Samples.packed(lengths))


def example_route(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"logits": x, "k": 4, "samples": Samples.packed([2, 4])}


def example_dispatch_rows(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x, "routes": some_routes(6)}


def example_combine(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"rows": x, "routes": some_routes(3)}


def example_grouped_linear(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    weight, bias = draw(4, 9, 48, dtype=x.dtype, seed=1), draw(4, 9, dtype=x.dtype, seed=2)
    return {"x": x, "weight": weight, "bias": bias, "routes": some_routes(3)}
