"""Give a vLLM model isobit's operators before its weights are loaded, and check at every call that it has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from isobit.foundation.machine import flushes_subnormals
from isobit.integrations.transformers.parts.composites import rebound_function
from isobit.integrations.transformers.refusals import refuse_flushing
from isobit.integrations.transformers.strictness import Strictness
from isobit.integrations.vllm import delta_net, experts, modules
from isobit.integrations.vllm.attention import (
    GENERATION,
    OrderedAttention,
    OrderedAttentionBackend,
    Step,
)
from isobit.integrations.vllm.refusals import refuse
from isobit.integrations.vllm.weights import Generation, PackedLinear

STATE = "_isobit_state"
LINEARS = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    RMSNorm: modules.forward_norm,
    GemmaRMSNorm: modules.forward_offset_norm,
    SiluAndMul: modules.forward_swiglu,
    GeluAndMul: modules.forward_geglu,
    VocabParallelEmbedding: modules.forward_embedding,
}
MODELS = "vllm.model_executor.models."  # vLLM's own files of models
# What transformers' config calls the gelu of each GeluAndMul; vLLM takes tanh where a config has `hidden_act` alone.
GELUS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}


class OrderedLinearMethod(LinearMethodBase):
    """vLLM's method of a linear layer: isobit.linear. The weight stays as it was loaded."""

    supports_pre_processed_weights = True

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed

    def create_weights(self, layer: nn.Module, *given: Any, **named: Any) -> None:
        """Create the weights as vLLM's own method does."""
        UnquantizedLinearMethod().create_weights(layer, *given, **named)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the weight: vLLM would pack it for its own product and drop the original."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer."""
        return self.packed.compute(x, layer.weight, bias)


class OrderedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """vLLM's method of embedding and head, which keeps the weight as it was loaded and computes nothing itself."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the weight."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Raise: logits are computed by the logits processor."""
        refuse("logits from model.compute_logits", "a call of the head's method", "call the model")

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Raise: rows are looked up by the module's forward."""
        refuse("embeddings from the module", "a call of its method", "call the model")


class State:
    """What was prepared in one model."""

    def __init__(self, model: nn.Module) -> None:
        self.packed: list[PackedLinear] = []
        self.generation = Generation(self.packed)
        self.strictness = Strictness(wanted=True)
        self._model = model
        self._accepted: tuple[list[Any], ...] | None = None

    def add_packed(self) -> PackedLinear:
        """Return a new packed form, whose writes are counted."""
        self.packed.append(PackedLinear())
        return self.packed[-1]

    def accept(self) -> None:
        """Take the modules as they are for the prepared ones."""
        self._modules = list(self._model.modules())
        self._tables = [vars(module) for module in self._modules]
        self._accepted = self._gather()

    def check(self) -> None:
        """Raise if modules, their forwards, methods or hooks are not those that were prepared."""
        if self._gather() != self._accepted:
            refuse(
                "the modules, hooks and methods that isobit prepared when the model was loaded",
                f"a {type(self._model).__name__} that was changed since",
                "remove hooks and adapters; update weights by load_weights or reload_weights",
            )
        if flushes_subnormals():
            refuse_flushing("torch.set_flush_denormal(True)")

    def _gather(self) -> tuple[list[Any], ...]:
        tables = self._tables
        return (
            list(map(type, self._modules)),
            [table.get("forward") for table in tables],
            [table.get("quant_method") for table in tables],
            [table.get("impl") for table in tables],
            [list(table["_modules"].values()) for table in tables],
            [
                len(table[kind])
                for table in tables
                for kind in ("_forward_hooks", "_forward_pre_hooks")
            ],
        )


def prepare(model: Any, config: Any) -> State:
    """Replace the computations of each module of a vLLM model, on all of them or raise.

    Leaves are known by their class. Everything else is a module of vLLM's file of the model that only calls others and
    runs as it is: strict mode watches that it adds nothing.
    """
    check_home(model)
    state, text = State(model), config.model_config.hf_text_config
    angles = modules.read_frequencies(text)
    # Rotary embeddings first, where they are used: vLLM shares one among the models of a process.
    for name, module in list(model.named_modules()):
        for attribute, child in list(module.named_children()):
            if isinstance(child, RotaryEmbeddingBase):
                check_rotary(name, child, angles[0])
                setattr(module, attribute, modules.OrderedRotary(*angles, child.head_size))
    for name, module in list(model.named_modules()):
        prepare_module(name, module, text, state)
    attentions = [module for module in model.modules() if type(module) is Attention]
    delta_net.widen_pages(model, attentions, config)
    wrap_model(model, state)
    state.accept()
    return state


def check_home(model: Any) -> None:
    """Raise unless the model is one of vLLM's own files, and not transformers' model inside vLLM."""
    kind = type(model)
    if not kind.__module__.startswith(MODELS) or kind.__module__.startswith(
        f"{MODELS}transformers"
    ):
        refuse(
            "a model of vLLM's own files, made of its layers",
            f"{kind.__module__}.{kind.__name__}",
            "serve a model that this vLLM has a file for, such as Qwen3, Llama, Mistral, Phi3 or Gemma",
        )


