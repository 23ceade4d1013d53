"""`enable`, `disable` and `enabled`: replace the forwards of a transformers model, and put them back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from isobit.comparing.checkpoints.weight_digests import warn_of_rounded_frequencies
from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.adapters import inner_model
from isobit.integrations.transformers.forwards import forward_base, forward_causal, forward_logits
from isobit.integrations.transformers.parts.attention import ATTENTION, register_attention
from isobit.integrations.transformers.parts.heads import (
    EVERY_TOKEN,
    FIRST_TOKEN,
    MASKED,
    SAMPLES,
    TOKENS,
)
from isobit.integrations.transformers.parts.lora import MODES
from isobit.integrations.transformers.parts.meaning import compare_with_stock, score_tokens
from isobit.integrations.transformers.parts.recognition import Outer, make_plan
from isobit.integrations.transformers.parts.rotary import ANGLES
from isobit.integrations.transformers.refusals import check_tree, refuse_wrapper
from isobit.integrations.transformers.state import (
    OWNER,
    STATE,
    State,
    Uses,
    find_owner,
    find_state,
)
from isobit.integrations.transformers.task_heads import (
    forward_every_token,
    forward_first_token,
    forward_masked_lm,
    forward_sequence_classification,
    forward_token_classification,
)
from isobit.parallel.tensor.shard import tp_group_of

Model = TypeVar("Model", bound=nn.Module)
OUTER = Outer(
    forward_causal,
    forward_base,
    forward_logits,
    {
        SAMPLES: forward_sequence_classification,
        TOKENS: forward_token_classification,
        MASKED: forward_masked_lm,
        FIRST_TOKEN: forward_first_token,
        EVERY_TOKEN: forward_every_token,
    },
)
_changing = threading.RLock()  # held while forwards are installed or restored


def enable(model: Model, *, strict: bool = True, adapters: str | None = None) -> Model:
    """Compute a transformers model with isobit's operators, so that a sample's bits do not depend on its batch.

    The model is changed in place: parameters, names and the class stay, and each module's forward is replaced.
    Which rows form a sample is read from attention_mask, position_ids and the cache. Every call checks that the
    modules are those that were prepared, and raises if adapters, hooks or layers were added that would not be
    computed. Enabling an enabled model changes nothing but `strict`. Rotary frequencies that were rounded, as
    model.to(torch.bfloat16) does, are reported as a RotaryWarning.

    Args:
        model: A causal language model, with or without its head, whose modules are known parts: of transformers
            (`isobit families` lists the types), or with classes that `isobit.parts.register` was called for.
        strict: Also watch the operators of each new kind of call, and raise if a stock operator ran whose result
            depends on the order of addition.
        adapters: How LoRA of a PEFT model is computed: "beside", as PEFT does, W x + s·B(A x); or "merged", with the
            weight round(W + s·B A), which a server can be given. W is not written. By default "beside", or as the
            model is enabled already.

    Returns:
        The same model.

    Raises:
        ArgumentError: If `adapters` is neither.
        UnsupportedError: If a module, the head, the mask or the configuration is not known; the message names it.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        >>> model = isobit.enable(Qwen3ForCausalLM(config).eval())
        >>> ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> with torch.no_grad():
        ...     together, alone = model(ids).logits[:1], model(ids[:1]).logits
        >>> torch.equal(together, alone)
        True
    """
    with _changing:
        prepare(inner_model(model), strict, adapters).explicit = True
    warn_of_rounded_frequencies(model)
    return model


def disable(model: Model) -> Model:
    """Put stock PyTorch's forward functions back. Does nothing if the model is not enabled.

    Args:
        model: The model that was passed to `isobit.enable`.

    Returns:
        The same model.

    Raises:
        UnsupportedError: Inside `with isobit.enabled(model):`, or if parameters are split over ranks.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
        >>> isobit.disable(isobit.enable(model)) is model
        True
    """
    inner = inner_model(model)
    with _changing:
        uses = find_uses(inner)
        if uses is not None and uses.scopes:
            raise UnsupportedError(
                expected="disable outside of `with isobit.enabled(model):`",
                received=f"a call inside {uses.scopes} such block{'s' * (uses.scopes > 1)}",
                remedy="leave the block: it puts back what was before it",
            )
        if uses is not None:
            release(inner, uses, explicit=False)
    return model


@contextmanager
def enabled(model: Model, *, strict: bool = True, adapters: str | None = None) -> Iterator[Model]:
    """Enable a model for the length of a `with` block; nested blocks and an enabled model are fine.

    Args:
        model: As for `isobit.enable`.
        strict: As for `isobit.enable`.
        adapters: As for `isobit.enable`.

    Returns:
        A context manager that enters with the same model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with isobit.enabled(model):
        ...     loss = model(ids, labels=ids).loss
    """
    inner = inner_model(model)
    with _changing:
        prepare(inner, strict, adapters).scopes += 1
    warn_of_rounded_frequencies(model)
    try:
        yield model
    finally:
        with _changing:
            uses = find_uses(inner)
            if uses is not None:  # else the model's state was replaced inside the block
                release(inner, uses, scopes=uses.scopes - 1)


def prepare(model: nn.Module, strict: bool, adapters: str | None = None) -> Uses:
    """Install the forwards if they are not there, and return who uses them."""
    if adapters not in (None, *MODES):
        raise ArgumentError(
            expected=f"adapters= one of {', '.join(MODES)}",
            received=repr(adapters),
            remedy='pass adapters="beside", or leave it out',
        )
    if not isinstance(model, nn.Module):
        refuse_wrapper(model)
    state = find_state(model)
    if state is None and (owner := find_owner(model)) is not None:
        return owner.backbone_alone
    if state is None:
        refuse_wrapper(model)
        plan = make_plan(model, OUTER, adapters or MODES[0])
        check_tree(plan.parts, plan.names, plan.inside, installed=False)
        stock = score_tokens(plan) if plan.unshipped else None
        state = State(plan, OUTER, strict)
        install(model, state)
        if stock is not None:
            try:
                compare_with_stock(plan, stock)
            except BaseException:
                restore(model, state)
                raise
    elif adapters not in (None, state.plan.adapters):
        raise UnsupportedError(
            expected=f"adapters={state.plan.adapters!r}, as the model is enabled",
            received=f"adapters={adapters!r}",
            remedy=f"call isobit.disable(model), then isobit.enable(model, adapters={adapters!r})",
        )
    elif strict:
        state.strictness.wanted = True
    return state.uses


def find_uses(model: nn.Module) -> Uses | None:
    """Return who uses an enabled model, or an enabled model's backbone."""
    if not isinstance(model, nn.Module):
        refuse_wrapper(model)
    if (state := find_state(model)) is not None:
        return state.uses
    owner = find_owner(model)
    return owner.backbone_alone if owner is not None else None


