"""Read records back from JSON: every field is checked against its annotation, and refused by its name."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from isobit.errors import ArgumentError

LARGEST_COUNT = 2**64
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Check = Callable[[Mapping[str, Any], str], None]


@dataclass
class RecordReader:
    """Reads dataclasses from JSON that may be somebody else's; no code is run.

    Attributes:
        root: the name of the whole, such as "audit"; a field of it is "audit.model".
        command: what writes such a file, such as "isobit audit --json".
        replaced: (record, field) -> the type that JSON has instead of the annotated one.
        checks: record -> what its fields must fulfil together; it is given them and the record's name.
    """

    root: str
    command: str
    replaced: Mapping[tuple[type[Any], str], Any] = field(default_factory=dict)
    checks: Mapping[type[Any], Check] = field(default_factory=dict)

    def wrong(self, expected: str, name: str, received: Any) -> ArgumentError:
        """Return the error for a field that is not what it should be; the caller raises it."""
        shown = received if isinstance(received, str) else repr(received)
        return ArgumentError(
            expected=f"{expected} as {name}",
            received=shown if len(shown) <= 200 else f"{shown[:200]}…",
            remedy=f"write the file again with `{self.command}`",
        )

    def load(self, text: str, format_: str) -> dict[str, Any]:
        """Return the object of a JSON text, after a look at its format."""
        try:
            found = json.loads(text, object_pairs_hook=self._once, parse_constant=self._refuse)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise self.wrong("JSON", self.root, str(error)) from None
        if not isinstance(found, dict) or found.get("format") != format_:
            received = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise self.wrong(repr(format_), f"{self.root}.format", received)
        return found

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(n for n in names if names.count(n) > 1)
            raise self.wrong("every name once", self.root, repeated)
        return found

    def _refuse(self, constant: str) -> Any:
        raise self.wrong("a finite number or a string", self.root, constant)

    def record(self, kind: type[Any], found: Any, name: str) -> Any:
        """Read one dataclass; every field is checked against its annotation."""
        if not isinstance(found, dict):
            raise self.wrong(f"an object with the fields of {kind.__name__}", name, found)
        hints: dict[str, Any] = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for each in found:
            if each not in fields:
                raise self.wrong(f"a field of {kind.__name__}", name, each)
        values = {}
        for each in fields.values():
            at = f"{name}.{each.name}"
            if each.name in found:
                hint = self.replaced.get((kind, each.name), hints[each.name])
                values[each.name] = self.read(hint, found[each.name], at)
            elif each.default is each.default_factory is dataclasses.MISSING:
                raise self.wrong("a value", at, "nothing")
        if kind in self.checks:
            self.checks[kind](values, name)
        return kind(**values)

    def read(self, hint: Any, found: Any, name: str) -> Any:
        """Read a value of an annotated type: a record, an optional, a tuple, a dictionary or a plain value."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            (kind,) = [arm for arm in inner if arm is not type(None)]
            return None if found is None else self.read(kind, found, name)
        if dataclasses.is_dataclass(hint):
            return self.record(hint, found, name)  # type: ignore[arg-type]
        if origin is tuple:
            if not isinstance(found, list) or (inner[-1] is not ... and len(found) != len(inner)):
                expected = "a list" if inner[-1] is ... else f"a list of {len(inner)}"
                raise self.wrong(expected, name, found)
            kinds = [inner[0]] * len(found) if inner[-1] is ... else inner
            return tuple(
                self.read(kind, item, f"{name}[{at}]")
                for at, (kind, item) in enumerate(zip(kinds, found, strict=True))
            )
        if origin in (dict, Mapping):
            if not isinstance(found, dict):
                raise self.wrong("an object", name, found)
            return {key: self.read(inner[1], item, f"{name}.{key}") for key, item in found.items()}
        return self._value(hint, found, name)

    def _value(self, kind: Any, found: Any, name: str) -> Any:
        if kind is float:
            if isinstance(found, str) and found in NOT_FINITE:
                return NOT_FINITE[found]
            if type(found) is float or (type(found) is int and abs(found) <= LARGEST_COUNT):
                return float(found)
            raise self.wrong("a number", name, found)
        if kind is int:
            if type(found) is not int or not 0 <= found <= LARGEST_COUNT:
                raise self.wrong(f"a whole number from 0 to {LARGEST_COUNT}", name, found)
        elif type(found) is not kind:
            raise self.wrong({str: "text", bool: "true or false"}[kind], name, found)
        return found
