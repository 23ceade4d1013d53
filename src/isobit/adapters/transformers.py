"""`enable(model)`: transformers' Qwen3, Qwen2 and Llama with one order of addition; `logprobs` of such a model."""

from __future__ import annotations

import inspect
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from isobit.adapters import modules
from isobit.adapters.families import Family, find_family, plan
from isobit.adapters.head import keep_rows, logprobs_of, loss_of
from isobit.adapters.layout import Layout, in_force, read_layout
from isobit.adapters.library import library
from isobit.adapters.strictness import Strictness
from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.share import share_in_force
from isobit.parallel.shard import ranks_of

_STATE = "_isobit_state"


class State:
    """What an enabled model remembers: how often it was enabled, and what to put back."""

    def __init__(self, family: Family, strict: bool) -> None:
        self.family, self.depth = family, 0
        self.strictness = Strictness(strict)
        self.attention: str | None = None
        self.replaced: list[tuple[nn.Module, Any]] = []  # (module, the forward its instance had, or None)


class Enabled:
    """What `enable` made: undone by `disable`, or by leaving the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model

    def disable(self) -> None:
        """Undoes this `enable`; the last of nested ones puts stock back. A second call does nothing."""
        model, self._model = self._model, None
        if model is not None and (state := find_state(model)) is not None:
            if state.depth == 1 and any(ranks_of(module) is not None for module in model.modules()):
                self._model = model
                raise UnsupportedError(
                    expected="a whole model, which stock operators can compute",
                    received="one whose parameters are split over ranks",
                    remedy="call isobit.adapters.tensor_parallel.unshard(model) on every rank first",
                )
            state.depth -= 1
            if not state.depth:
                restore(model, state)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"Enabled({'nothing: disabled' if self._model is None else type(self._model).__name__})"


def enable(model: nn.Module, *, strict: bool = True) -> Enabled:
    """Runs the model by isobit's operators: the same parameters and names, one order for every sum.

    Samples are read from attention_mask, position_ids and the cache. `strict` watches the first call of each kind
    and raises where a stock operator that carries an order ran. Reversible; nested calls count.
    """
    state = find_state(model)
    if state is None:
        state = State(find_family(model), strict)
        install(model, state)
    elif strict:
        state.strictness.wanted = True
    state.depth += 1
    return Enabled(model)


def install(model: Any, state: State) -> None:
    """Replaces forward on each instance, all or none."""
    whole = {state.family.model: forward_base, state.family.causal: forward_causal}
    chosen = plan(model, state.family, whole)
    library("modeling_utils").AttentionInterface.register(modules.ATTENTION, modules.attend)
    library("masking_utils").AttentionMaskInterface.register(modules.ATTENTION, modules.no_mask)
    state.attention = model.config._attn_implementation
    model.__dict__[_STATE] = state
    try:
        for module, forward in chosen:
            state.replaced.append((module, module.__dict__.get("forward")))
            # A partial of a plain function: copied and pickled with the model, and seen by nn.Module as forward.
            bound = partial(forward, module)
            bound.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
            module.__dict__["forward"] = bound
        model.config._attn_implementation = modules.ATTENTION
    except BaseException:
        restore(model, state)
        raise


def restore(model: Any, state: State) -> None:
    """Puts back what was there."""
    for module, forward in state.replaced:
        module.__dict__.pop("_isobit_angles", None)
        if forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward
    if model.config._attn_implementation == modules.ATTENTION:
        model.config._attn_implementation = state.attention
    model.__dict__.pop(_STATE, None)


def find_state(model: nn.Module) -> State | None:
    """The state of an enabled model."""
    state: State | None = model.__dict__.get(_STATE)
    return state


# ---- the two outer forwards --------------------------------------------------------------------------------


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
    """Transformers' own decoder, told the positions that the layout says."""
    layout: Layout | None = inputs.get(modules.LAYOUT)
    outermost = layout is None
    if layout is None:
        layout = layout_of(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs)
    if layout.kind == "packed":
        use_cache = refuse_packed_cache(past_key_values, use_cache)
    inputs[modules.LAYOUT] = layout

    def run() -> Any:
        with in_force(layout):
            return type(module).forward(
                module,
                input_ids=input_ids,
                position_ids=layout.positions,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **inputs,
            )

    state = find_state(module)
    if outermost and state is not None:
        return state.strictness.run(module, kind_of(module, layout, past_key_values, use_cache), run)
    return run()


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
    """With labels the loss, and no logits; without, logits in fp32 that were never rounded."""
    layout = layout_of(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, inputs)
    inputs[modules.LAYOUT] = layout

    def run() -> Any:
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
        if labels is not None or inputs.get("shift_labels") is not None:
            loss = loss_of(hidden, module.lm_head, layout, labels, inputs)
        else:
            hidden, samples = keep_rows(hidden, layout, logits_to_keep)
            logits = module.lm_head(hidden, samples)
        return library("modeling_outputs").CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    kind = (*kind_of(module, layout, past_key_values, use_cache), labels is not None)
    output = require_state(module).strictness.run(module, kind, run)
    wanted = module.config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


def logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    **inputs: Any,
) -> Tensor:
    """[B, T] in fp32: log p of targets[b, t] after the tokens up to t; +0 where the target is -100.

    By default the target is the token that follows in the same sample. Rollout and training both call this.
    Further keywords, such as past_key_values, go to the model.
    """
    state = require_state(model)
    if not isinstance(model, state.family.causal):
        raise ArgumentError(
            expected=state.family.causal.__name__,
            received=type(model).__name__,
            remedy="pass the model that has the language-model head",
        )
    causal: Any = model
    past = inputs.get("past_key_values")
    layout = layout_of(input_ids, None, attention_mask, position_ids, past, inputs)
    inputs[modules.LAYOUT] = layout
    wanted = layout.next_of(input_ids) if targets is None else targets
    cached = inputs.setdefault("use_cache", past is not None)

    def run() -> Tensor:
        hidden = causal.model(input_ids=input_ids, return_dict=True, **inputs).last_hidden_state
        refuse_tied_share(causal)
        return logprobs_of(hidden, causal.lm_head, layout, wanted, temperature)

    return state.strictness.run(model, (*kind_of(model, layout, past, cached), "logprobs"), run)


def layout_of(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    inputs: dict[str, Any],
) -> Layout:
    """The layout of a call, from what transformers' models take."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        raise ArgumentError(
            expected="input_ids or inputs_embeds", received="both or neither", remedy="pass exactly one of them"
        )
    if inputs.get("cu_seq_lens_q") is not None and position_ids is None:
        raise ArgumentError(
            expected="packed samples told apart by position_ids",
            received="cu_seq_lens_q alone",
            remedy="pass position_ids that restart at 0 for each sample",
        )
    if getattr(past_key_values, "is_compileable", False):
        raise UnsupportedError(
            expected="a cache that holds the samples' keys and no more",
            received=type(past_key_values).__name__,
            remedy="use transformers.DynamicCache()",
        )
    past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
    rows = (tokens.shape[0], tokens.shape[1])
    return read_layout(rows, past=past, attention_mask=attention_mask, position_ids=position_ids)


def refuse_packed_cache(past_key_values: Any, use_cache: bool | None) -> bool:
    """Keys of packed samples cannot be told apart by a later call: no cache is made of them."""
    if past_key_values is not None or use_cache:
        raise UnsupportedError(
            expected="no cache where samples are packed into one row",
            received="use_cache=True" if past_key_values is None else type(past_key_values).__name__,
            remedy="give each sample its own row of the batch",
        )
    return False


def refuse_tied_share(module: Any) -> None:
    """A weight used twice has a gradient tree for each use; autograd would add the uses within each share."""
    weight = module.lm_head.weight
    tied = share_in_force() is not None and weight is module.model.embed_tokens.weight
    if tied and weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            expected="a leaf for each use of a tied weight, where a share of the global batch is trained on",
            received="one weight of embedding and head",
            remedy="train through isobit.parallel.Gradients, which makes them; or on the whole batch at once",
        )


def kind_of(module: Any, layout: Layout, past_key_values: Any, use_cache: bool | None) -> tuple[Any, ...]:
    """Calls of one kind run the same operators."""
    cached = past_key_values is not None or bool(use_cache)
    return (module.training, torch.is_grad_enabled(), cached, module.dtype, layout.kind)


def require_state(model: nn.Module) -> State:
    """The state of an enabled model, or a refusal."""
    state = find_state(model)
    if state is None:
        raise UnsupportedError(
            expected="an enabled model", received=type(model).__name__, remedy="call isobit.enable(model) first"
        )
    return state
