"""Forward functions of a whole enabled model."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation import backends
from isobit.foundation.machine import flushes_subnormals
from isobit.integrations.transformers.head import keep_rows, logits_of, loss_of, scale_logits
from isobit.integrations.transformers.layout import LAYOUT, Layout, in_force, read_layout
from isobit.integrations.transformers.load_balancing import (
    ROUTER_LOGITS,
    check_balancing,
    collected,
    load_balancing_loss,
    wants_router_logits,
)
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.attention import check_registered
from isobit.integrations.transformers.parts.caches import keep_every_key, refuse_changed_keys
from isobit.integrations.transformers.parts.heads import Head
from isobit.integrations.transformers.parts.lora import active_module, adapter_state
from isobit.integrations.transformers.parts.recognition import check_dropouts
from isobit.integrations.transformers.refusals import refuse, refuse_flushing
from isobit.integrations.transformers.state import State, find_owner, find_state, require_state
from isobit.integrations.transformers.strictness import tensors_of
from isobit.ops.share import share_in_force
from isobit.order.samples import Samples

# Warn when autograd accumulates gradients of several calls: the sum then depends on how the batch was divided.

MESSAGE = (
    "isobit: a backward pass adds to gradients that the model holds already. Autograd adds these rounded gradients, so "
    "the result depends on how the batch was divided (gradient_accumulation_steps). Use one batch per step, or train "
    "through isobit.parallel.Gradients, whose result does not depend on it (docs/how-to/train-over-ranks.md)."
)


def warn_at_backward(state: State, model: nn.Module, output: Any) -> None:
    """Warn, once per model, when backward of this output begins while the model holds gradients."""
    if (
        state.warned_of_accumulation
        or not (model.training and torch.is_grad_enabled())
        or share_in_force() is not None
    ):
        return
    first = next(
        (tensor for tensor in tensors_of(output) if tensor.requires_grad and not tensor.is_leaf),
        None,
    )
    if first is not None:
        first.register_hook(partial(warn_if_held, weakref.ref(state), weakref.ref(model)))  # type: ignore[no-untyped-call]


def warn_if_held(of_state: Any, of_model: Any, _: Tensor) -> None:
    """Warn if the model holds gradients.

    Only the smallest is read. Zeros, as of zero_grad(set_to_none=False), change nothing.
    """
    state, model = of_state(), of_model()
    if state is None or model is None or state.warned_of_accumulation:
        return
    # Of a sharded gradient the local part: ranks must not exchange anything here.
    held = [
        getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None
    ]
    if held and bool(min(held, key=Tensor.numel).any()):
        state.warned_of_accumulation = True
        warnings.warn(MESSAGE, stacklevel=2)


Output = TypeVar("Output")


def run_checked(
    state: State, model: nn.Module, kind: tuple[Any, ...], call: Callable[[], Output], **calls: bool
) -> Output:
    """Check the modules, then call; in strict mode, watch a kind of call that is new, or whose modules changed."""
    strict = state.strictness.wanted
    if strict and flushes_subnormals():
        refuse_flushing("torch.set_flush_denormal(True)")
    if state.structure.check(strict=strict, **calls):
        state.strictness.forget()
    check_registered(state.plan.configs)
    if model.training:
        check_dropouts(state.plan)
    kind = (*kind, adapter_state(state.plan.wrappers))
    output = state.strictness.run(model, kind, call)
    warn_at_backward(state, model, output)
    return output


# torch.compile runs an enabled model eagerly: the same bits, and no silent change of them.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_base(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **inputs: Any,
) -> Any:
    """Run transformers' own decoder with the positions of the layout."""
    layout: Layout | None = inputs.get(LAYOUT)
    outermost = layout is None
    if layout is None:
        layout = layout_of(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs
        )
    if layout.kind == "packed":
        use_cache = refuse_packed_cache(past_key_values, use_cache)
    kind_of_model: Any = type(module)
    if takes_cache(kind_of_model):
        inputs["past_key_values"] = keep_every_key(module.config, past_key_values, use_cache)
        inputs["use_cache"] = use_cache
    elif past_key_values is not None or use_cache:
        raise UnsupportedError(
            expected=f"no cache for {type(module).__name__}, whose tokens see both sides",
            received=f"use_cache={use_cache}, past_key_values={type(past_key_values).__name__}",
            remedy="call the model without past_key_values and use_cache",
        )
    inputs[LAYOUT] = layout

    def run() -> Any:
        with in_force(layout):
            return type(module).forward(
                module,
                input_ids=input_ids,
                position_ids=layout.positions,
                inputs_embeds=inputs_embeds,
                **inputs,
            )

    if not outermost:
        return run()
    kind = kind_of(module, layout, inputs.get("past_key_values"), use_cache)
    state = find_state(module)
    if state is None:
        state, kind = require_backbone(module), (*kind, "backbone")
    return run_checked(state, module, kind, run)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_causal(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    return_dict: bool | None = None,
    **inputs: Any,
) -> Any:
    """Return the loss and no logits if there are labels, else fp32 logits."""
    layout = layout_of(
        input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs
    )
    inputs[LAYOUT] = layout

    def run() -> Any:
        if balanced:
            layout.pending[ROUTER_LOGITS] = []
        found = module.model(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **inputs,
        )
        hidden, loss, logits = found.last_hidden_state, None, None
        refuse_tied_share(module)
        if scored:
            loss = loss_of(hidden, active_module(module.lm_head), layout, labels, inputs, *scaling)
        else:
            hidden, samples = keep_rows(hidden, layout, logits_to_keep)
            logits = scale_logits(module.lm_head(hidden, samples), *scaling)
        made = {
            "loss": loss,
            "logits": logits,
            "past_key_values": found.past_key_values,
            "hidden_states": found.hidden_states,
            "attentions": found.attentions,
        }
        if not balanced:
            return library("modeling_outputs").CausalLMOutputWithPast(**made)
        routed = collected(module, layout)
        aux = load_balancing_loss(routed, module.num_experts, module.num_experts_per_tok, layout)
        if loss is not None:
            made["loss"] = loss + aux * module.router_aux_loss_coef
        output = library("modeling_outputs").MoeCausalLMOutputWithPast
        return output(**made, aux_loss=aux, router_logits=routed)

    state = require_state(module)
    head = require_head(state)
    scaling = head.divisor(module), head.softcap(module)
    balanced = wants_router_logits(module, inputs)
    if balanced:
        check_balancing(head.kind)
    scored = labels is not None or inputs.get("shift_labels") is not None
    if scored:
        refuse_other_loss(module)
    how = (scored, scaling[1] is not None, balanced)
    kind = (*kind_of(module, layout, past_key_values, use_cache), *how)
    output = run_checked(state, module, kind, run, calls_head=not scored)
    wanted = module.config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