def release(
    model: nn.Module, uses: Uses, explicit: bool | None = None, scopes: int | None = None
) -> None:
    """End one use; the last one restores the stock forwards."""
    state = find_state(model)
    left = Uses(
        uses.explicit if explicit is None else explicit, uses.scopes if scopes is None else scopes
    )
    if not left and state is not None:
        refuse_split(model)
        restore(model, state)
    uses.explicit, uses.scopes = left.explicit, left.scopes


def refuse_split(model: nn.Module) -> None:
    """Raise if parameters are split over ranks: stock operators cannot compute such a model."""
    if any(tp_group_of(module) is not None for module in model.modules()):
        raise UnsupportedError(
            expected="a whole model, which stock operators can compute",
            received="one whose parameters are split over ranks",
            remedy="call isobit.integrations.transformers.unshard(model) on every rank first",
        )


def install(model: Any, state: State) -> None:
    """Replace forward on each module instance, on all of them or on none."""
    register_attention()
    plan = state.plan
    model.__dict__[STATE] = state
    if plan.head is not None:
        plan.backbone.__dict__[OWNER] = state
    try:
        for module, part in plan.parts.items():
            if part.forward is None:
                continue
            before = module.__dict__.get("forward")
            state.replaced.append((module, before))
            if before is None:
                module.__dict__["forward"] = part.bind(module)
        for config in plan.configs:
            state.attention.append((config, config._attn_implementation))
            config._attn_implementation = ATTENTION
    except BaseException:
        restore(model, state)
        raise


def restore(model: Any, state: State) -> None:
    """Put the stock forwards back."""
    for module, forward in state.replaced:
        module.__dict__.pop(ANGLES, None)
        if forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward
    for config, chosen in state.attention:
        if config._attn_implementation == ATTENTION:
            config._attn_implementation = chosen
    model.__dict__.pop(STATE, None)
    if state.plan.head is not None:
        state.plan.backbone.__dict__.pop(OWNER, None)
