"""A claim with the code that it names, and the function from tensors to one tensor that is judged."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from isobit.contracts.judge.recipes import Case, Recipe
from isobit.contracts.judge.sabotage import LIBRARY
from isobit.contracts.judge.transforms import Arguments, Run
from isobit.contracts.judge.trusted_code import resolve
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.options import Options
from isobit.errors import ContractError

# Call what a subject's name leads to as a function of tensors: functions, modules, their classes, autograd Functions.
#
# [Note: modules as functions] A module keeps its parameters, while contracts give them as the last arguments. A
# module is called by `functional_call`, with the last tensors of a call as its parameters, in their order. A class is
# made anew for each call, with the sizes of these tensors.

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


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
UPSTREAM = "upstream gradient"


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is: no sabotage."""
    return function


@dataclass(frozen=True)
class Bound:
    """A claim of a contract with its code: all that judging it needs besides a case.

    Attributes:
        subject: What is judged, called with the drawn arguments.
        code: The functions that parameters and the proof name, by reference.
        wrap: The built-in sabotage.
        gradients: Compute outputs as in training: gradients enabled, inputs require them.
    """

    contract: Contract
    claim: Claim
    options: Options
    subject: Callable[..., Any]
    code: dict[str, Any] = field(default_factory=dict)
    wrap: Wrapper = unchanged
    gradients: bool = False

    def named(self, key: str) -> Any:
        """Return the code that a parameter of the claim names."""
        return self.code[str(self.claim.params[key])]

    def case(self, recipe: Recipe) -> Case:
        """Return the case that a recipe of this contract's inputs describes."""
        return Case(recipe, self.contract.inputs[recipe.inputs])

    def plant(self, name: str) -> Bound:
        """Return the same claim on a wrong subject: a built-in sabotage by name, or `package:function`."""
        if name in LIBRARY:
            return replace(self, wrap=LIBRARY[name])
        if ":" not in name:
            raise ContractError(
                expected="a built-in sabotage, or package:function",
                received=name,
                remedy=f"use one of: {', '.join(LIBRARY)}",
            )
        wrong = resolve(name, self.options.trusted)
        return replace(self, subject=called(self.contract, wrong, self.options))

    def judged(self, case: Case) -> tuple[Run, Arguments]:
        """Return the function that is judged, from tensors to the output or to a gradient, and its arguments."""
        of = self.claim.params.get("of")
        if of not in case.inputs.arguments or of == "output":
            call = self.wrap(self.subject)
            call = with_gradients(call) if self.gradients else call
            return lambda arguments: only_tensor(
                call(*arguments.values(), **case.options)
            ), case.arguments
        arguments = with_upstream(self.subject, case)
        names = tuple(arguments)
        call = self.wrap(
            lambda *given: gradient(
                self.subject, str(of), dict(zip(names, given, strict=True)), case
            )
        )
        return lambda arguments: call(*arguments.values()), arguments


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """Call as training does. If that raises, the subject does not support gradients: call without."""

    def trained(*given: Any, **options: Any) -> Any:
        try:
            with torch.enable_grad():
                return call(*(requiring_gradients(value) for value in given), **options)
        except (Exception, SystemExit):
            return call(*given, **options)

    return trained


def requiring_gradients(value: Any) -> Any:
    """Return a tensor with the same memory that is a leaf of autograd."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_real else value


def only_tensor(value: Any) -> Tensor:
    """Return a copy of a tensor, which a subject may overwrite; raise for anything else."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected the subject to return a tensor, received {type(value).__name__}")
    return value.detach().clone()  # a subject may return the same buffer again


def gradient(function: Callable[..., Any], of: str, given: Arguments, case: Case) -> Tensor:
    """Compute the gradient of an argument, from an upstream gradient that is one of the arguments."""
    upstream = given.pop(UPSTREAM)
    upstream = upstream.clone() if upstream.is_contiguous() else upstream  # it may be written to
    given[of] = given[of].detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(*given.values(), **case.options), given[of], upstream)[
            0
        ]


def with_upstream(function: Callable[..., Any], case: Case) -> Arguments:
    """Add an upstream gradient of the output's shape to the arguments."""
    shape = tuple(only_tensor(function(*case.arguments.values(), **case.options)).shape)
    return {**case.arguments, UPSTREAM: case.draw(shape, 50)}


# Find the code that a claim names.


def subject_name(contract: Contract, options: Options) -> str:
    """Return the subject as `package:function`; empty if neither contract nor options name one."""
    chosen = options.subject
    if not chosen:
        return contract.subject
    return contract.subjects.get(chosen, chosen if ":" in chosen else "")


def find_subject(contract: Contract, options: Options) -> Callable[..., Any]:
    """Import the subject.

    Raises:
        ContractError: The package is not trusted, there is no such name, or it is not callable.
    """
    return called(contract, named_function(contract, options), options)


def named_function(contract: Contract, options: Options) -> Callable[..., Any]:
    """Import what the subject's name leads to, as a function of its own arguments."""
    reference, named = split_name(subject_name(contract, options))
    return as_function(resolve(reference, options.trusted), named)


def called(
    contract: Contract, function: Callable[..., Any], options: Options
) -> Callable[..., Any]:
    """Return a function of the drawn arguments, which calls one on the device, in the contract's own way."""
    if options.device != "cpu":
        function = on_device(function, options.device)
    return partial(resolve(contract.call, options.trusted), function) if contract.call else function


def on_device(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Call with tensors on a device, and return a tensor on the CPU; gradients pass both ways."""

    def moved(value: Any, place: str) -> Any:
        return value.to(place) if isinstance(value, Tensor) else value

    def call(*given: Any, **named: Any) -> Any:
        found = function(
            *(moved(value, device) for value in given),
            **{name: moved(value, device) for name, value in named.items()},
        )
        return moved(found, "cpu")

    return call


def bind(contract: Contract, claim: Claim, options: Options) -> Bound:
    """Import the subject of a claim and every function that its parameters and its proof name."""
    subject = find_subject(contract, options)
    named = [*claim.params.values(), claim.proof.by if claim.proof else ""]
    code = {
        ref: resolve(ref, options.trusted)
        for value in named
        for ref in (value if isinstance(value, tuple) else (value,))
        if isinstance(ref, str) and ":" in ref
    }
    return Bound(contract, claim, options, subject, code)
