"""The library of relations: each holds a subject to a promise on one case, and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit import native
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import TRANSFORMS, Arguments, Run
from isobit.contracts.language.contract import Claim
from isobit.launches import record_launches

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
UPSTREAM = "upstream gradient"
OUTPUTS = ("invariant", "accurate", "parity", "bound", "sums_to", "monotone", "roundtrip")


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """No sabotage."""
    return function


@dataclass(frozen=True)
class Bound:
    """A claim with its code found: what is judged, by what parameters, wrapped by which sabotage."""

    claim: Claim
    subject: Callable[..., Any]
    code: dict[str, Any] = field(default_factory=dict)
    wrap: Wrapper = unchanged
    gradients: bool = False  # whether outputs are computed as in training: gradients enabled, inputs that require them

    def named(self, key: str) -> Any:
        """The code that a parameter of the claim names."""
        return self.code[str(self.claim.params[key])]

    def judged(self, case: Case) -> tuple[Run, Arguments]:
        """The function from tensors to one tensor that is judged: the output, or the gradient of an argument."""
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
        """Whether the claim is about an output, by relations that call the subject themselves.

        Gradients are judged with gradients enabled anyway; a contract's own predicates and transforms call as they do.
        """
        params = self.claim.params
        if self.claim.relation not in OUTPUTS or params.get("of", "output") != "output":
            return False
        return self.claim.relation != "invariant" or any(
            name in TRANSFORMS for name in params["under"]
        )


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """As training calls it. What raises only then does not support gradients, loudly, and is judged without them."""

    def trained(*given: Any, **options: Any) -> Any:
        try:
            with torch.enable_grad():
                return call(*(requiring_gradients(value) for value in given), **options)
        except (Exception, SystemExit):
            return call(*given, **options)

    return trained


def requiring_gradients(value: Any) -> Any:
    """The same memory, as a leaf of autograd."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_real else value


def only_tensor(value: Any) -> Tensor:
    """Refuses what cannot be compared."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected the subject to return a tensor, received {type(value).__name__}")
    return value.detach().clone()  # a subject may hand out one buffer again and again


def gradient(function: Callable[..., Any], of: str, given: Arguments, case: Case) -> Tensor:
    """By autograd, from an upstream gradient that is one of the arguments."""
    upstream = given.pop(UPSTREAM)
    given[of] = given[of].detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(*given.values(), **case.options), given[of], upstream)[
            0
        ]


def with_upstream(function: Callable[..., Any], case: Case) -> Arguments:
    """The arguments and a gradient of the output's shape, drawn like the first argument."""
    shape = tuple(only_tensor(function(*case.arguments.values(), **case.options)).shape)
    return {**case.arguments, UPSTREAM: case.draw(shape, 50)}


# ---- relations ------------------------------------------------------------------------------------------


def invariant(bound: Bound, case: Case, tally: Tally) -> None:
    """Nothing that must not matter changes a bit."""
    run, arguments = bound.judged(case)
    whole: Tensor | None = None
    rowed = case if UPSTREAM not in arguments else with_rows(case)
    for name in bound.claim.params["under"]:
        before = tally.compared
        if name in TRANSFORMS:
            whole = run(arguments) if whole is None else whole
            TRANSFORMS[name](run, rowed, arguments, whole, tally)
        elif not bound.gradients:
            bound.code[name](bound.wrap(bound.subject), case, tally)
        tally.shares[name] = tally.shares.get(name, 0) + tally.compared - before


def with_rows(case: Case) -> Case:
    """The same case, whose upstream gradient has rows too."""
    rowed = Case(case.recipe, case.inputs)
    rowed.__dict__["row_names"] = (*case.row_names, UPSTREAM)
    return rowed


def accurate(bound: Bound, case: Case, tally: Tally) -> None:
    """The error against the reference in fp64 is within the limit."""
    run, arguments = bound.judged(case)
    found, exact = run(arguments), reference(bound, case, arguments)
    compare_within(found, exact, bound, case, tally, "against fp64")


def reference(bound: Bound, case: Case, arguments: Arguments) -> Tensor:
    """The named reference on the same values in fp64."""
    wide = {name: t.double() for name, t in arguments.items()}
    if UPSTREAM not in wide:
        return only_tensor(bound.named("against")(*wide.values(), **case.options))
    return gradient(bound.named("against"), str(bound.claim.params["of"]), wide, case)


def compare_within(
    found: Tensor, exact: Tensor, bound: Bound, case: Case, tally: Tally, where: str
) -> None:
    """The limit in its unit; NaN where the reference has NaN and nowhere else; infinities must be equal."""
    if (
        found.shape != exact.shape or found.dtype != case.dtype
    ):  # a unit in the last place is one of the inputs' dtype
        expected = f"{list(exact.shape)} {case.dtype}"
        tally.fail(f"{where}: {list(found.shape)} {found.dtype}, expected {expected}")
        return
    limit, unit = float(bound.claim.params["limit"]), bound.claim.params["unit"]
    rounded = exact.to(found.dtype)
    error = (found.double() - exact.double()).abs()
    allowed = limit * unit_size(rounded, exact.double(), unit)
    plain = found.isfinite() & rounded.isfinite()
    kept = torch.where(plain, error <= allowed, same_class(found, rounded))
    tally.true(
        kept,
        f"{where}, over {limit:g} {unit}",
        torch.where(plain, error / unit_size(rounded, exact, unit), error),
    )


