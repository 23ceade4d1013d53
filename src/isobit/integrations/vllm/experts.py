"""A mixture of experts in vLLM: its router and experts, computed as the trainer computes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from isobit.integrations.transformers.residual import plain_add
from isobit.integrations.vllm.refusals import refuse
from isobit.integrations.vllm.weights import PLAIN, PackedLinear
from isobit.ops.experts.grouped import grouped_linear
from isobit.ops.experts.op import route
from isobit.ops.experts.rows import combine, dispatch_rows
from isobit.ops.swiglu.op import swiglu

KINDS = (MoERunner, RoutedExperts, GateLinear, SharedExperts, Qwen2MoeMLP)
# Types of models whose router the trainer computes by softmax, with weights that are rounded to the model's dtype.
MODELS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


class OrderedExpertsMethod(UnquantizedFusedMoEMethod):
    """vLLM's method of experts, which keeps the weights as they were loaded and computes nothing itself."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights: vLLM would pack them for its own product and drop the originals."""

    def apply(self, *given: Any, **named: Any) -> Tensor:
        """Raise: the mixture's own forward computes experts."""
        refuse("experts that the mixture computes", "a call of their method", "call the model")
        raise AssertionError


class OrderedGateMethod(UnquantizedLinearMethod):
    """vLLM's method of a router's layer, which keeps the weight as it was loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the weight."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Raise: the mixture's own forward computes the router."""
        refuse("a router that the mixture computes", "a call of its layer", "call the model")
        raise AssertionError


def prepare_experts(module: Any, config: Any, packed: PackedLinear) -> str:
    """Replace what a module of a mixture computes; return why it is not computed, or nothing."""
    if type(module) is GateLinear:
        if type(module.quant_method) is not UnquantizedLinearMethod or module.bias is not None:
            return "with a bias or quantized weights"
        module.quant_method = OrderedGateMethod()
    elif type(module) is RoutedExperts:
        if type(module.quant_method) is not UnquantizedFusedMoEMethod:
            return f"quantized by {type(module.quant_method).__name__}"
        # An instance of its own class would be made again for another backend: only what it does is replaced.
        module.quant_method.__class__ = OrderedExpertsMethod
    elif type(module) is Qwen2MoeMLP:
        module.forward = partial(forward_shared, module)
    elif type(module) is MoERunner:
        why = describe_option(module, config)
        if why:
            return why
        module.forward = partial(forward_mixture, module, packed)
    return ""


def describe_option(module: Any, config: Any) -> str:
    """Return what a mixture has that its forward does not compute, or nothing."""
    experts, settings = module.routed_experts, module.moe_config
    if config.model_type not in MODELS:
        return f"of a {config.model_type}, whose router is not known here"
    wrong = {
        "shared experts without a gate": shared_of(module) is not None
        and getattr(shared_of(module), "expert_gate", None) is None,
        "a transform": bool(module.routed_input_transform or module.routed_output_transform),
        "no gate": type(module.gate) is not GateLinear,
        "a scale of its outputs": module.routed_scaling_factor != 1.0,
        "a scale of its weights": experts.routed_scaling_factor != 1.0,
        "groups of experts": experts.use_grouped_topk,
        "a routing function": experts.custom_routing_function is not None,
        "another score than softmax": experts.scoring_func != "softmax",
        "a bias of the scores": experts.e_score_correction_bias is not None,
        "weights that scale inputs": experts.apply_router_weight_on_input,
        "a limit of its activation": experts.swiglu_limit is not None,
        "another activation than silu": experts.activation is not MoEActivation.SILU,
        "biases": settings.has_bias,
        "experts on other ranks": experts.expert_map is not None,
        "padded weights": tuple(experts.w13_weight.shape)
        != (config.num_experts, 2 * config.moe_intermediate_size, config.hidden_size),
    }
    found = [what for what, is_there in wrong.items() if is_there]
    return f"with {', '.join(found)}" if found else ""


def shared_of(module: Any) -> Any:
    """Return the shared expert of a mixture, or None."""
    return None if module.shared_experts is None else module.shared_experts._layer


def forward_shared(module: Any, x: Tensor) -> Tensor:
    """Compute a gated MLP; that of a shared expert is multiplied by the sigmoid of its gate, a route to one expert."""
    gate_up, _ = module.gate_up_proj(x)
    made, _ = module.down_proj(module.act_fn(gate_up))
    if module.expert_gate is None:
        return made  # type: ignore[no-any-return]
    logits, _ = module.expert_gate(x)
    with PLAIN():
        routes = route(logits, 1, score="sigmoid", normalize=False)
        routes = routes._replace(weights=routes.weights.to(logits.dtype))
        return combine(dispatch_rows(made, routes), routes)


def forward_mixture(
    module: Any,
    packed: PackedLinear,
    hidden_states: Tensor,
    router_logits: Tensor,
    input_ids: Tensor | None = None,
    shared_experts_input: Tensor | None = None,
) -> Tensor:
    """Choose experts for each token, compute them, and add their outputs by ascending id."""
    experts = module.routed_experts
    logits = packed.compute(hidden_states, module.gate.weight, None)
    with PLAIN():
        routes = route(logits, experts.top_k, normalize=experts.renormalize)
        routes = routes._replace(weights=routes.weights.to(logits.dtype))
        rows = dispatch_rows(hidden_states, routes)
        gate, up = grouped_linear(rows, experts.w13_weight.data, routes=routes).chunk(2, dim=-1)
        made = grouped_linear(swiglu(gate, up), experts.w2_weight.data, routes=routes)
        y = combine(made, routes)
    shared = shared_of(module)
    return y if shared is None else plain_add(y, shared(hidden_states))
