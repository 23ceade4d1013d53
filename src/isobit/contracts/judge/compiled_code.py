"""The relation `certified` and its proof: the compiled kernels of the subject compute a row in one way."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from isobit.contracts.judge.bound import Bound
from isobit.contracts.judge.tally import Tally
from isobit.contracts.language.contract import CERTIFY, PLANT
from isobit.errors import EngineError
from isobit.foundation.records import Proof

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
    found: Certified = load(CERTIFY)(wrap(subject), rows=rows, vary=dict(vary), targets=targets)
    return found


def one_more_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Plant one more product in every configuration but the first."""
    planted: Callable[..., Any] = load(PLANT)(function)
    return planted


def load(reference: str) -> Callable[..., Any]:
    """Import what judges compiled code.

    By name: the evidence of a contract without this relation must not depend on that code. `Contract.code` names it for
    the others.
    """
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
