"""Recognise the parts of a model: by registration, by class of torch, by the digest of a source, by probing.

See [Note: parts] in this package.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts import (
    attention,
    composites,
    delta_net,
    experts,
    layers,
    linear,
    lora,
    rotary,
)
from isobit.integrations.transformers.parts.adapter_kinds import (
    UNLOAD,
    is_of_parameter,
    parameter_wrappers,
)
from isobit.integrations.transformers.parts.digests import (
    COMPOSITES,
    DELTA_NETS,
    ELEMENTWISE,
    EMBEDDINGS,
    EXPERTS,
    GATED_MLPS,
    GATED_NORMS,
    LATENT_ATTENTIONS,
    LORA,
    MIXTURES,
    NORMS,
    ROTARY_EMBEDDINGS,
    ROUTERS,
    TEMPERED_ATTENTIONS,
)
from isobit.integrations.transformers.parts.heads import BACKBONE, HEAD, PLAIN, Head, find_head
from isobit.integrations.transformers.parts.layers import NormFormula
from isobit.integrations.transformers.parts.part import Forward, Part, plain_type
from isobit.integrations.transformers.parts.plumbing import find_computation
from isobit.integrations.transformers.parts.probing import probe_norm
from isobit.integrations.transformers.parts.registry import find_registered
from isobit.integrations.transformers.parts.source import (
    digest_of_class,
    function_of,
    nodes_of,
    siblings_in,
)
from isobit.integrations.transformers.refusals import (
    AGAIN,
    ELSEWHERE,
    check_wrapped,
    refuse,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Identity)
# Experts whose weights can have adapters, and whether these weights have their inputs first.
ADAPTED: dict[Any, bool] = {
    experts.forward_experts: False,
    experts.forward_clamped_experts: True,
}
KNOWN = (
    "linear, embedding, RMSNorm, LayerNorm, rotary embedding, silu, gelu, gated MLP, router, experts, attention, "
    "linear attention by the gated delta rule, head"
)


@dataclass
class Plan:
    """The parts of one model."""

    model: nn.Module
    backbone: nn.Module
    head: Head | None
    names: dict[nn.Module, str] = field(default_factory=dict)
    parts: dict[nn.Module, Part] = field(default_factory=dict)
    inside: set[nn.Module] = field(
        default_factory=set
    )  # computed by another part, and never called
    dropouts: list[tuple[nn.Module, str]] = field(default_factory=list)
    adapters: str = lora.MODES[0]  # how LoRA is computed: next to the weights, or merged into them
    wrappers: list[Any] = field(
        default_factory=list
    )  # modules of PEFT, whose state each call reads

    @property
    def unshipped(self) -> list[str]:
        """Descriptions of the classes whose source, or whose rotation's, is not in the tables of digests."""
        found = {
            f"{plain_type(module).__name__} ({part.found})"
            for module, part in self.parts.items()
            if not part.shipped
        }
        return sorted(found)

    @property
    def classes(self) -> list[type[nn.Module]]:
        """The classes whose forwards decide what was recognised."""
        return list(dict.fromkeys(plain_type(module) for module in self.parts))

    @cached_property
    def configs(self) -> list[Any]:
        """The configs by which composites choose their attention function, each once."""
        found = {id(m.config): m.config for m in self.parts if hasattr(m, "config")}
        return list(found.values())


@dataclass(frozen=True)
class Outer:
    """The functions that compute a whole model: of its head's class, of its backbone, and of its logits."""

    causal: Forward
    backbone: Forward
    logits: Forward
    scoring: dict[str, Forward]  # by the kind of a head that is no language model's