@lru_cache(maxsize=256)
def takes_cache(kind: Any) -> bool:
    """Return whether a backbone has an argument for a cache; encoders have none."""
    return "past_key_values" in inspect.signature(kind.forward).parameters


def forward_logits(module: nn.Linear, hidden: Tensor, samples: Samples | None = None) -> Tensor:
    """Compute the language-model head in fp32."""
    return logits_of(hidden, module, samples)


def require_head(state: State) -> Head:
    """Return the head of a model that has one."""
    assert state.head is not None
    return state.head


def layout_of(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    inputs: dict[str, Any],
) -> Layout:
    """Return the layout of a call from the arguments of a transformers model."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        raise ArgumentError(
            expected="input_ids or inputs_embeds",
            received="both or neither",
            remedy="pass exactly one of them",
        )
    if inputs.get("cu_seq_lens_q") is not None and position_ids is None:
        raise ArgumentError(
            expected="packed samples separated by position_ids",
            received="cu_seq_lens_q alone",
            remedy="pass position_ids that restart at 0 for each sample",
        )
    if getattr(past_key_values, "is_compileable", False):
        raise UnsupportedError(
            expected="a cache that holds the samples' keys and no more",
            received=type(past_key_values).__name__,
            remedy="use transformers.DynamicCache()",
        )
    refuse_changed_keys(past_key_values)
    if tokens.dim() < 2 or 0 in tokens.shape[:2]:
        name = "input_ids" if input_ids is not None else "inputs_embeds"
        raise ArgumentError(
            expected=f"{name} with at least one sample and one token, [batch, tokens]",
            received=str(list(tokens.shape)),
            remedy="do not call the model with an empty batch",
        )
    check_place(tokens, attention_mask=attention_mask, position_ids=position_ids)
    refuse_autocast_share(tokens.device)
    past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
    return read_layout(
        (tokens.shape[0], tokens.shape[1]),
        past=past,
        attention_mask=attention_mask,
        position_ids=position_ids,
        device=tokens.device,
    )


def check_place(tokens: Tensor, **given: Tensor | None) -> None:
    """Raise unless tokens, mask and positions are on one device, which can be read on the host now."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.device != tokens.device:
            raise ArgumentError(
                expected=f"{name} on {tokens.device}, where the tokens are",
                received=f"{name} on {tensor.device}",
                remedy=f"pass {name}.to({str(tokens.device)!r})",
            )
    if tokens.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            expected="calls of an enabled model outside of a CUDA graph: masks and positions are read on the host",
            received="a call while a CUDA graph is captured",
            remedy="capture operators of isobit by themselves, after a first call of each outside of the graph",
        )


