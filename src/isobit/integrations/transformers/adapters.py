"""Models with PEFT adapters: the model inside of PEFT's wrapper, and a plain copy with merged weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.parts.adapter_kinds import (
    check_wrapper,
    is_of_parameter,
    is_peft,
    parameter_wrappers,
)
from isobit.integrations.transformers.parts.linear import is_lora
from isobit.integrations.transformers.parts.lora import (
    active_module,
    adapters_of_experts,
    live_adapters,
)
from isobit.ops.experts.merged import merge_experts
from isobit.ops.linear.merged import merge_bias, merge_weight


def inner_model(model: Any) -> Any:
    """Return the transformers model inside of a PEFT model; any other object is returned as it is.

    Raises:
        UnsupportedError: If the PEFT model adds tokens or keys to the input instead of adapters to layers.
    """
    if not isinstance(model, nn.Module) or not is_peft(model):
        return model
    outer: Any = model
    config: Any = getattr(outer, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise UnsupportedError(
            expected="a PEFT model of LoRA",
            received=f"prompt learning: {kind}, of {type(model).__module__}.{type(model).__name__}",
            remedy="train LoRA, peft.LoraConfig(…); or pass the embeddings of the prompt as inputs_embeds to the "
            "enabled model inside, peft_model.get_base_model()",
        )
    inner = outer.get_base_model() if hasattr(outer, "get_base_model") else outer.model
    return inner if isinstance(inner, nn.Module) else model


@torch.no_grad()
def merged_copy(model: nn.Module) -> Any:
    """Return a plain transformers model whose weights are the merged ones; the model itself is not written.

    The merged weights are those that `isobit.enable(model, adapters="merged")` computes with, so that the copy, and a
    server that is given its weights, has the same bits. Layers without adapters share their memory with the model.

    Args:
        model: A PEFT model of LoRA, or a transformers model with `add_adapter`, enabled or not. The adapters that are
            active are merged.

    Returns:
        A model of the same class without adapters: stock, in eval mode, and frozen.

    Raises:
        ArgumentError: If PEFT has merged adapters into the base, or an adapter has a bias that has no place.
        UnsupportedError: If an adapter is not LoRA over torch.nn.Linear.

    Example:
        >>> import peft
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        >>> merged = isobit.integrations.transformers.merged_copy(model)
        >>> type(merged).__name__, len(list(merged.parameters())) < len(list(model.parameters()))
        ('LlamaForCausalLM', True)
    """
    inner = inner_model(model)
    weights = merged_weights(inner)
    config = copy.deepcopy(inner.config)
    chosen = getattr(config, "_attn_implementation", None)
    if chosen == "isobit":
        config._attn_implementation = "sdpa" if inner._supports_sdpa else "eager"
    ends = [weights.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight")]
    if getattr(config, "tie_word_embeddings", False) and ends[0] is not ends[1]:
        config.tie_word_embeddings = False  # one of the two was trained by itself
    with torch.device("meta"):
        made = type(inner)(config)
    made.load_state_dict(weights, strict=True, assign=True)
    for name, buffer in inner.named_buffers():
        owner, _, key = name.rpartition(".")
        if key in made.get_submodule(owner)._buffers:
            made.get_submodule(owner)._buffers[key] = buffer
    made.generation_config = copy.deepcopy(getattr(inner, "generation_config", None))
    if getattr(config, "tie_word_embeddings", False):
        made.tie_weights()
    return made.requires_grad_(False).eval()


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a plain model: adapters merged, and the active copy of each module to save."""
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}  # by id of a parameter: tied ones stay one tensor

    def collect(name: str, module: nn.Module) -> None:
        if is_peft(module):
            check_wrapper(name, module)
        plain: Any = active_module(module)
        if plain is not module:
            collect(name, plain)
            return
        if is_lora(module):
            found.update({f"{name}.{key}": value for key, value in merged_layer(name, module)})
            return
        if is_of_parameter(module):
            wrappers: list[Any] = parameter_wrappers(module)
            collect(name, wrappers[-1].base_layer)
            for key, value in merged_experts(name, wrappers):
                found[f"{name}.{key}"] = value
            return
        prefix = f"{name}." if name else ""
        kept = module._non_persistent_buffers_set
        for key, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and key not in kept:
                found[prefix + key] = known.setdefault(id(value), value.detach())
        for key, child in module._modules.items():
            if child is not None:
                collect(prefix + key, child)

    collect("", model)
    return found


def check_unmerged(name: str, wrapper: Any) -> None:
    """Raise if PEFT has merged adapters into the base."""
    if wrapper.merged:
        raise ArgumentError(
            expected="adapters that PEFT has not merged into the base",
            received=f"{name} with {wrapper.merged_adapters} merged",
            remedy="call model.unmerge_adapter(), or load the base again: merging by PEFT writes it",
        )


def merged_experts(name: str, wrappers: list[Any]) -> list[tuple[str, Tensor]]:
    """Return the weights of experts that have active adapters, merged."""
    for wrapper in wrappers:
        check_unmerged(name, wrapper)
    base = wrappers[-1].base_layer
    adapters = adapters_of_experts(wrappers)
    transposed = {each.parameter_name: not each._did_swap_in_out_features for each in wrappers}
    return [
        (key, merge_experts(getattr(base, key).detach(), own, transposed=transposed[key]))
        for key, own in adapters.items()
        if own
    ]


def merged_layer(name: str, wrapper: Any) -> list[tuple[str, Tensor]]:
    """Return weight and bias of a layer with its active adapters merged."""
    check_unmerged(name, wrapper)
    adapters = tuple(one.weights for one in live_adapters(wrapper, name))
    base = wrapper.base_layer
    bias = merge_bias(base.bias, adapters)
    pairs = [("weight", merge_weight(base.weight, adapters).detach())]
    return pairs if bias is None else [*pairs, ("bias", bias.detach())]