def make_plan(model: nn.Module, outer: Outer, adapters: str = lora.MODES[0]) -> Plan:
    """Recognise every module of a model, or raise an error that names the first that is not known.

    Args:
        model: The model.
        outer: The functions that compute it as a whole.
        adapters: How LoRA is computed: "beside" or "merged".
    """
    library()  # the version is checked before anything of it is read
    if not hasattr(model, "config"):
        refuse(
            "a causal language model of transformers, or one that is written like those: with a config",
            f"{type(model).__module__}.{type(model).__name__}",
            ELSEWHERE,
        )
    unknown = None
    try:
        head = find_head(model)
    except UnsupportedError as error:  # raised below: first what its modules lack
        head, unknown = PLAIN, error
    backbone = model if head is None else getattr(model, BACKBONE)
    plan = Plan(model, backbone, head, adapters=adapters)
    check_config(model.config)
    of_lora: set[nn.Module] = set()
    for name, module in model.named_modules():
        plan.names[module] = name
        if module in of_lora:  # read by the part of the layer that holds it
            plan.parts[module] = Part("inside of LoRA", None)
            continue
        check_wrapped(name, module)
        if lora.is_tuner_layer(module):
            plan.wrappers.append(module)
        if module is backbone:
            part = find_backbone(module, outer.backbone)
        elif module is model:
            assert head is not None
            forward = outer.scoring.get(head.kind, outer.causal)
            where = f"{head.kind}: {head.found}"
            part = Part("head", forward, (), where, head.shipped)
        elif linear.is_lora(module):
            part = find_lora(name, module, head)
            of_lora |= set(module.modules()) - {module}
        elif is_of_parameter(module):
            part, called = find_adapted_experts(name, module, adapters)
            plan.wrappers += parameter_wrappers(module)[1:]
            of_lora |= set(module.modules()) - {module, *called}
        elif lora.is_tuner_layer(module):
            part = Part("module to save", None, (), "peft.utils.other")
        elif head is not None and head.is_language_model and lora.plain_name(name) == HEAD:
            check_logits(module)
            part = Part("logits", outer.logits, (), "torch.nn.Linear")
        elif module in plan.inside and plain_type(module) is nn.Conv1d:
            part = Part("inside of linear attention", None, (), "torch.nn.Conv1d")
        else:
            part = find_part(name, module)
        plan.parts[module] = part
        plan.inside |= {getattr(module, child) for child in part.inside}
        plan.dropouts += [(module, key) for key in dropouts_of(module, part)]
    plan.inside |= of_lora
    if of_lora:
        check_inside(plan, of_lora)
    if unknown is not None:
        raise unknown
    join_siblings(plan)
    return plan


def check_config(config: Any) -> None:
    """Raise on options that change what a model computes and are not seen in its modules."""
    if getattr(config, "pretraining_tp", 1) > 1:
        refuse("whole products", f"pretraining_tp={config.pretraining_tp}", "set it to 1")
    if getattr(config, "clip_qkv", None) is not None:
        refuse(
            "queries, keys and values that are not clipped in place",
            f"clip_qkv={config.clip_qkv}",
            "set clip_qkv in the model's config to None, if the model is meant to run without",
        )


def find_lora(name: str, module: Any, head: Head | None) -> Part:
    """Return how a linear layer with LoRA is computed; its siblings are added later."""
    if head is not None and lora.plain_name(name) == HEAD:
        refuse(
            "a language-model head without LoRA: log-probabilities read its weight in fp32",
            f"LoRA on {name}",
            "leave it out of target_modules; modules_to_save=['lm_head'] trains a copy of it",
        )
    digest = digest_of_class(type(module))
    where, shipped = f"source of {LORA.get(digest, 'PEFT')}", digest in LORA
    return Part("LoRA", lora.forward_lora, (), where, shipped)


def find_adapted_experts(name: str, module: Any, mode: str) -> tuple[Part, list[nn.Module]]:
    """Return how experts with LoRA of their weights are computed, and which of their children are called."""
    wrappers = parameter_wrappers(module)
    base = wrappers[-1].base_layer
    part = find_mixture(base, digest_of_class(plain_type(base)))
    transposed = ADAPTED.get(None if part is None else part.forward)
    # PEFT tells inputs from outputs by an attribute of the module, and stores A for the inputs.
    swapped = {bool(each._did_swap_in_out_features) for each in wrappers}
    if part is None or transposed is None or swapped != {not transposed}:
        kind = type(base)
        refuse(
            "LoRA over torch.nn.Linear, or over the weights of experts whose inputs PEFT knows (Qwen3-MoE, Mixtral, "
            "DeepSeek-V3, gpt-oss and the like)",
            f"a PEFT adapter that is not computed: target_parameters of {name}, a {kind.__module__}.{kind.__name__}",
            f"name other layers in target_modules=[…]; {UNLOAD}",
        )
    digest = digest_of_class(type(module))
    if digest not in LORA:  # eight tokens would not show how B is stored, since it begins as zeros
        refuse(
            "PEFT's wrapper of a parameter as it was read, of PEFT 0.21",
            f"target_parameters of {name} by another version of PEFT (digest {digest})",
            f"pip install peft==0.21.*; {UNLOAD}",
        )
    called = [child for key, child in base.named_children() if key not in part.inside]
    where = f"{part.found}, in {LORA[digest]}"
    return Part("LoRA", lora.forward_adapted_experts, (part.forward, mode), where), called


