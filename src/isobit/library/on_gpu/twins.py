"""Wrong Triton kernels: the twins of planted subjects that do not run an operator's Triton executor.

[Note: twins]
A twin is the operator itself, while kernels of its executor are replaced by kernels from a changed source, or a
function of its module by another one. Both passes run like that: autograd calls the backward pass after a subject has
returned, so a twin computes it again.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isobit.library.claims import replaced, with_backward
from isobit.ops.gpu.executors import OPERATORS

Change = Callable[[], Any]  # returns a context manager


@cache
def changed_module(name: str, *changes: tuple[str, str]) -> ModuleType:
    """Return a copy of a module with its source changed; its kernels are new ones, its operators are not registered."""
    source = inspect.getsource(import_module(name))
    for old, new in changes:
        if old not in source:
            raise AssertionError(f"{name} has no longer {old!r}: the twin must be written again")
        source = source.replace(old, new)
    source = source.replace("@triton_operator(", "@(lambda *_, **__: lambda function: function)(")
    copy = ModuleType(f"{name}_changed_{abs(hash(changes))}")
    copy.__file__ = f"<{copy.__name__}>"
    # Triton reads the source of a kernel.
    linecache.cache[copy.__file__] = (len(source), None, source.splitlines(True), copy.__file__)
    sys.modules[copy.__name__] = copy
    exec(compile(source, copy.__file__, "exec"), vars(copy))
    return copy


def source(name: str, *changes: tuple[str, str]) -> Change:
    """Return a change: kernels of a module, wherever isobit's operators use them, have another source."""

    @contextmanager
    def change() -> Iterator[None]:
        for operator in OPERATORS:  # one that were imported meanwhile would keep the wrong kernels
            import_module(f"isobit.ops.{operator}.triton")
        own = dict(vars(import_module(name)))
        others = vars(changed_module(name, *changes))
        with ExitStack() as stack:
            for module in [m for n, m in list(sys.modules.items()) if n.startswith("isobit.ops.")]:
                for key, value in list(vars(module).items()):
                    if is_kernel(value) and own.get(key) is value and value.__module__ == name:
                        stack.enter_context(replaced(module, key, others[key]))
            yield

    return change


def is_kernel(value: Any) -> bool:
    """Return whether a value is a function that Triton compiles."""
    return type(value).__name__ in ("JITFunction", "InterpretedFunction")


def function(place: str, name: str, make: Callable[[Any], Any]) -> Change:
    """Return a change: a name of a module, or of its `module:class`, is what `make` returns for the right one."""

    @contextmanager
    def change() -> Iterator[None]:
        module, _, inner = place.partition(":")
        home: Any = import_module(module)
        home = getattr(home, inner) if inner else home
        with replaced(home, name, make(getattr(home, name))):
            yield

    return change


def twin(subject: Callable[..., Tensor], *changes: Change) -> Callable[..., Tensor]:
    """Return a subject that computes both passes while the changes are made."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            yield

    def wrong(*given: Any, **named: Any) -> Tensor:
        places = [at for at, value in enumerate(given) if isinstance(value, Tensor)]

        def call(*tensors: Tensor) -> Tensor:
            filled = list(given)
            for at, tensor in zip(places, tensors, strict=True):
                filled[at] = tensor
            with planted():
                return subject(*filled, **named)

        def backward(grad: Tensor, *tensors: Tensor) -> list[Tensor | None]:
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            with torch.enable_grad():
                y = call(*leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            with planted():
                found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True))
            return [next(found) if leaf.requires_grad else None for leaf in leaves]

        return with_backward(call, backward, *(given[at] for at in places))

    return wrong