def refuse_packed_cache(past_key_values: Any, use_cache: bool | None) -> bool:
    """Raise if a cache is requested of packed samples: a later call could not tell their keys apart."""
    if past_key_values is not None or use_cache:
        raise UnsupportedError(
            expected="no cache where samples are packed into one row",
            received="use_cache=True"
            if past_key_values is None
            else type(past_key_values).__name__,
            remedy="give each sample its own row of the batch",
        )
    return False


def refuse_other_loss(module: Any, stock: str = "ForCausalLMLoss") -> None:
    """Raise if the model's loss is not the one of transformers that isobit computes, where labels are passed."""
    found = module.loss_function
    if found is not getattr(library("loss.loss_utils"), stock):
        refuse(
            f"the loss {stock} of transformers, where labels are passed: isobit computes it itself",
            f"model.loss_function = {getattr(found, '__qualname__', type(found).__name__)}",
            "call your function with the logits of model(input_ids) without labels, or put the stock loss back: "
            f"model.loss_function = transformers.loss.loss_utils.{stock}",
        )


def refuse_tied_share(module: Any) -> None:
    """Raise if a tied weight is trained on a share: autograd would add its two uses within each share."""
    weight = module.lm_head.weight
    tied = share_in_force() is not None and weight is module.model.embed_tokens.weight
    if tied and weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            expected="a leaf for each use of a tied weight, where a share of the global batch is trained on",
            received="one weight of embedding and head",
            remedy="train through isobit.parallel.Gradients, which makes them; or on the whole batch at once",
        )


def refuse_autocast_share(device: torch.device) -> None:
    """Raise under autocast within a share: only a leaf parameter takes a share's unrounded gradient."""
    if (
        share_in_force() is not None
        and torch.is_autocast_enabled(device.type)
        and torch.is_grad_enabled()
    ):
        raise UnsupportedError(
            expected="parameters in the dtype that is computed in, inside Gradients.micro_batch",
            received=f"torch.autocast to {torch.get_autocast_dtype(device.type)}",
            remedy="leave autocast, and convert the model instead: model.to(torch.bfloat16)",
        )


def kind_of(
    module: Any, layout: Layout, past_key_values: Any, use_cache: bool | None
) -> tuple[Any, ...]:
    """Return the kind of a call; calls of one kind run the same operators, of one executor."""
    cached, device = past_key_values is not None or bool(use_cache), layout.positions.device
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    how = (device, backends.chosen() is not None, module.dtype, cast)
    return (module.training, torch.is_grad_enabled(), cached, *how, layout.kind)


def require_backbone(module: nn.Module) -> State:
    """Return the state of the model that a backbone belongs to, or raise if it may not be called alone."""
    state = find_owner(module)
    if state is None:
        return require_state(module)
    if state.strictness.wanted and not state.backbone_alone:
        refuse(
            "calls of the whole model in strict mode: a head computed elsewhere would be of stock operators",
            f"a call of its {type(module).__name__} alone, as trainers make that replace the model's forward",
            "where TRL's trainer calls it, train with isobit.integrations.trl.GRPOTrainer; in a loop of your own, take "
            "log-probabilities from isobit.logprobs(model, …), a loss from model(…, labels=…), hidden states from "
            "model(…, output_hidden_states=True); or call isobit.enable(model.model) too",
        )
    return state
