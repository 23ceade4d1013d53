"""Call what a subject's name leads to as a function of tensors: functions, modules, their classes, autograd Functions.

[Note: modules as functions]
A module keeps its parameters, while contracts give them as the last arguments. A module is called by `functional_call`,
with the last tensors of a call as its parameters, in their order. A class is made anew for each call, with the sizes of
these tensors.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from isobit.errors import ContractError

PARAMETERS = ("weight", "bias")


def split_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split `package:function(eps=1e-6)` into the reference and its keyword arguments, which are plain values."""
    reference, parenthesis, rest = name.partition("(")
    if not parenthesis:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not keyword=value")
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        if "None" in named:
            raise ValueError("** is not a keyword")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ContractError(
            expected="keyword=value pairs of plain values",
            received=f"({rest}: {error}",
            remedy="for example package.module:function(eps=1e-6)",
        ) from None
    return reference, named


def as_function(found: Any, named: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of tensors; `named` goes to the call, or to the constructor of a class."""
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return lambda *given, **more: call_module(make(found, given, named), given, more)
    if inspect.isclass(found) and issubclass(found, Function):
        return partial(found.apply, **named)
    if isinstance(found, nn.Module):
        return lambda *given, **more: call_module(found, given, {**named, **more})
    if not callable(found):
        raise ContractError(
            expected="a subject that can be called",
            received=f"{found!r:.80}, a {type(found).__name__}",
            remedy="name a function",
        )
    return partial(found, **named) if named else found


def make(kind: type[nn.Module], given: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
    """Make a module: sizes that its constructor asks for are those of the parameters that it is given."""
    wanted = [
        p
        for p in inspect.signature(kind).parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name not in named
    ]
    tensors = [t for t in given if isinstance(t, Tensor)][1:]  # after the input
    sizes = tuple(tensors[0].shape) if tensors else ()
    if issubclass(kind, nn.Linear):
        sizes = sizes[::-1]  # [out, in]
    if len(wanted) > len(sizes):
        names = ", ".join(p.name for p in wanted)
        raise TypeError(f"{kind.__name__} needs {names}")
    return kind(*sizes[: len(wanted)], **named)


def call_module(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a module with the last tensors as its parameters."""
    names = [name for name, _ in module.named_parameters()]
    if not set(names) <= set(PARAMETERS):
        raise TypeError(f"parameters {', '.join(names[:5])}: only weight and bias can be given")
    tensors = sum(isinstance(t, Tensor) for t in given)
    if tensors <= len(names):
        raise TypeError(f"{type(module).__name__} has {len(names)} parameters of {tensors} tensors")
    cut = tensors - len(names)
    parameters = dict(zip(names, given[cut:tensors], strict=True))
    return functional_call(module, parameters, (*given[:cut], *given[tensors:]), named)
