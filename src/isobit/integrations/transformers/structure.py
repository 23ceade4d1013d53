"""Check at every call that the modules of an enabled model are those that `enable` prepared.

[Note: what a call looks at] A gated MLP computes its activation itself and never calls that module: a hook put on it
later would have no effect. An adapter or a layer put in the place of another would compute in its own order. So each
call gathers what decides which code runs: the type of each module, its installed forward, its children, its hooks, the
types of its parameters, the number of its attributes, the forwards of their classes, and torch's global hooks. The
gathering is a few `map`s over lists made once, without a line of Python per module, and the lists are compared with
those of the last call that was accepted. Only where they differ are the modules recognised anew and inspected one by
one (refusals.py), and strict mode then watches the operators of each kind of call anew. Hooks of modules that are
called run; these are gathered only after torch made a handle of some hook, which it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from isobit.integrations.transformers.parts.heads import HEAD
from isobit.integrations.transformers.parts.lora import active_module
from isobit.integrations.transformers.parts.recognition import Outer, Plan, make_plan
from isobit.integrations.transformers.refusals import (
    check_tree,
    refuse_global_hooks,
    refuse_head_hooks,
    refuse_model_hooks,
)

_forward, _children = itemgetter("forward"), itemgetter("_modules")
_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_class_forward = attrgetter("forward")


class Structure:
    """The module tree of one enabled model, as it was when it was last accepted."""

    def __init__(self, plan: Plan, outer: Outer) -> None:
        self.plan, self._outer = plan, outer
        self._known: Snapshot | None = None

    def check(self, *, strict: bool, calls_head: bool = True, calls_model: bool = True) -> bool:
        """Raise if the tree has something that would not be computed.

        Args:
            strict: also raise on torch's global hooks, which miss the modules that are not called.
            calls_head: the language-model head is called as a module, so that its hooks run.
            calls_model: the model itself is.

        Returns:
            True where modules or hooks changed since the last call, so that other operators may run.
        """
        known, changed = self._known, False
        if known is None or not known.is_current():
            plan = make_plan(self.plan.model, self._outer, self.plan.adapters)
            check_tree(plan.parts, plan.names, plan.inside, installed=True)
            fresh = Snapshot(plan)
            self.plan = plan
            changed = known is None or fresh.code != known.code or fresh.hooks != known.hooks
            self._known = known = fresh
        model = self.plan.model
        if not calls_head and is_head_hooked(getattr(model, HEAD, None)):
            refuse_head_hooks()
        if not calls_model and is_hooked(model):
            refuse_model_hooks()
        if strict and any(global_hooks()):
            refuse_global_hooks()
        return changed

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the snapshot: a copy has its own modules."""
        return {**self.__dict__, "_known": None}


class Snapshot:
    """A snapshot of what decides which code runs, and how to take it again."""

    def __init__(self, plan: Plan) -> None:
        self._modules = list(plan.parts)
        self._tables = [vars(module) for module in self._modules]
        self._classes = plan.classes
        # The root's forward may be wrapped by others, as accelerate does: whoever gets here came through it.
        self._replaced = [table for table in self._tables[1:] if "forward" in table]
        self._parents = [table for table in self._tables if table["_modules"]]
        self._owners = [table["_parameters"] for table in self._tables if table["_parameters"]]
        self._inside = [vars(module) for module in plan.inside]
        self.registered = RemovableHandle.next_id
        self.code, self.counts = self._gather_code(), self._gather_counts()
        self.hooks = self._gather_hooks()

    def is_current(self) -> bool:
        """Return whether a new snapshot is the same."""
        try:
            if self._gather_code() != self.code or self._gather_counts() != self.counts:
                return False
        except KeyError:
            return False
        now = RemovableHandle.next_id
        if self.registered != now:
            if self._gather_hooks() != self.hooks:
                return False
            self.registered = now
        return True

    def _gather_code(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._modules)),
            list(map(_forward, self._replaced)),
            list(chain.from_iterable(map(dict.values, map(_children, self._parents)))),
            list(map(_class_forward, self._classes)),
            contents(chain.from_iterable(map(_hooks, self._inside))),
            contents(global_hooks()),
        )

    def _gather_hooks(self) -> list[list[tuple[int, Any]]]:
        return contents(chain.from_iterable(map(_hooks, self._tables)))

    def _gather_counts(self) -> tuple[list[Any], ...]:
        values = chain.from_iterable(map(dict.values, self._owners))
        return list(map(len, self._tables)), list(map(type, values))


def is_hooked(module: nn.Module | None) -> bool:
    """Return whether a module has hooks."""
    return module is not None and any(_hooks(vars(module)))


def is_head_hooked(head: Any) -> bool:
    """Return whether a head has hooks, or the copy of it that PEFT calls."""
    return head is not None and (is_hooked(head) or is_hooked(active_module(head)))


def contents(hooks: Iterable[dict[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Return the hooks of each dictionary that has any, with their ids."""
    return [list(held.items()) for held in filter(None, hooks)]


def global_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks that torch calls for every module of the process."""
    return (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )


def is_called(model: nn.Module, module: nn.Module) -> bool:
    """Return whether every kind of call of an enabled model calls this module, so that its hooks run."""
    state: Any = vars(model).get("_isobit_state")
    inside = () if state is None else state.structure.plan.inside
    return not (module in inside or module in (model, getattr(model, HEAD, None)))
