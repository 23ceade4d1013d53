"""The relations of claims: each compares what a subject returns for one case, and counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.bound import UPSTREAM, Bound, gradient, only_tensor
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import TRANSFORMS, Arguments
from isobit.contracts.judge.trusted_code import load_own
from isobit.contracts.language.contract import CERTIFY
from isobit.errors import EngineError
from isobit.foundation import native
from isobit.foundation.launches import record_launches
from isobit.foundation.records import Proof


def invariant(bound: Bound, case: Case, tally: Tally) -> None:
    """Compare bits under transforms of the call that must not change them."""
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
    """Return the case with the upstream gradient among the arguments that have rows."""
    rowed = Case(case.recipe, case.inputs)
    rowed.__dict__["row_names"] = (*case.row_names, UPSTREAM)
    return rowed


def accurate(bound: Bound, case: Case, tally: Tally) -> None:
    """Compare with a reference in fp64, within a limit."""
    run, arguments = bound.judged(case)
    found, exact = run(arguments), reference(bound, case, arguments)
    compare_within(found, exact, bound, case, tally, "against fp64")


def reference(bound: Bound, case: Case, arguments: Arguments) -> Tensor:
    """Call the named reference on the same values in fp64."""
    wide = {name: t.double() for name, t in arguments.items()}
    if UPSTREAM not in wide:
        return only_tensor(bound.named("against")(*wide.values(), **case.options))
    return gradient(bound.named("against"), str(bound.claim.params["of"]), wide, case)


def compare_within(
    found: Tensor, exact: Tensor, bound: Bound, case: Case, tally: Tally, where: str
) -> None:
    """Compare within a limit; NaN must be where the reference has NaN, and infinities must be equal."""
    # A unit in the last place is one of the inputs' dtype.
    if found.shape != exact.shape or found.dtype != case.dtype:
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
    """Return the size of one unit per element."""
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
    """Return where both are NaN, or equal."""
    return (found.isnan() & rounded.isnan()) | (found == rounded)


def parity(bound: Bound, case: Case, tally: Tally) -> None:
    """Compare two executors, bit for bit or within a stated limit."""
    run, arguments = bound.judged(case)
    found = run(arguments)
    other = only_tensor(bound.named("against")(*arguments.values(), **case.options))
    if "limit" in bound.claim.params:
        compare_within(found, other, bound, case, tally, "against the other executor")
    else:
        tally.same(found, other, "against the other executor")


def bound_by(bound: Bound, case: Case, tally: Tally) -> None:
    """Check that outputs are in [low, high]; NaN is not."""
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
    """Check that the last axis, added in fp64, gives the total within the limit."""
    run, arguments = bound.judged(case)
    found = run(arguments)
    total, limit = float(bound.claim.params["total"]), float(bound.claim.params["limit"])
    if found.shape[-1]:
        sums = found.double().sum(-1)
        tally.true((sums - total).abs() <= limit, f"|sum − {total:g}| over {limit:g}", sums)


def monotone(bound: Bound, case: Case, tally: Tally) -> None:
    """Check that a larger element of the argument has no smaller output, and an equal one an equal output."""
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
    """Check that the inverse of the output is the first argument, bit for bit."""
    run, arguments = bound.judged(case)
    first = next(iter(arguments.values()))
    tally.same(only_tensor(bound.named("inverse")(run(arguments))), first, "after the way back")


def launches(bound: Bound, case: Case, tally: Tally) -> None:
    """Check that every call launches a kernel with its own sizes, from a binary that is loaded once (DIM-002).

    Loads are counted: `loads` of them by the first call that needs the binary, none by any later call.
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
    """Check that each call raises the named error with a message."""
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
    """Evaluate a predicate that the contract names."""
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


# The relation `certified` and its proof: the compiled kernels of the subject compute a row in one way.

ENGINE = "names of compiled code"
Certified = (
    Any  # what isobit.certify returns; contracts do not import the room that judges compiled code
)
Values = tuple[tuple[str, tuple[Any, ...]], ...]


def certified(bound: Bound, tally: Tally) -> None:
    """Compare the expressions of output rows over all configurations, in the compiled code of every target."""
    found = certificate_of(bound)
    for target in found.targets:
        for outcome in target.outcomes:
            tally.count(outcome.configuration.rows or 1)
    tally.compared += found.names
    if found.exit_code == 1:
        tally.fail(failure_of(found))
    elif not found.kept:
        raise EngineError(
            expected="every configuration to be executed, and names to be compared",
            received=failure_of(found),
            remedy="isobit certify shows each configuration; leave out what cannot be executed",
        )


def prove_compiled(bound: Bound) -> Proof:
    """Prove that the subject's compiled kernels compute a row in one way, for all inputs of these sizes."""
    found = certificate_of(bound)
    rows = f"{', '.join(map(str, found.rows))} rows; " if found.rows else ""
    vary = "".join(f"{name} {', '.join(values)}; " for name, values in found.vary)
    targets = ", ".join(target.target for target in found.targets)
    covers = (
        f"all inputs at {rows}{vary}PTX of Triton {found.triton} for {targets}; ptxas is trusted"
    )
    failure = "" if found.kept else failure_of(found)
    ran = sum(len(target.outcomes) for target in found.targets)
    return Proof(ENGINE, covers, found.names if found.kept else ran, failure)


def failure_of(found: Certified) -> str:
    """Return why a certificate is not kept, in one line; "" if it is."""
    for target in found.targets:
        for outcome in (*target.broken, *target.refused):
            return f"{outcome.configuration}: {outcome.reason}"
        if len(target.classes) > 1:
            first, second = (one.configurations[0] for one in target.classes[:2])
            differing = f"{first} and {second.label} differ"
            return f"{len(target.classes)} expressions: {differing}{place_of(target.partings)}"
    return "" if found.kept else "nothing was compared"


def place_of(partings: Any) -> str:
    """Return where two expressions first differ, if it is known."""
    for parting in partings:
        if parting.left_step is not None and parting.left_step.source[1]:
            file, line = parting.left_step.source
            return f", first at {file.rpartition('/')[2]}:{line}"
    return ""


def certificate_of(bound: Bound) -> Certified:
    """Return the certificate of the claim's subject; the proof of L4 uses the one that L2 has made."""
    params = bound.claim.params
    vary = tuple((name, tuple(values)) for name, values in params.get("vary", {}).items())
    rows = tuple(params["rows"]) if "rows" in params else None
    return _certificate(bound.subject, bound.wrap, rows, vary, tuple(params["targets"]))


@lru_cache(maxsize=4)
def _certificate(
    subject: Callable[..., Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    rows: tuple[int, ...] | None,
    vary: Values,
    targets: tuple[str, ...],
) -> Certified:
    found: Certified = load_own(CERTIFY)(wrap(subject), rows=rows, vary=dict(vary), targets=targets)
    return found
