"""An audit as JSON, and back: what is read is checked field by field, and refused by the name of the field."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from isobit.audit_records import ERROR, ORDER, RANDOM, Audit, AxisReport, Guilty
from isobit.errors import ArgumentError
from isobit.records import to_json
from isobit.report.audit_sentence import conclude
from isobit.reveal.certificate import Certificate

FORMAT = "isobit audit 1"
LARGEST_COUNT = 2**64
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
DERIVED = ("format", "conclusion", "complete", "kept", "exit_code")


@dataclass(frozen=True)
class OrderSummary:
    """What remains of a certificate in JSON: a digest and a sentence per order, and whether there is one order."""

    digests: tuple[str, ...]
    texts: tuple[str, ...]
    kept: bool


def summarise_orders(orders: Any) -> OrderSummary | None:
    """Return the summary of a `Certificate`; a summary is returned as it is, anything else as None."""
    if not isinstance(orders, Certificate):
        return orders if isinstance(orders, OrderSummary) else None
    texts = [
        f"{found.label}: {found.tree}; {found.tree.arithmetic or 'arithmetic not seen'}"
        for found in orders.classes
    ]
    texts += [f"{name}: not revealed, {reason}" for name, reason in orders.refused]
    return OrderSummary(tuple(c.tree.digest for c in orders.classes), tuple(texts), orders.kept)


def audit_as_json(audit: Audit) -> str:
    """Write an audit as JSON.

    Certificates of orders become their digests, a sentence per order and whether it is one order. Numbers that are
    not finite become the strings "NaN", "Infinity" and "-Infinity".

    Args:
        audit: what was found.

    Returns:
        JSON with the fields of `Audit`, and its conclusion, `complete`, `kept` and `exit_code`.

    Example:
        >>> from isobit.audit_records import Audit
        >>> audit = Audit("tiny", "2 samples", axes=())
        >>> audit_from_json(audit_as_json(audit)) == audit
        True
    """
    return to_json(plain_audit(audit))


def plain_audit(audit: Audit) -> dict[str, Any]:
    """Return an audit as dictionaries, lists, strings and numbers."""
    derived = (FORMAT, conclude(audit), audit.complete, audit.kept, audit.exit_code)
    return {**dict(zip(DERIVED, derived, strict=True)), **_plain(audit)}


def _plain(value: Any) -> Any:
    if isinstance(value, Guilty):  # its certificate is deep, and has no JSON form of its own
        value = dataclasses.replace(value, orders=summarise_orders(value.orders))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(value[name]) for name in sorted(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def audit_from_json(text: str) -> Audit:
    """Read what `audit_as_json` wrote.

    Args:
        text: JSON, also from somebody else: every field is checked, and no code is run.

    Returns:
        The audit; `orders` of its operators are `OrderSummary` records, without pictures.

    Raises:
        ArgumentError: The text is not JSON, or a field is unknown, missing, repeated or of another type; the message
            names the field.

    Example:
        >>> audit_from_json('{"format": "isobit audit 1", "model": 5}')
        Traceback (most recent call last):
            ...
        isobit.errors.ArgumentError: expected text as audit.model
          received: 5
          remedy: write the file again with `isobit audit --json`
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise _wrong("JSON", "audit", str(error)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        received = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise _wrong(repr(FORMAT), "audit.format", received)
    audit = _record(Audit, {k: v for k, v in found.items() if k not in DERIVED}, "audit")
    assert isinstance(audit, Audit)
    for name in ("complete", "kept", "exit_code"):
        if name in found and found[name] != getattr(audit, name):
            raise _wrong(f"{getattr(audit, name)}, as the axes say,", f"audit.{name}", found[name])
    return audit


def _wrong(expected: str, name: str, received: Any) -> ArgumentError:
    shown = received if isinstance(received, str) else repr(received)
    return ArgumentError(
        expected=f"{expected} as {name}",
        received=shown if len(shown) <= 200 else f"{shown[:200]}…",
        remedy="write the file again with `isobit audit --json`",
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _wrong("every name once", "audit", next(n for n in names if names.count(n) > 1))
    return found


def _refuse(constant: str) -> Any:
    raise _wrong("a finite number or a string", "audit", constant)


def _record(kind: type[Any], found: Any, name: str) -> Any:
    """Read one dataclass; every field is checked against its annotation."""
    if not isinstance(found, dict):
        raise _wrong(f"an object with the fields of {kind.__name__}", name, found)
    hints: dict[str, Any] = get_type_hints(kind)
    if kind is Guilty:
        hints["orders"] = OrderSummary | None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for field in found:
        if field not in fields:
            raise _wrong(f"a field of {kind.__name__}", name, field)
    values = {}
    for field in fields.values():
        at = f"{name}.{field.name}"
        if field.name in found:
            values[field.name] = _read(hints[field.name], found[field.name], at)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise _wrong("a value", at, "nothing")
    if kind is Guilty and values["kind"] not in (ORDER, ERROR, RANDOM):
        raise _wrong(f"{ORDER}, {ERROR} or {RANDOM}", f"{name}.kind", values["kind"])
    if kind is AxisReport and len(values.get("guilty", ())) > values.get("judged", 0):
        raise _wrong("at least one per guilty operator", f"{name}.judged", values.get("judged", 0))
    return kind(**values)


def _read(hint: Any, found: Any, name: str) -> Any:
    """Read a value of an annotated type: a record, an optional, a tuple, a dictionary or a plain value."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (kind,) = [arm for arm in inner if arm is not type(None)]
        return None if found is None else _read(kind, found, name)
    if dataclasses.is_dataclass(hint):
        return _record(hint, found, name)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(found, list) or (inner[-1] is not ... and len(found) != len(inner)):
            raise _wrong("a list" if inner[-1] is ... else f"a list of {len(inner)}", name, found)
        kinds = [inner[0]] * len(found) if inner[-1] is ... else inner
        return tuple(
            _read(kind, item, f"{name}[{at}]")
            for at, (kind, item) in enumerate(zip(kinds, found, strict=True))
        )
    if origin is dict:
        if not isinstance(found, dict):
            raise _wrong("an object", name, found)
        return {key: _read(inner[1], item, f"{name}.{key}") for key, item in found.items()}
    return _value(hint, found, name)


def _value(kind: Any, found: Any, name: str) -> Any:
    if kind is float:
        if isinstance(found, str) and found in NOT_FINITE:
            return NOT_FINITE[found]
        if type(found) is float or (type(found) is int and abs(found) <= LARGEST_COUNT):
            return float(found)
        raise _wrong("a number", name, found)
    if kind is int:
        if type(found) is not int or not 0 <= found <= LARGEST_COUNT:
            raise _wrong(f"a whole number from 0 to {LARGEST_COUNT}", name, found)
    elif type(found) is not kind:
        raise _wrong({str: "text", bool: "true or false"}[kind], name, found)
    return found