def check_inside(plan: Plan, of_lora: set[nn.Module]) -> None:
    """Raise if a layer that PEFT wrapped is also called without its wrapper: nothing would compute it there."""
    wrappers = tuple(f"{plan.names[m]}." for m, part in plan.parts.items() if part.name == "LoRA")
    for name, module in plan.model.named_modules(remove_duplicate=False):
        if module in of_lora and not name.startswith(wrappers):
            refuse(
                "layers with LoRA that each belong to one place of the model",
                f"{name}, which is inside of the adapter of {plan.names[module].rpartition('.')[0]}, too",
                "give each place a layer of its own, copy.deepcopy(layer), before the adapters are added",
            )


def check_logits(module: nn.Module) -> None:
    """Raise unless the head is a linear layer without bias."""
    if plain_type(module) is not nn.Linear:
        refuse_unknown(HEAD, module, "the head's linear layer is another")
    if module.bias is not None:
        refuse("a language-model head without bias", "lm_head.bias", "set lm_head.bias to None")


def find_part(name: str, module: nn.Module) -> Part:
    """Return what a module is, or raise an error that names it."""
    kind = plain_type(module)
    registered = find_registered(kind)
    if registered is not None:
        return registered.part_for(name, module)
    found = find_torch_class(name, module) or find_activation(module)
    if found is not None:
        return found
    digest = digest_of_class(kind)
    found = find_by_digest(name, module, digest)
    if found is not None:
        return found
    if next(module.children(), None) is not None:
        return find_composite(name, module, digest)
    formula = probe_norm(module)
    if formula is not None:
        return Part("norm", layers.forward_norm, (formula,), f"probed: {formula}", shipped=False)
    refuse_unknown(
        name, module, f"its forward (digest {digest}) is none that was read, and no norm"
    )
    raise AssertionError


def find_torch_class(name: str, module: Any) -> Part | None:
    """Recognise classes of torch.nn, exactly: a subclass may compute anything."""
    kind = plain_type(module)
    where = f"torch.nn.{kind.__name__}"
    if kind is nn.Linear:
        return Part("linear", linear.forward_linear, (None,), where)
    if kind is nn.Embedding:
        return Part("embedding", layers.forward_embedding, (), where)
    if kind is nn.Dropout:
        return Part("dropout", layers.forward_dropout, (name,), where)
    if kind in CONTAINERS:
        return Part("container", None, (), where)
    if kind is nn.LayerNorm:
        if module.weight is None or module.weight.dim() != 1:
            refuse(
                "a LayerNorm of rows with a weight",
                f"{name} with normalized_shape={tuple(module.normalized_shape)}"
                f"{'' if module.weight is not None else ' and no weight'}",
                f"isobit.layer_norm needs a weight [n]; {ELSEWHERE}",
            )
        bias = None if module.bias is None else "bias"
        formula = NormFormula("layer", "eps", "weight", bias)
        return Part("norm", layers.forward_norm, (formula,), where)
    if kind is nn.RMSNorm and module.eps is not None and len(module.normalized_shape) == 1:
        weight = None if module.weight is None else "weight"
        return Part("norm", layers.forward_norm, (NormFormula("rms", "eps", weight),), where)
    return None


def find_activation(module: nn.Module) -> Part | None:
    """Recognise activations by their class."""
    kind = layers.kind_of_activation(module)
    where = f"{plain_type(module).__module__}.{plain_type(module).__name__}"
    if kind == "silu":
        return Part("silu", layers.forward_silu, (), where)
    if kind is not None:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return Part("gelu", layers.forward_gelu, (approximate,), where)
    return None


