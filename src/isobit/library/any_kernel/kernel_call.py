"""The first call of a kernel that `isobit check` judges: is it this operator at all, and can it be judged?

What prevents the call is an error (exit 2). What a caller would suffer from is a fault (exit 1): the kernel writes
to its inputs, returns their memory, has another dtype, another result for the same call, hides a NaN, or has no
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.bound import bind, called, named_function
from isobit.contracts.judge.recipes import Case, fixed_recipes
from isobit.contracts.language.contract import Contract
from isobit.contracts.options import Options
from isobit.errors import ArgumentError, IsobitError, in_one_line
from isobit.foundation.records import ClaimRecord
from isobit.library.any_kernel.kernel_run import fault_of_kernel
from isobit.library.any_kernel.kernel_sizes import LARGE
from isobit.library.any_kernel.signatures import LIKE
from isobit.library.any_kernel.within import UPSTREAM, Operator

REMEDY = {
    "writes": "compute into a new tensor, or give it a copy",
    "shares": "return a tensor of its own",
    "dtype": "return the dtype of the inputs, or leave a dtype out by --dtype",
    "drawn": "leave dropout out, or call eval() of a module",
    "again": "make it a function of its arguments: no counter, no cache by address",
    "hidden": "let it pass: a NaN that is hidden is found steps later, or never",
    "leaks": "read no other row, and select by where instead of multiplying by a mask of zeros",
    "gradient": "give it a backward, or judge the output alone by --forward-only",
}


@dataclass
class Watched:
    """A kernel that keeps what it was called with, and what it returned."""

    kernel: Callable[..., Any]
    given: tuple[Any, ...] = ()
    copies: list[Any] = field(default_factory=list)

    def __call__(self, *given: Any) -> Any:
        """Call the kernel."""
        self.given = given
        self.copies = [t.detach().clone() if isinstance(t, Tensor) else t for t in given]
        return self.kernel(*given)

    def tensors(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the place of each tensor, the tensor, and its copy from before the call."""
        for at, (now, before) in enumerate(zip(self.given, self.copies, strict=True), 1):
            if isinstance(now, Tensor):
                yield at, now, before


def first_call(contract: Contract, options: Options, like: str, forward_only: bool) -> ClaimRecord:
    """Call the kernel once per dtype, and return a record of the claim `call`.

    Raises:
        ArgumentError: If it raises, or returns something else than the operator does.
    """
    kind = operator_of(contract, options)
    watched = Watched(named_function(contract, options))
    subject = called(contract, watched, options)
    record = ClaimRecord("call", "holds", "kept", 2, 2)
    for name, inputs in contract.inputs.items():
        if name in LARGE:  # claims judge them
            continue
        for dtype in inputs.dtypes:
            recipe = list(fixed_recipes(name, replace(inputs, dtypes=(dtype,))))[-1]
            case = Case(recipe, inputs)
            try:
                found = called_once(kind, subject, case, options, like, record.compared > 0)
                with torch.no_grad():
                    fault = fault_of(kind, watched, subject, case, found)
                if not fault and not forward_only:
                    fault = fault_of_gradients(kind, watched, subject, case)
            except IsobitError as error:
                fault = fault_of_kernel(error)
                if not fault:
                    raise
            record = replace(record, compared=record.compared + 1, inputs=record.inputs + case.rows)
            if fault:
                detail = f"in {dtype}, {fault}"
                return replace(record, verdict="broken", level=1, at=2, detail=detail, differing=1)
    return record


def operator_of(contract: Contract, options: Options) -> type[Operator]:
    """Return the operator whose accuracy the contract claims."""
    claim = next(claim for claim in contract.claims if claim.id == "accuracy")
    return bind(contract, claim, replace(options, subject="")).named("predicate").__self__  # type: ignore[no-any-return]


