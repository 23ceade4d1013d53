"""Find the code that a claim names, and replace its subject by a planted wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from isobit.contracts.judge.as_function import as_function, split_name
from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.sabotage import LIBRARY
from isobit.contracts.judge.trusted_code import resolve
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.options import Options
from isobit.errors import ContractError


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
    named = [
        v
        for value in claim.params.values()
        for v in (value if isinstance(value, tuple) else (value,))
    ]
    named.append(claim.proof.by if claim.proof else "")
    code = {
        ref: resolve(ref, options.trusted) for ref in named if isinstance(ref, str) and ":" in ref
    }
    return Bound(
        claim,
        find_subject(contract, options),
        code,
        prepare=lambda function: called(contract, function, options),
    )


def plant(bound: Bound, name: str, options: Options) -> Bound:
    """Return the same claim on a wrong subject: a built-in sabotage by name, or `package:function`."""
    if name in LIBRARY:
        return replace(bound, wrap=LIBRARY[name])
    if ":" not in name:
        raise ContractError(
            expected="a built-in sabotage, or package:function",
            received=name,
            remedy=f"use one of: {', '.join(LIBRARY)}",
        )
    return replace(bound, subject=bound.prepare(resolve(name, options.trusted)))