def find_by_digest(name: str, module: Any, digest: str) -> Part | None:
    """Recognise leaves and gated MLPs whose source was read."""
    if digest in NORMS:
        path, formula = NORMS[digest]
        return Part("norm", layers.forward_norm, (formula,), f"source of {path}")
    if digest in GATED_NORMS:
        path, formula = GATED_NORMS[digest]
        return Part("gated norm", delta_net.forward_gated_norm, (formula,), f"source of {path}")
    if digest in DELTA_NETS:
        delta_net.check_delta_net(name, module)
        where = f"source of {DELTA_NETS[digest]}"
        return Part("linear attention", delta_net.forward_delta_net, (), where, inside=("conv1d",))
    if digest in ROTARY_EMBEDDINGS:
        rotary.check_kind(name, module)
        path = ROTARY_EMBEDDINGS[digest]
        return Part("rotary embedding", rotary.forward_rotary, (), f"source of {path}")
    if digest in EMBEDDINGS and plain_type(module).__bases__ == (nn.Embedding,):
        path, scale = EMBEDDINGS[digest]
        forward = layers.forward_scaled_embedding
        return Part("embedding", forward, (scale,), f"source of {path}")
    if digest in ELEMENTWISE:
        return Part("elementwise", None, (), f"source of {ELEMENTWISE[digest]}")
    if digest in GATED_MLPS:
        path, form = GATED_MLPS[digest]
        act = "act_fn" if hasattr(module, "act_fn") else "activation_fn"
        if layers.kind_of_activation(getattr(module, act)) == "silu":
            packed, separate = linear.forward_packed_swiglu, linear.forward_swiglu
            chosen = separate if form == "separate" else packed
            return Part("gated MLP", chosen, (), f"source of {path}", inside=(act,))
    return find_mixture(module, digest)


def find_mixture(module: Any, digest: str) -> Part | None:
    """Recognise routers, experts and blocks of a mixture of experts, and attention over latent rows."""
    if digest in ROUTERS:
        path, how = ROUTERS[digest]
        return Part("router", experts.forward_router, (how,), f"source of {path}")
    if digest in EXPERTS:
        path, form = EXPERTS[digest]
        if form == "clamped":
            return Part("experts", experts.forward_clamped_experts, (), f"source of {path}")
        scaled = form == "scaled inputs"
        chosen = experts.forward_scaled_experts if scaled else experts.forward_experts
        inside = ("act_fn",) if layers.kind_of_activation(module.act_fn) == "silu" else ()
        return Part("experts", chosen, (), f"source of {path}", inside=inside)
    if digest in LATENT_ATTENTIONS:
        where = f"source of {LATENT_ATTENTIONS[digest]}"
        return Part("attention", attention.forward_latent, (), where)
    if digest in TEMPERED_ATTENTIONS:
        where = f"source of {TEMPERED_ATTENTIONS[digest]}"
        return Part("attention", attention.forward_tempered, (), where)
    if digest in MIXTURES:
        path, form = MIXTURES[digest]
        forwards: dict[str, Forward] = {
            "jittered": experts.forward_jittered,
            "gated shared": experts.forward_gated_shared,
            "shared": experts.forward_shared,
            "shared, with logits": experts.forward_shared_with_logits,
        }
        return Part("mixture of experts", forwards[form], (), f"source of {path}")
    return None


def find_composite(name: str, module: nn.Module, digest: str) -> Part:
    """Return how a module that has children runs: by its own code, if that adds nothing."""
    kind: Any = plain_type(module)
    function = function_of(kind)
    shipped = digest in COMPOSITES or digest in GATED_MLPS
    where = f"source of {COMPOSITES.get(digest) or (GATED_MLPS[digest][0] if shipped else '')}"
    if not shipped:
        held = [key for key, value in module._parameters.items() if value is not None]
        if held:
            refuse_unknown(name, module, f"it has parameters of its own ({', '.join(held)})")
        computation = find_computation(function, kind)
        if computation is not None:
            refuse_unknown(name, module, f"it computes more than its children do: {computation}")
        where = "plumbing only"
    rotations = composites.rotations_of(function)
    for call, found in rotations.items():
        where += f"; {call} by {found.style}, {found.found}"
        shipped = shipped and found.shipped
    if "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
        check_keywords(name, module, function)
        check_head_norms(name, module)
        return Part("attention", composites.forward_composite, (), where, shipped)
    if function.__code__.co_flags & inspect.CO_VARKEYWORDS:  # its keywords take the layout through
        return Part("layer", composites.forward_layer, (), where, shipped)
    return Part("composite", composites.forward_composite, (), where, shipped)


def check_keywords(name: str, module: nn.Module, function: Any) -> None:
    """Raise if a composite passes its attention function something that changes attention and is not computed."""
    for node in nodes_of(function):
        for word in node.keywords if isinstance(node, ast.Call) else ():
            if word.arg in attention.OTHERS and isinstance(word.value, ast.Attribute):
                value: Any = module
                for key in ast.unparse(word.value).split(".")[1:]:
                    value = getattr(value, key, None)
                if value is not None:
                    attention.refuse_keyword(word.arg, f"{name} of type {type(module).__name__}")


