"""Mixture of experts: routers, experts, and blocks that add a shared expert.

A router returns the logits, the weights and the experts of each token, and the experts take the latter two, as
transformers' modules do: so their hooks run. Padding goes to no expert, which transformers writes as the expert behind
the last one. A block that gives its input to more than two modules forks it, so that one place adds their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.head import Logits
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.load_balancing import ROUTER_LOGITS
from isobit.integrations.transformers.parts.layers import kind_of_activation
from isobit.integrations.transformers.residual import fork, settle
from isobit.ops.experts.grouped import grouped_linear
from isobit.ops.experts.merged import low_rank_experts, merged_grouped_linear
from isobit.ops.experts.op import route
from isobit.ops.experts.routes import Routes
from isobit.ops.experts.rows import combine, dispatch_rows
from isobit.ops.linear.merged import Adapter
from isobit.ops.linear.op import linear
from isobit.ops.select_rows.op import select_rows
from isobit.ops.share import check_share
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from isobit.parallel.tensor.expert_exchange import mix_experts
from isobit.parallel.tensor.shard import tp_group_of


@dataclass(frozen=True)
class Router:
    """How a router scores experts. An attribute of the module is named, and read at each call."""

    score: str  # see isobit.route
    normalize: str | bool = True  # an attribute, or the same for all
    rounded: bool = True  # weights are rounded to the dtype of the model
    wide: bool = False  # logits are not rounded
    grouped: bool = False  # a bias for the choice, groups and a factor


def forward_router(how: Router, module: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Return the logits, weights and experts of each token."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    samples = current_layout().row_samples()
    if how.wide:
        check_share(samples, module.weight)
        logits: Tensor = Logits.apply(x, module.weight, samples)  # type: ignore[no-untyped-call]
    else:
        logits = linear(x, module.weight, getattr(module, "bias", None), samples=samples)
    more: dict[str, Any] = {}
    if how.grouped:
        more = {
            "bias": module.e_score_correction_bias,
            "groups": module.num_group,
            "top_groups": module.topk_group,
            "scale": module.routed_scaling_factor,
        }
    normalize = getattr(module, how.normalize) if isinstance(how.normalize, str) else how.normalize
    found = route(
        logits, module.top_k, score=how.score, normalize=normalize, samples=samples, **more
    )
    weights = found.weights.to(logits.dtype) if how.rounded else found.weights
    if (kept := current_layout().pending.get(ROUTER_LOGITS)) is not None:
        kept.append(logits)
    return logits, weights, found.experts


@dataclass(frozen=True)
class Adapters:
    """The adapters of each weight of experts, in the order of addition, and whether they are merged into it."""

    of: Mapping[str, tuple[Adapter, ...]] = field(default_factory=dict)
    merged: bool = False


NONE = Adapters()


def project(
    module: Any,
    name: str,
    rows: Tensor,
    routes: Routes,
    adapters: Adapters,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Compute the linear layer of each expert by the weight `name`, with its adapters.

    See [Note: adapters next to a weight] and [Note: merged experts].
    """
    weight, own = getattr(module, name), adapters.of.get(name, ())
    if own and adapters.merged:
        return merged_grouped_linear(rows, weight, bias, own, routes=routes, transposed=transposed)
    rows, *inputs = fork(rows, 1 + len(own))
    base = grouped_linear(rows, weight, bias, routes=routes, transposed=transposed)
    total = base
    for adapter, given in zip(own, inputs, strict=True):
        low_rank = low_rank_experts(given.to(adapter.a.dtype), adapter, routes=routes)
        total = total + low_rank * adapter.scale
    return total.to(base.dtype)


def forward_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    adapters: Adapters = NONE,
) -> Tensor:
    """Compute down(act(gate) · up) of each expert, and add what a token's experts return."""

    def compute(rows: Tensor, routes: Routes) -> Tensor:
        gate, up = project(module, "gate_up_proj", rows, routes, adapters).chunk(2, dim=-1)
        is_silu = kind_of_activation(module.act_fn) == "silu"
        inner = swiglu(gate, up) if is_silu else module.act_fn(gate) * up
        return project(module, "down_proj", inner, routes, adapters)

    routes = routes_of(module, top_k_index, top_k_weights)
    return mix_experts(hidden_states, routes, compute, tp_group_of(module))


