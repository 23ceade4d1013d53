"""`enable(model)`: transformers' Qwen3, Qwen2 and Llama with one order of addition."""

from __future__ import annotations

import inspect
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers import modules
from isobit.integrations.transformers.families import find_family, plan
from isobit.integrations.transformers.forwards import forward_base, forward_causal, logprobs
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import refuse_wrapper
from isobit.integrations.transformers.state import (
    OWNER,
    STATE,
    State,
    find_owner,
    find_state,
    require_state,
)
from isobit.parallel.tensor.shard import ranks_of

__all__ = ["Enabled", "NotTheModelError", "enable", "find_state", "logprobs", "require_state"]


class NotTheModelError(UnsupportedError, AttributeError, TypeError):
    """What `enable` returns was used as if it were the model."""


class Enabled:
    """What `enable` made: undone by `disable`, or by leaving the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model

    def disable(self) -> None:
        """Undoes this `enable`; the last of nested ones puts stock back. A second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        if find_state(model) is None and (owner := find_owner(model)) is not None:
            owner.backbone_alone -= 1
        elif (state := find_state(model)) is not None:
            if state.depth == 1 and any(ranks_of(module) is not None for module in model.modules()):
                self._model = model
                raise UnsupportedError(
                    expected="a whole model, which stock operators can compute",
                    received="one whose parameters are split over ranks",
                    remedy="call isobit.integrations.transformers.tensor_parallel.unshard(model) on every rank first",
                )
            state.depth -= 1
            if not state.depth:
                restore(model, state)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("a call")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse(f"the attribute {name!r}")

    def _refuse(self, received: str) -> NoReturn:
        raise NotTheModelError(
            expected="the model itself: isobit.enable changes it in place, and returns the object that undoes it",
            received=f"{received} of what isobit.enable returned",
            remedy="write `enabled = isobit.enable(model)` and go on with `model`",
        )

    def __repr__(self) -> str:
        return (
            f"Enabled({'nothing: disabled' if self._model is None else type(self._model).__name__})"
        )


def enable(model: nn.Module, *, strict: bool = True) -> Enabled:
    """Runs the model by isobit's operators: the same parameters and names, one order for every sum.

    Changes the model in place, and returns what undoes it. Samples are read from attention_mask, position_ids and the
    cache. Every call checks that the modules are those that were prepared, and refuses adapters, hooks and layers that
    would not be computed. `strict` also watches the operators of each kind of call when it is made first, and again
    when modules or hooks changed, and raises where a stock operator that carries an order ran. Nested calls count.
    """
    if not isinstance(model, nn.Module):
        refuse_wrapper(model)
    state = find_state(model)
    if state is None and (owner := find_owner(model)) is not None:
        owner.backbone_alone += 1
        return Enabled(model)
    if state is None:
        state = State(model, find_family(model), strict)
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
    state.structure.expect(whole)
    model.__dict__[STATE] = state
    if isinstance(model, state.family.causal):
        model.model.__dict__[OWNER] = state
    try:
        for module, forward in chosen:
            before = module.__dict__.get("forward")
            state.replaced.append((module, before))
            if before is None:
                module.__dict__["forward"] = bind(module, forward)
        model.config._attn_implementation = modules.ATTENTION
    except BaseException:
        restore(model, state)
        raise


def bind(module: nn.Module, forward: Any) -> Any:
    """A partial of a plain function: copied and pickled with the model, and seen by nn.Module as forward."""
    bound: Any = partial(forward, module)
    bound.__signature__ = inspect.signature(module.forward)
    bound.isobit_forward = forward
    return bound


def restore(model: Any, state: State) -> None:
    """Puts back what was there."""
    for module, forward in state.replaced:
        module.__dict__.pop(modules.ANGLES, None)
        if forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward
    if model.config._attn_implementation == modules.ATTENTION:
        model.config._attn_implementation = state.attention
    model.__dict__.pop(STATE, None)
    if isinstance(model, state.family.causal):
        model.model.__dict__.pop(OWNER, None)
