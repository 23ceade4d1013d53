"""A certificate as JSON, and back: the records, the verdict as a sentence, and orders as lists of additions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isobit.certifying.records import (
    EXECUTED,
    FAILED,
    Certified,
    ExpressionClass,
    Outcome,
    TargetReport,
)
from isobit.certifying.report.drawings import describe_order
from isobit.certifying.report.words import conclude
from isobit.foundation.records import to_json
from isobit.order.addition import Branch, digest, steps_of
from isobit.report.record_reader import RecordReader

FORMAT = "isobit certificate 1"
DERIVED = ("format", "conclusion", "kept", "exit_code", "names")


@dataclass(frozen=True)
class FlatOrder:
    """An order of addition without nesting: as nested lists it would be too deep for JSON readers.

    Attributes:
        words, digest: the order as a sentence, and the digest of the order.
        terms: how many there are.
        first_step: operands below it are terms; `first_step + i` is the result of step i.
        steps: the operands of every addition, after the additions it needs; one operand if there is no addition.
    """

    words: str
    digest: str
    terms: int
    first_step: int
    steps: tuple[tuple[int, ...], ...]


def certificate_as_json(found: Certified) -> str:
    """Write a certificate as JSON.

    Args:
        found: a certificate.

    Returns:
        JSON with the fields of `Certified`, `format`, `conclusion`, `kept`, `exit_code` and `names`. The order of an
        expression is a `FlatOrder`.

    Example:
        >>> from isobit.certifying.records import Certified
        >>> found = Certified("matmul.py:matmul", ())
        >>> certificate_from_json(certificate_as_json(found)) == found
        True
    """
    return to_json(plain_certificate(found))


def plain_certificate(found: Certified) -> dict[str, Any]:
    """Return a certificate as dictionaries, lists, strings and numbers."""
    derived = (FORMAT, conclude(found), found.kept, found.exit_code, found.names)
    return {**dict(zip(DERIVED, derived, strict=True)), **_plain(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, ExpressionClass):
        plain = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)[:2]}
        return plain | {"formula": value.formula, "order": _plain(_flatten(value.tree))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(value[name]) for name in sorted(value)}
    return value


def _flatten(tree: Branch | None) -> FlatOrder | None:
    if tree is None:
        return None
    steps = [(~tree,)] if isinstance(tree, int) else steps_of(tree)
    terms = [~child for step in steps for child in step if child < 0]
    first = 1 + max(terms)
    flat = tuple(tuple(~c if c < 0 else first + c for c in step) for step in steps)
    return FlatOrder(describe_order(tree), digest(tree), len(terms), first, flat)


def certificate_from_json(text: str) -> Certified:
    """Read what `certificate_as_json` wrote, or the data of a page: its `<script id="certificate">`.

    Args:
        text: JSON, also from somebody else: every field is checked, and no code is run. That the certificate is true
            does not follow: run its command for that.

    Returns:
        The certificate; it can be drawn and described like any other.

    Raises:
        ArgumentError: The text is not JSON, or a field is unknown, missing, repeated or of another type, or the
            verdict does not follow from the records; the message names the field.

    Example:
        >>> certificate_from_json('{"format": "isobit certificate 1", "function": 5}')
        Traceback (most recent call last):
            ...
        isobit.errors.ArgumentError: expected text as certificate.function
          received: 5
          remedy: write the file again with `isobit certify --json`
    """
    found = READER.load(text, FORMAT)
    plain = {name: value for name, value in found.items() if name not in DERIVED}
    read = READER.record(Certified, _renamed(plain), "certificate")
    assert isinstance(read, Certified)
    targets = tuple(_with_trees(one, at) for at, one in enumerate(read.targets))
    certificate = replace(read, targets=targets)
    for name in ("kept", "exit_code", "names"):
        if name in found and found[name] != getattr(certificate, name):
            expected = f"{getattr(certificate, name)}, as the records say,"
            raise READER.wrong(expected, f"certificate.{name}", found[name])
    return certificate


def _renamed(plain: dict[str, Any]) -> dict[str, Any]:
    """Call the field `order` of a class `tree`, as the record does; what is no class is left for the reader."""
    targets = plain.get("targets")
    for target in targets if isinstance(targets, list) else ():
        classes = target.get("classes") if isinstance(target, dict) else None
        for one in classes if isinstance(classes, list) else ():
            if isinstance(one, dict) and "tree" not in one and "order" in one:
                one["tree"] = one.pop("order")
    return plain


def _with_trees(target: TargetReport, at: int) -> TargetReport:
    """Return a target whose flat orders are trees again."""
    classes = []
    for number, one in enumerate(target.classes):
        name = f"certificate.targets[{at}].classes[{number}].order"
        flat: Any = one.tree
        classes.append(one if flat is None else replace(one, tree=_nest(flat, name)))
    return replace(target, classes=tuple(classes))


def _nest(flat: FlatOrder, name: str) -> Branch:
    made: list[Branch] = []
    used: set[int] = set()
    for at, step in enumerate(flat.steps):
        known = flat.first_step + at
        if not step or (len(step) == 1 and len(flat.steps) > 1) or max(step) >= known:
            raise READER.wrong("terms and earlier steps", f"{name}.steps[{at}]", step)
        inner = [child for child in step if child >= flat.first_step]
        if used & set(inner) or len(set(inner)) < len(inner):
            raise READER.wrong("every step once", f"{name}.steps[{at}]", step)
        used |= set(inner)
        operands = [c if c < flat.first_step else made[c - flat.first_step] for c in step]
        made.append(operands[0] if len(operands) == 1 else tuple(operands))
    if len(used) != len(made) - 1:
        raise READER.wrong("steps that lead to one sum", f"{name}.steps", flat.steps)
    if _flatten(made[-1]) != flat:
        raise READER.wrong("the words, digest and terms of its steps", name, flat.digest)
    return made[-1]


def _check_outcome(values: Mapping[str, Any], name: str) -> None:
    verdict = values.get("verdict", EXECUTED)
    if verdict not in (EXECUTED, *FAILED):
        raise READER.wrong(f"{EXECUTED}, {' or '.join(FAILED)}", f"{name}.verdict", verdict)


READER = RecordReader(
    "certificate",
    "isobit certify --json",
    replaced={(ExpressionClass, "tree"): FlatOrder | None},
    checks={Outcome: _check_outcome},
)