def forward_clamped_experts(
    module: Any,
    hidden_states: Tensor,
    router_indices: Tensor,
    routing_weights: Tensor,
    *,
    adapters: Adapters = NONE,
) -> Tensor:
    """Compute experts with biases, whose gate and up are interleaved and clamped: (up + 1) · gate · sigmoid(α gate)."""

    def compute(rows: Tensor, routes: Routes) -> Tensor:
        both = project(
            module,
            "gate_up_proj",
            rows,
            routes,
            adapters,
            bias=module.gate_up_proj_bias,
            transposed=True,
        )
        gate = both[..., ::2].clamp(max=module.limit)
        up = both[..., 1::2].clamp(min=-module.limit, max=module.limit)
        inner = (up + 1) * (silu(gate * module.alpha) * (1 / module.alpha))
        return project(
            module,
            "down_proj",
            inner,
            routes,
            adapters,
            bias=module.down_proj_bias,
            transposed=True,
        )

    routes = routes_of(module, router_indices, routing_weights)
    return mix_experts(hidden_states, routes, compute, tp_group_of(module))


def forward_scaled_experts(
    module: Any, hidden_states: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Compute down(act(gate) · up) of each expert on rows that were multiplied by their weights, and add the results.

    A row is a route by itself, so that the gradient of its weight is a sum over features, as any expert's is.
    """
    routes = routes_of(module, experts, weights)
    places = routes.places.reshape(-1)
    slots = places.argsort()[len(places) - len(routes.tokens) :]  # the slot of each row
    own = select_rows(weights.reshape(-1, 1), slots)
    alone = Routes.planned(torch.zeros_like(slots).unsqueeze(1), own, 1, routes.samples)
    rows = combine(dispatch_rows(hidden_states, routes), alone)
    both = grouped_linear(rows, module.gate_up_proj, routes=routes, transposed=True)
    gate, up = both.chunk(2, dim=-1)
    is_silu = kind_of_activation(module.act_fn) == "silu"
    inner = swiglu(gate, up) if is_silu else up * module.act_fn(gate)
    made = grouped_linear(inner, module.down_proj, routes=routes, transposed=True)
    return combine(made, routes._replace(weights=torch.ones_like(weights)))


def routes_of(module: Any, experts: Tensor, weights: Tensor) -> Routes:
    """Return the routes that a router chose."""
    return Routes.planned(experts, weights, module.num_experts, current_layout().row_samples())


def forward_shared(module: Any, hidden_states: Tensor) -> Tensor:
    """Add a shared expert to those that were chosen."""
    routed, chosen, shared = fork(hidden_states, 3)
    _, weights, experts = module.gate(routed)
    y = module.experts(chosen.reshape(-1, chosen.shape[-1]), experts, weights)
    return settle(y.view(hidden_states.shape) + module.shared_experts(shared), forward=True)


def forward_shared_with_logits(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Add a shared expert to those that were chosen, and return the router's logits too."""
    routed, chosen, shared = fork(hidden_states, 3)
    logits, weights, experts = module.router(routed)
    y = module.experts(chosen.reshape(-1, chosen.shape[-1]), experts, weights)
    made = module.shared_expert(shared)
    return settle(y.view(made.shape) + made, forward=True), logits


def forward_gated_shared(module: Any, hidden_states: Tensor) -> Tensor:
    """Add a shared expert, times the sigmoid of its gate, to those that were chosen.

    The gate is a route to one expert: the gradient of a token's weight is a sum over features, as any expert's is.
    """
    routed, chosen, shared, gated = fork(hidden_states, 4)
    _, weights, experts = module.gate(routed)
    y = module.experts(chosen.reshape(-1, chosen.shape[-1]), experts, weights)
    logits = module.shared_expert_gate(gated)
    samples = current_layout().row_samples()
    gate = route(logits, 1, score="sigmoid", normalize=False, samples=samples)
    gate = gate._replace(weights=gate.weights.to(logits.dtype))
    made = combine(dispatch_rows(module.shared_expert(shared), gate), gate)
    return settle(y + made, forward=True).view(hidden_states.shape)


def forward_jittered(module: Any, hidden_states: Tensor) -> Tensor:
    """Run a block's own code, where the noise that it can add to its input is off."""
    if module.training and module.jitter_noise:
        raise UnsupportedError(
            expected="a router without noise: which elements it changes would depend on the batch",
            received=f"router_jitter_noise of {module.jitter_noise} in training",
            remedy="set router_jitter_noise in the model's config to 0, or call model.eval()",
        )
    return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
