"""Hooks on the modules of a model: see their calls, and put other results in the place of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.judging.accuracy import random_states
from isobit.auditing.replay.call import tensors_of


@dataclass
class Called:
    """A call of a module: its path, what it was called with, and what it returned.

    Attributes:
        path: the path of the module.
        module: the module.
        args: what it was called with.
        kwargs: what it was called with by name.
        out: what it returned.
        writes: whether it wrote to a tensor that it was called with.
        states: the states of all devices' random numbers before the call.
        draws: whether it drew random numbers.
    """

    path: str
    module: nn.Module
    args: Any
    kwargs: Any
    out: Any
    writes: bool = False
    states: Sequence[Tensor] = ()
    draws: bool = False

    def with_its_random_numbers(self, program: Callable[[], Any]) -> Any:
        """Run something with the random numbers that the call started with, and leave those of the run alone."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            if self.states:
                torch.set_rng_state(self.states[0])
                for device, state in enumerate(self.states[1:]):
                    torch.cuda.set_rng_state(state, device)
            return program()


class Hooks:
    """Replace results of modules while the context is open.

    Args:
        model: The model.
        paths: The modules that are seen.
        replace: Called with each call; returns another result, or None to leave it.
        outermost: Whether only calls that are not inside another one are seen.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Collection[str],
        replace: Callable[[Called], Any],
        outermost: bool = False,
    ) -> None:
        """Note which modules are seen."""
        self.replace, self.outermost = replace, outermost
        self.seen = [(path, model.get_submodule(path)) for path in paths]
        self.handles: list[Any] = []
        self.open: list[tuple[list[int], list[Tensor]]] = []

    def __enter__(self) -> Hooks:
        """Register the hooks."""
        for path, module in self.seen:
            self.handles.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
            after = self.after(path)
            self.handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the versions of the inputs and the random numbers."""
        self.open.append((versions((args, kwargs)), random_states()))

    def after(self, path: str) -> Callable[..., Any]:
        """Return the hook of a path."""

        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            known, states = self.open.pop()
            if self.outermost and self.open:
                return None
            writes = versions((args, kwargs)) != known
            draws = not all(map(torch.equal, states, random_states()))
            return self.replace(Called(path, module, args, kwargs, out, writes, states, draws))

        return hook


def versions(values: Any) -> list[int]:
    """Return the versions of all tensors in a structure; an inference tensor has none."""
    return [0 if t.is_inference() else t._version for t in tensors_of(values)]


def count_calls(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, int], int]:
    """Run a model; return the number of the last call of each module that is called, children first, and of all calls.

    No hook is used, since a module that is not called may not allow one: its weight may be read by another module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    numbers: dict[str, int] = {}
    total = 0
    called = nn.Module.__call__

    def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        out = called(module, *args, **kwargs)
        path = paths.get(id(module))
        if path is not None:
            numbers[path] = total
            total += 1
        return out

    nn.Module.__call__ = count  # type: ignore[method-assign]
    try:
        run()
    finally:
        nn.Module.__call__ = called  # type: ignore[method-assign]
    return numbers, total