def check_head_norms(name: str, module: Any) -> None:
    """Raise for LayerNorm of heads, whose weight's gradient would be a sum over heads too."""
    for child, inner in module.named_children():
        if plain_type(inner) is nn.LayerNorm and inner.normalized_shape[-1] == getattr(
            module, "head_dim", None
        ):
            layers.refuse_layer_norm_of_heads(f"{name}.{child}, with a weight of {module.head_dim}")


def find_backbone(module: nn.Module, forward: Forward) -> Part:
    """Return how the backbone runs: by its own code, with the positions of the layout."""
    kind: Any = plain_type(module)
    registered = find_registered(kind)
    if registered is not None and registered.name == "composite":
        return Part("backbone", forward, (), "registered", shipped=False)
    digest = digest_of_class(kind)
    shipped = digest in COMPOSITES
    where = f"source of {COMPOSITES[digest]}" if shipped else "plumbing only"
    if not shipped:
        computation = find_computation(function_of(kind), kind, backbone=True)
        if computation is not None:
            refuse_unknown(
                "the model", module, f"it computes more than its children: {computation}"
            )
    return Part("backbone", forward, (), where, shipped)


def join_siblings(plan: Plan) -> None:
    """Give the linear layers that share an input the list of all of them, as a setting of their parts."""
    for module, part in list(plan.parts.items()):
        if part.name not in ("attention", "linear attention", "composite", "layer", "gated MLP"):
            continue
        for children in sharing(module, part):
            layers, groups = linear.find_layers(plan.names[module], module, children)
            called = [getattr(module, child) for child in children]
            give_siblings(plan, layers, groups, called)
    for module, part in list(plan.parts.items()):
        if part.forward is lora.forward_lora and not part.settings:
            layer: Any = module.base_layer
            give_siblings(plan, (layer,), 1, [module])


def give_siblings(
    plan: Plan, layers: tuple[nn.Linear, ...], groups: int, called: list[nn.Module]
) -> None:
    """Put the list of layers that share an input into the parts of the modules that are called for them."""
    siblings = linear.Siblings(layers, groups)
    if any(linear.is_lora(module) for module in called):
        wrappers = tuple(module if linear.is_lora(module) else None for module in called)
        names = tuple(plan.names[module] for module in called)
        siblings = lora.AdaptedSiblings(layers, groups, wrappers, names, plan.adapters)
    for module in called:
        plan.parts[module] = replace(plan.parts[module], settings=(siblings,))


def sharing(module: nn.Module, part: Part) -> list[tuple[str, ...]]:
    """Return the names of children that are linear layers and share an input."""
    if part.forward is linear.forward_named_swiglu:
        children = part.settings[:2]  # gate and up
        is_linear = all(linear.base_linear(getattr(module, name)) for name in children)
        return [children] if is_linear else []
    return siblings_in(module, lambda child: linear.base_linear(child) is not None)


def dropouts_of(module: nn.Module, part: Part) -> tuple[str, ...]:
    """Return the attributes of a composite that its own code passes to torch's dropout as p."""
    if part.name not in ("attention", "composite", "layer", "backbone"):
        return ()
    return dropouts_in(function_of(plain_type(module)))


@lru_cache(maxsize=1024)
def dropouts_in(function: Any) -> tuple[str, ...]:
    """Return the attributes that a function passes to torch's dropout as p."""
    found = []
    for node in nodes_of(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("functional.dropout"):
            for word in node.keywords:
                if word.arg == "p" and isinstance(word.value, ast.Attribute):
                    found.append(word.value.attr)
    return tuple(found)


def check_dropouts(plan: Plan) -> None:
    """Raise if a model in training drops anything by torch's dropout."""
    for module, key in plan.dropouts:
        if module.training and getattr(module, key):
            name = plan.names[module] or "the model"
            layers.refuse_dropout(f"{key} of {getattr(module, key)} in training, in {name}")


def refuse_unknown(name: str, module: nn.Module, why: str) -> None:
    """Raise for a module that is no known part."""
    kind = plain_type(module)
    raise UnsupportedError(
        expected=f"modules that are known parts ({KNOWN}), or that only call such modules",
        received=f"{name or 'the model'} of type {kind.__module__}.{kind.__name__}: {why}",
        remedy=f"register the class: isobit.parts.register({kind.__name__}, …), as docs/how-to/own-model.md shows; "
        f"load the model without quantisation and wrappers; if it was replaced later: {AGAIN}; {ELSEWHERE}",
    )
