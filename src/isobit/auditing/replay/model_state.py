"""Leave a model as it was: gradients, buffers and plain attributes, which the runs of an audit change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from isobit.errors import ArgumentError

# Attributes of these types are put back: what a forward counts, remembers or creates at its first call. An object of
# any other class may have ties to others (a process group, a compiled graph) and is left to the module.
PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, torch.Size, Tensor)
CONTAINERS = (list, dict, set)
OF_TORCH = set(vars(nn.Module()))


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and plain attributes back.

    Buffers get their values back, such as the running statistics of a batch norm in training. A buffer or an attribute
    that a forward replaces (`self.count = self.count + 1`) or creates is the old one, or absent, afterwards; lists,
    dictionaries and sets have their old elements.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    undo = [put_back(module) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for one in undo:
            one()
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)


def put_back(module: nn.Module) -> Callable[[], None]:
    """Return a function that undoes what is assigned to a module from now on."""
    if isinstance(module, torch.jit.ScriptModule):
        return lambda: None  # its attributes are in the interpreter
    buffers, kept = dict(module._buffers), set(module._non_persistent_buffers_set)
    before = {name: (value, contents_of(value)) for name, value in plain_attributes(module).items()}

    def undo() -> None:
        replace_contents(module._buffers, buffers)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(kept)
        for name in plain_attributes(module).keys() - before.keys():
            del vars(module)[name]
        for name, (value, contents) in before.items():
            vars(module)[name] = value
            if contents is not None:
                replace_contents(value, contents)

    return undo


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a user's module that hold data; torch's own modules keep their state as buffers."""
    if type(module).__module__.split(".")[0] == "torch":
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_TORCH and (isinstance(value, PLAIN) or type(value) in CONTAINERS)
    }


def contents_of(value: Any) -> Any:
    """Return a shallow copy of a list, dictionary or set, and None of anything else."""
    return value.copy() if type(value) in CONTAINERS else None


def replace_contents(value: Any, contents: Any) -> None:
    """Give a list, dictionary or set these elements, if it has others."""
    same = len(value) == len(contents) and all(
        a is b for a, b in zip(elements_of(value), elements_of(contents), strict=True)
    )
    if same:
        return
    value.clear()
    if isinstance(value, list):
        value.extend(contents)
    else:
        value.update(contents)


def elements_of(value: Any) -> list[Any]:
    """Return the elements of a list, dictionary or set; keys of a dictionary, too."""
    return [x for pair in value.items() for x in pair] if isinstance(value, dict) else list(value)


def check_initialized(model: nn.Module) -> None:
    """Raise ArgumentError for parameters without values: lazy ones, and those on the meta device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    meta = [n for n, t in named if t.is_meta]
    if meta:
        raise ArgumentError(
            expected="a model whose parameters have values",
            received=f"{meta[0]} on the meta device",
            remedy="load the weights first, or model.to_empty(device=…) and initialize them",
        )
    lazy = [n for n, t in named if isinstance(t, (UninitializedParameter, UninitializedBuffer))]
    if lazy:
        raise ArgumentError(
            expected="a model whose parameters have a shape",
            received=f"{lazy[0]}, which gets one in the first call",
            remedy="call the model once with a batch before the audit",
        )
