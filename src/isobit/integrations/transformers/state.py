"""What an enabled model remembers: how often it was enabled, what to put back, and what was checked."""

from __future__ import annotations

from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.families import Family
from isobit.integrations.transformers.refusals import refuse_wrapper
from isobit.integrations.transformers.strictness import Strictness
from isobit.integrations.transformers.structure import Structure

STATE = "_isobit_state"  # on the model that was enabled
OWNER = "_isobit_owner"  # on its backbone: the state of the model with the head


class State:
    """One enabled model's."""

    def __init__(self, model: nn.Module, family: Family, strict: bool) -> None:
        self.family, self.depth = family, 0
        self.structure, self.strictness = Structure(model, family), Strictness(strict)
        self.attention: str | None = None
        self.replaced: list[
            tuple[nn.Module, Any]
        ] = []  # (module, the forward its instance had, or None)
        self.backbone_alone = (
            0  # how often the backbone was enabled by itself, which allows to call it alone
        )
        self.warned_of_accumulation = False


def find_state(model: nn.Module) -> State | None:
    """The state of an enabled model."""
    state: State | None = model.__dict__.get(STATE)
    return state


def find_owner(model: nn.Module) -> State | None:
    """Of a backbone: the state of the enabled model that it is part of."""
    state: State | None = model.__dict__.get(OWNER)
    return state


def require_state(model: nn.Module) -> State:
    """The state of an enabled model, or a refusal."""
    state = find_state(model) if isinstance(model, nn.Module) else None
    if state is None:
        refuse_wrapper(model)
        raise UnsupportedError(
            expected="an enabled model",
            received=type(model).__name__,
            remedy="call isobit.enable(model) first",
        )
    return state
