"""A certificate as JSON: the records, the verdict as a sentence, and orders as words and digests."""

from __future__ import annotations

import dataclasses
from typing import Any

from isobit.certify_records import Certified, ExpressionClass
from isobit.order.addition import digest, steps_of
from isobit.records import to_json
from isobit.report.certify_orders import describe_order
from isobit.report.certify_words import conclude

FORMAT = "isobit certificate 1"


def certificate_as_json(found: Certified) -> str:
    """Write a certificate as JSON.

    Args:
        found: a certificate.

    Returns:
        JSON with the fields of `Certified`, `format`, `conclusion`, `kept` and `exit_code`. The order of an expression
        is a sentence, its digest and its number of terms: as nested lists it would be too deep for JSON readers.

    Example:
        >>> import json
        >>> from isobit.certify_records import Certified
        >>> json.loads(certificate_as_json(Certified("matmul.py:matmul", ())))["format"]
        'isobit certificate 1'
    """
    return to_json(plain_certificate(found))


def plain_certificate(found: Certified) -> dict[str, Any]:
    """Return a certificate as dictionaries, lists, strings and numbers."""
    return {
        "format": FORMAT,
        "conclusion": conclude(found),
        "kept": found.kept,
        "exit_code": found.exit_code,
        "names": found.names,
        **_plain(found),
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.name != "tree"
        }
        return plain | ({"order": _order(value)} if isinstance(value, ExpressionClass) else {})
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(value[name]) for name in sorted(value)}
    return value


def _order(found: ExpressionClass) -> dict[str, Any] | None:
    if found.tree is None:
        return None
    terms = sum(child < 0 for step in steps_of(found.tree) for child in step) or 1
    return {"words": describe_order(found.tree), "digest": digest(found.tree), "terms": terms}
