"""An audit as JSON, and back: what is read is checked field by field, and refused by the name of the field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.auditing.records import ERROR, ORDER, RANDOM, Audit, AxisReport, Guilty
from isobit.auditing.report.sentence import conclude
from isobit.foundation.records import to_json
from isobit.report.record_reader import RecordReader
from isobit.reveal.certificate import OrderComparison

FORMAT = "isobit audit 1"
DERIVED = ("format", "conclusion", "complete", "kept", "exit_code")


@dataclass(frozen=True)
class OrderSummary:
    """What remains of a certificate in JSON: a digest and a sentence per order, and whether there is one order."""

    digests: tuple[str, ...]
    texts: tuple[str, ...]
    kept: bool


def summarise_orders(orders: Any) -> OrderSummary | None:
    """Return the summary of a `OrderComparison`; a summary is returned as it is, anything else as None."""
    if not isinstance(orders, OrderComparison):
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
        >>> from isobit.auditing.records import Audit
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
    found = READER.load(text, FORMAT)
    audit = READER.record(Audit, {k: v for k, v in found.items() if k not in DERIVED}, "audit")
    assert isinstance(audit, Audit)
    for name in ("complete", "kept", "exit_code"):
        if name in found and found[name] != getattr(audit, name):
            expected = f"{getattr(audit, name)}, as the axes say,"
            raise READER.wrong(expected, f"audit.{name}", found[name])
    return audit


def _check_operator(values: Mapping[str, Any], name: str) -> None:
    if values["kind"] not in (ORDER, ERROR, RANDOM):
        raise READER.wrong(f"{ORDER}, {ERROR} or {RANDOM}", f"{name}.kind", values["kind"])


def _check_axis(values: Mapping[str, Any], name: str) -> None:
    judged = values.get("judged", 0)
    if len(values.get("guilty", ())) > judged:
        raise READER.wrong("at least one per guilty operator", f"{name}.judged", judged)


READER = RecordReader(
    "audit",
    "isobit audit --json",
    replaced={(Guilty, "orders"): OrderSummary | None},
    checks={Guilty: _check_operator, AxisReport: _check_axis},
)
