"""A claim with the code that it names, and the function from tensors to one tensor that is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.transforms import TRANSFORMS, Arguments, Run
from isobit.contracts.language.contract import Claim

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
UPSTREAM = "upstream gradient"
OUTPUTS = ("invariant", "accurate", "parity", "bound", "sums_to", "monotone", "roundtrip")


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as it is: no sabotage."""
    return function


@dataclass(frozen=True)
class Bound:
    """A claim with its code: the subject, the functions that parameters name, and the sabotage."""

    claim: Claim
    subject: Callable[..., Any]
    code: dict[str, Any] = field(default_factory=dict)
    wrap: Wrapper = unchanged
    prepare: Wrapper = unchanged  # makes a planted subject callable with the drawn arguments
    gradients: bool = (
        False  # compute outputs as in training: gradients enabled, inputs require them
    )

    def named(self, key: str) -> Any:
        """Return the code that a parameter of the claim names."""
        return self.code[str(self.claim.params[key])]

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

    def has_both_modes(self) -> bool:
        """Return whether the claim is about an output, by relations that call the subject themselves.

        Gradients are judged with gradients enabled anyway; a contract's own predicates and transforms call as they do.
        """
        params = self.claim.params
        if self.claim.relation not in OUTPUTS or params.get("of", "output") != "output":
            return False
        return self.claim.relation != "invariant" or any(
            name in TRANSFORMS for name in params["under"]
        )


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