def unit_size(rounded: Tensor, exact: Tensor, unit: str) -> Tensor:
    """One unit, per element."""
    if unit == "abs":
        return torch.ones_like(exact)
    if unit == "rel":
        return exact.abs()
    if unit == "norm":
        return (
            exact.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True).expand_as(exact)
            if exact.numel()
            else exact
        )
    kind = torch.finfo(rounded.dtype)
    exponent = torch.frexp(rounded.double().nan_to_num(0, 0, 0))[1] - 1
    least = torch.frexp(torch.tensor(kind.smallest_normal, dtype=torch.float64))[1] - 1
    scale = torch.maximum(exponent, least).double()
    return torch.ldexp(torch.full_like(scale, kind.eps), scale)


def same_class(found: Tensor, rounded: Tensor) -> Tensor:
    """Both NaN, or the same infinity."""
    return (found.isnan() & rounded.isnan()) | (found == rounded)


def parity(bound: Bound, case: Case, tally: Tally) -> None:
    """Two executors agree: to the bit, or within a limit that is stated."""
    run, arguments = bound.judged(case)
    found = run(arguments)
    other = only_tensor(bound.named("against")(*arguments.values(), **case.options))
    if "limit" in bound.claim.params:
        compare_within(found, other, bound, case, tally, "against the other executor")
    else:
        tally.same(found, other, "against the other executor")


def bound_by(bound: Bound, case: Case, tally: Tally) -> None:
    """Outputs stand in [low, high]; NaN stands nowhere."""
    run, arguments = bound.judged(case)
    found = run(arguments)
    low, high = bound.claim.params.get("low"), bound.claim.params.get("high")
    kept = torch.ones_like(found, dtype=torch.bool)
    if low is not None:
        kept &= found >= low
    if high is not None:
        kept &= found <= high
    tally.true(kept, f"outside [{low}, {high}]", found)


def sums_to(bound: Bound, case: Case, tally: Tally) -> None:
    """The last axis, added in fp64, gives the total within the limit."""
    run, arguments = bound.judged(case)
    found = run(arguments)
    total, limit = float(bound.claim.params["total"]), float(bound.claim.params["limit"])
    if found.shape[-1]:
        sums = found.double().sum(-1)
        tally.true((sums - total).abs() <= limit, f"|sum − {total:g}| over {limit:g}", sums)


def monotone(bound: Bound, case: Case, tally: Tally) -> None:
    """A larger element of the argument has no smaller output, and an equal one an equal output."""
    run, arguments = bound.judged(case)
    values, order = arguments[str(bound.claim.params["argument"])].sort(-1)
    found = run(arguments).gather(-1, order)
    tally.true(
        found[..., 1:] >= found[..., :-1], "a larger input has a smaller output", found[..., 1:]
    )
    tied = values[..., 1:] == values[..., :-1]
    tally.true(
        ~tied | (found[..., 1:] == found[..., :-1]),
        "equal inputs have unequal outputs",
        found[..., 1:],
    )


def roundtrip(bound: Bound, case: Case, tally: Tally) -> None:
    """The inverse of the output is the first argument, to the bit."""
    run, arguments = bound.judged(case)
    first = next(iter(arguments.values()))
    tally.same(only_tensor(bound.named("inverse")(run(arguments))), first, "after the way back")


def launches(bound: Bound, case: Case, tally: Tally) -> None:
    """DIM-002: every call launches a kernel with its own sizes, by name, of a binary that is loaded before or by it.

    Loads are counted as events: `loads` of them by the first call that needs the binary, none by any later call.
    """
    run, arguments = bound.judged(case)
    before = native.load_count()
    with record_launches() as seen:
        run(arguments)
    loads = native.load_count() - before
    tally.compared += 2
    if not seen:
        tally.fail(f"no launch was recorded at {case.sizes}")
    elif not any(launch.named() == case.sizes for launch in seen):
        tally.fail(f"launched with {[launch.named() for launch in seen]}, expected {case.sizes}")
    allowed = 0 if before else bound.claim.params["loads"]
    if loads != allowed:
        tally.fail(
            f"the call loaded the binary {loads} times, expected {allowed}; {before} times before it"
        )


def refuses(bound: Bound, tally: Tally, raising: bool = False) -> None:
    """Each call raises the named error, with words; a planted subject must be caught by what it accepts."""
    call, error = bound.wrap(bound.subject), bound.named("error")
    for what, positional, keyword in bound.named("calls")():
        tally.count(1)
        tally.compared += 1
        try:
            call(*positional, **keyword)
        except error as refusal:
            if not str(refusal).strip():
                tally.fail(f"{what}: refused without a word")
        except Exception as other:
            if raising:
                raise
            tally.fail(f"{what}: {type(other).__name__} instead of {error.__name__}")
        else:
            tally.fail(f"{what}: accepted")


def holds(bound: Bound, case: Case, tally: Tally) -> None:
    """A predicate of the contract's own."""
    bound.named("predicate")(bound.wrap(bound.subject), case, tally)


Relation = Callable[[Bound, Case, Tally], None]
RELATIONS: dict[str, Relation] = {
    "invariant": invariant,
    "accurate": accurate,
    "parity": parity,
    "gradient": accurate,
    "bound": bound_by,
    "sums_to": sums_to,
    "monotone": monotone,
    "roundtrip": roundtrip,
    "launches": launches,
    "holds": holds,
}
