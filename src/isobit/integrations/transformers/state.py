"""The state of an enabled model: who uses it, which forwards to restore, and what was checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.adapters import inner_model
from isobit.integrations.transformers.parts.heads import Head
from isobit.integrations.transformers.parts.recognition import Outer, Plan
from isobit.integrations.transformers.refusals import refuse_wrapper
from isobit.integrations.transformers.strictness import Strictness
from isobit.integrations.transformers.structure import Structure

STATE = "_isobit_state"  # on the model that was enabled
OWNER = "_isobit_owner"  # on its backbone: the state of the model with the head


@dataclass
class Uses:
    """Who wants a model enabled: `isobit.enable`, and the `with isobit.enabled` blocks that are open."""

    explicit: bool = False
    scopes: int = 0

    def __bool__(self) -> bool:
        return self.explicit or self.scopes > 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the blocks: a copy made inside one is enabled until `disable`."""
        return Uses, (bool(self), 0)


class State:
    """The state of one enabled model."""

    def __init__(self, plan: Plan, outer: Outer, strict: bool) -> None:
        self.uses = Uses()
        self.structure, self.strictness = Structure(plan, outer), Strictness(strict)
        # (config, the attention implementation that it had)
        self.attention: list[tuple[Any, str | None]] = []
        # (module, the forward that its instance had, or None)
        self.replaced: list[tuple[nn.Module, Any]] = []
        self.backbone_alone = (
            Uses()
        )  # of the backbone by itself: it may then be called without the head
        self.warned_of_accumulation = False

    @property
    def plan(self) -> Plan:
        """The parts of the model, as they were when its modules were last accepted."""
        return self.structure.plan

    @property
    def head(self) -> Head | None:
        """The head of the model; None if it is a backbone."""
        return self.structure.plan.head


def find_state(model: nn.Module) -> State | None:
    """Return the state of an enabled model, or of the enabled model inside of a PEFT model; or None."""
    state: State | None = inner_model(model).__dict__.get(STATE)
    return state


def find_owner(model: nn.Module) -> State | None:
    """Return the state of the enabled model whose backbone this is, or None."""
    state: State | None = model.__dict__.get(OWNER)
    return state


def require_state(model: nn.Module) -> State:
    """Return the state of an enabled model, or raise UnsupportedError."""
    state = find_state(model) if isinstance(model, nn.Module) else None
    if state is None:
        refuse_wrapper(model)
        raise UnsupportedError(
            expected="an enabled model",
            received=type(model).__name__,
            remedy="call isobit.enable(model) first",
        )
    return state