def called_once(
    kind: type[Operator],
    subject: Callable[..., Any],
    case: Case,
    options: Options,
    like: str,
    other_dtypes: bool,
) -> Tensor:
    """Return the output of a call without gradients, which must have the operator's shape.

    `other_dtypes` tells whether it could be called with another dtype: then it may lack this one.
    """
    expected = kind.call(kind.reference, *(t.double() for t in case.arguments.values()))
    received, remedy = "", "write a function that calls the kernel in this way"
    try:
        with torch.no_grad():
            found: Tensor = subject(*copies(case))
        if not isinstance(found, Tensor):
            received = f"a {type(found).__name__} instead of a tensor"
        elif found.device.type != "cpu":
            received = f"a tensor on {found.device}"
        elif found.shape != expected.shape:
            received = f"{list(found.shape)} instead of {list(expected.shape)}"
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:
        received = f"{type(error).__name__}: {in_one_line(error)[:200]}"
        if "cuda" in received.lower() and options.device == "cpu":
            remedy = (
                "let it take tensors on the CPU, or judge it where there is a GPU, by --device cuda"
            )
        else:
            remedy += ", or pass what else it needs by --with NAME=VALUE"
    if received:
        raise ArgumentError(
            expected=f"{options.subject} to be called as {LIKE[like]}",
            received=f"{received}, in {case.recipe.dtype}",
            remedy=remedy + ", or leave this dtype out by --dtype" * other_dtypes,
        )
    return found


def fault_of(
    kind: type[Operator],
    watched: Watched,
    subject: Callable[..., Any],
    case: Case,
    found: Tensor,
) -> str:
    """Return what is wrong with a call without gradients, and what to do; empty if nothing is."""
    if fault := touched(watched, found):
        return fault
    before = found.clone()
    dtypes = {case.dtype} | ({torch.float32} if kind.WIDE_OUTPUT else set())
    if found.dtype not in dtypes:
        return f"it returns {found.dtype} for {case.dtype}; {REMEDY['dtype']}"
    twice = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            twice.append(subject(*copies(case)).clone())
    if not bits.equal(*twice):
        return f"it has another result for the same arguments; {REMEDY['again']}"
    if not bits.equal(twice[0], before):
        return f"it draws random numbers; {REMEDY['drawn']}"
    return fault_of_nan(kind, subject, case)


def fault_of_nan(kind: type[Operator], subject: Callable[..., Any], case: Case) -> str:
    """Return whether a NaN in the first row is hidden, or reaches another row; empty if neither is."""
    given = copies(case)
    given[0].view(len(given[0]), -1)[0, -1] = torch.nan
    expected = kind.call(kind.reference, *(t.double() for t in given)).isnan()
    found = subject(*given).isnan()
    if (expected & ~found).any():
        return f"it returns numbers where an input is NaN; {REMEDY['hidden']}"
    if (found & ~expected).any():
        return f"a NaN in one row is in other rows too; {REMEDY['leaks']}"
    return ""


def copies(case: Case) -> list[Tensor]:
    """Return arguments that a kernel may write to; drawn ones are kept for other cases."""
    return [t.clone() for t in case.arguments.values()]


def touched(watched: Watched, found: Tensor) -> str:
    """Return whether a call wrote to its inputs, or returns their memory."""
    for at, now, before in watched.tensors():
        if not bits.equal(now.detach(), before):
            return f"it writes to argument {at}; {REMEDY['writes']}"
        mine, other = found.untyped_storage(), now.untyped_storage()
        if found.numel() and mine.data_ptr() == other.data_ptr():
            return f"its output shares memory with argument {at}; {REMEDY['shares']}"
    return ""


def fault_of_gradients(
    kind: type[Operator], watched: Watched, subject: Callable[..., Any], case: Case
) -> str:
    """Return what is wrong with a call and its gradients, and what to do; empty if nothing is."""
    wide = {name: t.double() for name, t in case.arguments.items()}
    shape = kind.call(kind.reference, *wide.values()).shape
    upstream = case.draw(tuple(shape), UPSTREAM)
    names = list(kind.gradients(wide, upstream.double()))
    leaves = {n: t.detach().clone().requires_grad_(n in names) for n, t in case.arguments.items()}
    try:
        with torch.enable_grad():
            output = subject(*leaves.values())
        if fault := touched(watched, output):
            return f"with gradients enabled, {fault}"
        if not output.requires_grad:
            return f"its output has no gradient; {REMEDY['gradient']}"
        given = upstream.to(output.dtype, copy=True)
        found = torch.autograd.grad(output, [leaves[n] for n in names], given, allow_unused=True)
        found = tuple(None if t is None else t.clone() for t in found)
    except IsobitError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {in_one_line(error)[:200]}"
        return f"its backward raises {message}; {REMEDY['gradient']}"
    for name, gradient in zip(names, found, strict=True):
        if gradient is None:
            return f"{name} has no gradient; {REMEDY['gradient']}"
    if not bits.equal(given, upstream.to(output.dtype)):
        return f"its backward writes to the gradient that it is given; {REMEDY['writes']}"
    if fault := touched(watched, output):
        return f"its backward: {fault}"
    return ""
