"""Judge L1: the operator's schema, and the shape and dtype of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isobit import bits
from isobit.contracts.judge.cases import check_device
from isobit.contracts.judge.recipes import Case, fixed_recipes
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import Contract
from isobit.errors import EngineError, in_one_line
from isobit.foundation import native

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def check(contract: Contract, subject: Callable[..., Any], own: bool) -> Tally:
    """Check the shapes and dtypes of outputs, that inputs are not written to, and the operator itself."""
    tally = Tally()
    used = {name for claim in contract.claims for name in claim.inputs}
    for name, inputs in contract.inputs.items():
        if name not in used:
            continue
        declared = bool(contract.output) and {
            a for a in contract.output if isinstance(a, str)
        } <= set(inputs.sizes)
        for recipe in (
            fixed_recipes(name, inputs) if declared else [next(fixed_recipes(name, inputs))]
        ):
            case = Case(recipe, inputs)
            if sum(t.numel() for t in case.arguments.values()) > 2**20:
                continue
            tally.count(case.rows)
            expected = (
                [case.sizes[a] if isinstance(a, str) else int(a) for a in contract.output]
                if declared
                else None
            )
            check_output(subject, case, expected, tally, bool(contract.operator))
    if contract.operator and own and not tally.differing:  # another subject is not that operator
        check_operator(contract, tally)
    return tally


def check_output(
    subject: Callable[..., Any],
    case: Case,
    expected: list[int] | None,
    tally: Tally,
    without_data: bool,
) -> None:
    """Call once with real tensors and, for registered operators, once with meta tensors."""
    calls = {"output": case.arguments}
    if without_data:
        calls["output without data"] = {name: t.to("meta") for name, t in case.arguments.items()}
    for what, arguments in calls.items():
        tally.compared += 1
        before = [t.clone() for t in arguments.values()]
        try:
            found = subject(*arguments.values(), **case.options)
        except (Exception, SystemExit) as error:
            check_device(error)
            tally.fail(
                f"{what} at {case.recipe}: raised {type(error).__name__}: {in_one_line(error)[:200]}"
            )
            return
        if expected is not None and (list(found.shape) != expected or found.dtype != case.dtype):
            tally.fail(
                f"{what} at {case.recipe}: {list(found.shape)} {found.dtype}, expected {expected} {case.dtype}"
            )
        same = all(
            bits.equal(a, b)
            for a, b in zip(before, arguments.values(), strict=True)
            if a.device.type != "meta"
        )
        if not same:
            tally.fail(
                f"{what} at {case.recipe}: the subject writes to its inputs, so that nothing can be compared"
            )


def check_operator(contract: Contract, tally: Tally) -> None:
    """Run torch.library.opcheck on the smallest case of each of the contract's inputs."""
    namespace, _, name = contract.operator.partition("::")
    native.load()  # kernels are loaded by the first call, and all cases may have been too large for one
    try:
        operator = getattr(getattr(torch.ops, namespace), name).default
    except AttributeError as error:
        raise EngineError(
            expected=f"the operator {contract.operator}",
            received=in_one_line(error),
            remedy="run isobit doctor for the reason",
        ) from None
    schema = {argument.name: argument.default_value for argument in operator._schema.arguments}
    fitting = {
        name: inputs
        for name, inputs in contract.inputs.items()
        if set(inputs.arguments) <= set(schema)
    }
    if not fitting:
        tally.fail(
            f"opcheck of {contract.operator}: no inputs have its arguments, {', '.join(schema)}"
        )
    for inputs_name, inputs in fitting.items():
        case = Case(next(fixed_recipes(inputs_name, inputs)), inputs)
        tally.compared += len(TESTS)
        try:
            torch.library.opcheck(
                operator, tuple({**schema, **case.arguments}.values()), test_utils=TESTS
            )
        except Exception as error:
            tally.fail(
                f"opcheck of {contract.operator}: {type(error).__name__}: {in_one_line(error)[:300]}"
            )