def prepare_module(name: str, module: Any, config: Any, state: State) -> None:
    """Replace what one module computes."""
    kind = type(module)
    if kind in FORWARDS:
        check_plain(name, module)
        if kind is VocabParallelEmbedding:
            module.quant_method = OrderedEmbeddingMethod()
        if kind is GeluAndMul:
            check_gelu(name, module, config)
        module.forward = partial(FORWARDS[kind], module)
    elif kind is LogitsProcessor:
        check_plain(name, module)
        check_scale(name, module)
        module.forward = partial(modules.forward_logits, module, state.add_packed())
    elif kind is ParallelLMHead:
        check_plain(name, module)
        module.quant_method = OrderedEmbeddingMethod()
    elif kind in LINEARS:
        if type(module.quant_method) is not UnquantizedLinearMethod:
            refuse_module(name, module, f"quantized by {type(module.quant_method).__name__}")
        module.quant_method = OrderedLinearMethod(state.add_packed())
    elif kind in experts.KINDS:
        why = experts.prepare_experts(module, config, state.add_packed())
        if why:
            refuse_module(name, module, why)
    elif kind is delta_net.KIND:
        why = delta_net.prepare_delta_net(module, state.generation)
        if why:
            refuse_module(name, module, why)
    elif kind is Attention:
        prepare_attention(module, state)
    elif kind is Qwen3NextAttention:
        # Its own code with isobit's logistic function, by which it gates its output.
        module.forward = partial(rebound_function(kind.forward), module)
    elif kind in delta_net.INSIDE:
        pass
    elif kind not in (nn.ModuleList, modules.OrderedRotary, experts.OrderedExpertsMethod):
        check_container(name, module)


def check_container(name: str, module: nn.Module) -> None:
    """Raise unless a module is of vLLM's file of a model, has children and no weights of its own."""
    if not type(module).__module__.startswith(MODELS) or next(module.children(), None) is None:
        refuse_module(name, module, "which isobit does not compute")
    held = [key for key, value in module._parameters.items() if value is not None]
    if held:
        refuse_module(name, module, f"with weights of its own ({', '.join(held)})")


def check_gelu(name: str, module: Any, config: Any) -> None:
    """Raise unless vLLM took the gelu that transformers takes."""
    asked = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if GELUS.get(str(asked)) != module.approximate:
        refuse_module(
            name,
            module,
            f"with approximate={module.approximate!r}, while transformers computes {asked!r}",
        )


def check_scale(name: str, module: Any) -> None:
    """Raise unless logits are scaled by a power of two: then the trainer's one rounding is that of two factors."""
    mantissa, _ = math.frexp(module.scale)
    if mantissa != 0.5:
        refuse_module(name, module, f"with scale={module.scale!r}, which is no power of two")


def check_plain(name: str, module: Any) -> None:
    """Raise on options of a module that its forward does not compute."""
    wrong = {
        "has_weight": (True,),
        "variance_size_override": (None,),
        "soft_cap": (None,),
        "logits_as_input": (False,),
        "bias": (None,),
    }
    for option, right in wrong.items():
        if getattr(module, option, right[0]) not in right:
            refuse_module(name, module, f"with {option}={getattr(module, option)!r}")


def check_rotary(name: str, module: Any, frequencies: Tensor) -> None:
    """Raise on a rotary embedding of pairs, or of another part of the head than the trainer's."""
    if not module.is_neox_style:
        refuse_module(name, module, "that does not rotate two halves")
    if 2 * len(frequencies) != module.rotary_dim:
        refuse_module(
            name, module, f"of {module.rotary_dim} where the trainer has {2 * len(frequencies)}"
        )


def prepare_attention(layer: Any, state: State) -> None:
    """Put isobit's backend in the place of the one that vLLM chose."""
    if layer.head_size_v != layer.head_size or layer.query_quant is not None or layer.has_sink:
        refuse_module(
            layer.layer_name, layer, "with values of another depth, sinks or quantization"
        )
    chosen = layer.impl
    layer.attn_backend = OrderedAttentionBackend
    layer.backend = AttentionBackendEnum["ISOBIT"]
    layer.impl = OrderedAttention(
        layer.num_heads,
        layer.head_size,
        chosen.scale,
        layer.num_kv_heads,
        getattr(chosen, "alibi_slopes", None),
        layer.sliding_window,
        layer.kv_cache_dtype,
        getattr(chosen, "logits_soft_cap", None) or None,
        layer.attn_type,
        layer.kv_sharing_target_layer_name,
    )
    layer.use_direct_call = True  # so that strict mode sees the operators inside
    setattr(layer, GENERATION, state.generation)


def wrap_model(model: Any, state: State) -> None:
    """Check at each call; watch the operators of each new kind of call; count updates of the weights."""
    forward, logits, load = model.forward, model.compute_logits, model.load_weights

    def checked_forward(*given: Any, **named: Any) -> Any:
        state.check()
        return state.strictness.run(model, kind_of_step(), lambda: forward(*given, **named))

    def checked_logits(*given: Any, **named: Any) -> Any:
        return state.strictness.run(model, ("logits",), lambda: logits(*given, **named))

    def counted_load(*given: Any, **named: Any) -> Any:
        state.generation.begin_update()
        return load(*given, **named)

    model.forward, model.compute_logits, model.load_weights = (
        checked_forward,
        checked_logits,
        counted_load,
    )
    model.__dict__[STATE] = state


def kind_of_step() -> tuple[Any, ...]:
    """Return the kind of the step that runs: its steps run the same operators."""
    found = get_forward_context().attn_metadata
    steps = found.values() if isinstance(found, dict) else ()
    step = next((each for each in steps if isinstance(each, Step)), None)
    if step is None:
        return ("forward", "without keys")
    return ("forward", step.is_decode, step.gathered is not None)


def refuse_module(name: str, module: nn.Module, why: str) -> None:
    """Raise with the module's name."""
    refuse(
        "modules that isobit computes",
        f"{name or 'the model'}, a {type(module).__name__} {why}",
        "serve a model of linear layers, RMSNorm, gated MLPs with silu or gelu, experts of Qwen3-MoE, rotary "
        "attention, and linear attention of Qwen3-Next or Qwen3.5",
    )
