"""Observe the first optimizer steps of a program: its models, optimizers and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from isobit import bits
from isobit.guards.emitter import Emitter
from isobit.guards.module_replay import ModelCall, tensors_in, unwrapped
from isobit.guards.optimizer_checks import parameters_of
from isobit.guards.step_checks import Options
from isobit.guards.watch_hooks import Watch

LARGEST = 2**24  # elements of a tensor whose digest is taken


class StepsDone(BaseException):
    """Ends the program after the last step; not an Exception, so that programs do not catch it."""


class StepWatch(Watch):
    """A watch that leaves the comparison of parameters to the end, when all optimizers are known."""

    def check_identity(self) -> None:
        """Compare nothing yet."""


class Observer:
    """Global hooks on every module and optimizer, from `install` to `remove`.

    Attributes:
        roots: Models that the program called itself, in training, with their last call.
        watches: A watch per optimizer.
        batches: Per step of the first optimizer, the digests of what models were called with.
        before: Digests of all parameters before the first step.
    """

    def __init__(self, steps: int, max_norm: float | None = None) -> None:
        self.steps, self.max_norm, self.depth = steps, max_norm, 0
        self.roots: dict[int, tuple[nn.Module, ModelCall]] = {}
        self.watches: dict[int, StepWatch] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.batches: list[tuple[str, ...]] = [()]
        self.before: dict[int, str] = {}
        self.pending: ModelCall | None = None
        self.handles: list[Any] = []

    def install(self) -> None:
        """Add the hooks."""
        self.handles = [
            modules.register_module_forward_pre_hook(self.before_call),
            modules.register_module_forward_hook(
                self.after_call, with_kwargs=True, always_call=True
            ),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]

    def remove(self) -> None:
        """Remove the hooks, and end the watches."""
        for handle in self.handles:
            handle.remove()
            # torch 2.13 keeps this entry of a removed hook, and torch.compile warns of it.
            modules._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self.handles = []
        for watch in self.watches.values():
            watch.close()

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Note the state of the generators before a call of the program's own."""
        if self.depth == 0:
            self.pending = ModelCall.of((), {})
        self.depth += 1

    def after_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note a training call of a model that has parameters to train.

        `rest` is keyword arguments and output. If the forward raises, as the recomputation of a checkpoint does to end
        early, torch passes no keyword arguments.
        """
        self.depth -= 1
        is_recomputed = torch._C._current_graph_task_id() != -1  # inside of a backward
        if self.depth or is_recomputed or not (torch.is_grad_enabled() and module.training):
            return
        kwargs = rest[0] if len(rest) == 2 else {}
        if self.pending is None or not any(True for _ in module.parameters()):
            return
        now = self.pending
        self.roots[id(module)] = (
            module,
            ModelCall(args, kwargs, now.generators, now.autocast),
        )
        small = [t for t in tensors_in((args, kwargs)) if t.numel() <= LARGEST and can_digest(t)]
        self.batches[-1] += tuple(bits.digest(tensor.detach().cpu()) for tensor in small)

    def model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model that an optimizer trains: the one called that shares most parameters with it."""
        held = {id(p) for p in parameters_of(optimizer)}
        models = [unwrapped(model) for model, _ in self.roots.values()]
        shared = {
            at: sum(id(p) in held for p in model.parameters()) for at, model in enumerate(models)
        }
        best = max(shared, key=lambda at: shared[at], default=None)
        if best is None:
            return nn.Module()
        covering = [at for at in shared if shared[at]]
        return models[best] if len(covering) <= 1 else nn.ModuleList(models[at] for at in covering)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Start a watch at the first step of an optimizer; its own hook runs next."""
        if id(optimizer) in self.watches:
            return
        if not self.before:
            self.before = {
                id(p): bits.digest(p.detach())
                for model, _ in self.roots.values()
                for p in model.parameters()
                if can_digest(p)
            }
        options = Options("log", self.max_norm, 1, self.steps, 0, None, None, None, None, (), False)
        watch = StepWatch(self.model_of(optimizer), optimizer, options, Emitter([]))
        watch.call = next(
            (call for m, call in self.roots.values() if unwrapped(m) is watch.model), None
        )
        self.watches[id(optimizer)] = watch
        self.optimizers.append(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step, and end the program after the last."""
        if optimizer is not self.optimizers[0]:
            return
        if self.watches[id(optimizer)].steps >= self.steps:
            raise StepsDone
        self.batches.append(())


def can_digest(tensor: Tensor) -> bool:
    """Return whether a tensor has bits to read here."""
    return (
        tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "placements")
    )
