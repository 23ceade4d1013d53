"""The kinds of values in a contract file: each parses a node or raises an error, and has a JSON schema."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import yaml  # type: ignore[import-untyped]

from isobit.errors import ContractError

# Read YAML as plain data with line numbers: no tags, anchors or duplicate keys; bounded in size and depth.

MAX_CHARACTERS = 1_000_000
MAX_BYTES = 4 * MAX_CHARACTERS  # of UTF-8
MAX_DEPTH = 24
MAX_NODES = 100_000
MAX_DIGITS = 40  # of a number: no size, limit or date is longer

Value = "str | int | float | bool | None | list[Node] | dict[str, Node]"
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
INTEGER = re.compile(r"[-+]?[0-9]+")
# Each digit can match in one place only: otherwise a long run of digits takes quadratic time.
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")

# libyaml if PyYAML was built with it: ten times faster, the same events.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Node:
    """A value and its line; in mappings and lists, values are nodes, those of mappings with their key's line."""

    value: Any
    line: int
    key_line: int = 0

    def plain(self) -> Any:
        """Return the value without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def read_yaml(text: str, where: str) -> Node:
    """Return the one document of a text; raise only ContractError, in bounded time."""
    if len(text) > MAX_CHARACTERS:
        expected = f"at most {MAX_CHARACTERS:,} characters"
        _refuse(expected, f"{len(text):,}", "split the contract", where, 0)
    if directive := re.search(r"^%", text, re.MULTILINE):
        # libyaml compares each %TAG with all before it: 50,000 of them take seconds.
        line = text.count("\n", 0, directive.start()) + 1
        received = text[directive.start() :][:20].splitlines()[0]
        _refuse("no directives", received, "remove the line", where, line)
    try:
        # Read events instead of constructing objects: nothing is built from a tag or an alias.
        return _Reader(yaml.parse(text, Loader=LOADER), where).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error or "no YAML").splitlines()[0]
        line = mark.line if mark else text.encode()[: getattr(error, "position", 0)].count(b"\n")
        _refuse("YAML", problem, "correct the syntax", where, line + 1)
    except (UnicodeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        _refuse("YAML in UTF-8", str(error)[:200], "correct the text", where, 0)


class _Reader:
    """Builds nodes from YAML events, and counts depth and nodes."""

    def __init__(self, events: Iterator[Any], where: str) -> None:
        self.events, self.where, self.count = events, where, 0

    def document(self) -> Node:
        kinds = (yaml.StreamStartEvent, yaml.DocumentStartEvent)
        event = next(self.events)
        while isinstance(event, kinds):
            event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            _refuse(
                "a contract", "an empty file", "isobit new writes one to start from", self.where, 1
            )
        root = self.node(event, 0)
        for rest in self.events:
            if not isinstance(rest, (yaml.DocumentEndEvent, yaml.StreamEndEvent)):
                remedy = "write one contract per file"
                line = rest.start_mark.line + 1
                _refuse("one document per file", "several", remedy, self.where, line)
        return root

    def node(self, event: Any, depth: int, key_line: int = 0) -> Node:
        line = event.start_mark.line + 1
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"at most {MAX_NODES:,} values, nested at most {MAX_DEPTH} deep"
            received = f"{self.count:,} values, {depth} deep"
            _refuse(limit, received, "flatten or split the contract", self.where, line)
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            expected = "no anchors and no aliases"
            _refuse(expected, f"&{event.anchor}", "write the value out", self.where, line)
        if event.tag is not None and event.tag != "!":
            _refuse("no tags", event.tag, "write a plain value", self.where, line)
        if isinstance(event, yaml.ScalarEvent):
            return Node(self.scalar(event, line), line, key_line)
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(
                [self.node(e, depth + 1) for e in self.until(yaml.SequenceEndEvent)], line, key_line
            )
        return Node(self.mapping(depth), line, key_line)

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def mapping(self, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for event in self.until(yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key.value, str):
                received = repr(key.plain())[:80]
                _refuse("a key that is text", received, "quote the key", self.where, key.line)
            if key.value in found:
                _refuse("each key once", f"{key.value!r} twice", "remove one", self.where, key.line)
            found[key.value] = self.node(next(self.events), depth + 1, key.line)
        return found

    def scalar(self, event: Any, line: int) -> Any:
        """Read true, false, null and numbers; every other word is text, including `no`, `on` and dates."""
        text: str = event.value
        if event.style:  # "" for plain in libyaml, None in PyYAML
            return text
        if text.lower() in WORDS:
            return WORDS[text.lower()]
        if not NUMBER.fullmatch(text):
            return {".nan": float("nan"), ".inf": float("inf"), "-.inf": float("-inf")}.get(
                text.lower(), text
            )
        if len(text) > MAX_DIGITS:
            expected = f"numbers of at most {MAX_DIGITS} characters"
            _refuse(expected, text[:20] + "…", "quote it", self.where, line)
        return int(text) if INTEGER.fullmatch(text) else float(text)


def _refuse(expected: str, received: str, remedy: str, where: str, line: int) -> NoReturn:
    raise ContractError(expected=expected, received=received, remedy=remedy, where=where, line=line)


Schema = dict[str, Any]


class Kind(Protocol):
    """What a key may contain."""

    def read(self, node: Node, path: str, where: str) -> Any:
        """Return the value, or raise a ContractError."""
        ...

    def schema(self) -> Schema:
        """Return the JSON schema, for editors."""
        ...


def refuse(
    node: Node, path: str, where: str, expected: str, remedy: str, received: str = ""
) -> NoReturn:
    """Raise a ContractError at a place in the file."""
    shown = received or repr(node.plain())
    shown = shown if len(shown) <= 120 else shown[:117] + "…"
    raise ContractError(
        expected=f"{path}: {expected}", received=shown, remedy=remedy, where=where, line=node.line
    )


def suggest(word: str, known: Sequence[str]) -> str:
    """Suggest the nearest known word, or list all of them."""
    # Long words are not misspellings, and comparing them takes quadratic time.
    near = (
        difflib.get_close_matches(word, [k for k in known if len(k) <= 100], 1, 0.6)
        if len(word) <= 100
        else []
    )
    shown = [*known[:30], *(["…"] if len(known) > 30 else [])]
    return f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(shown)}"


@dataclass(frozen=True)
class Text:
    """A line or a paragraph; `pattern` for names, `longest` for the number of characters (0: any)."""

    pattern: str = ""
    like: str = "text that is not empty"
    longest: int = 0

    def read(self, node: Node, path: str, where: str) -> str:
        value = node.value
        if (
            not isinstance(value, str)
            or not value.strip()
            or (self.pattern and not re.fullmatch(self.pattern, value))
            or len(value.strip()) > (self.longest or len(value))
        ):
            refuse(node, path, where, self.like, "write it in that form")
        return value.strip()

    def schema(self) -> Schema:
        limit = {"maxLength": self.longest} if self.longest else {}
        return (
            {"type": "string"}
            | ({"pattern": f"^(?:{self.pattern})$"} if self.pattern else {"minLength": 1})
            | limit
        )


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: Sequence[str]

    def read(self, node: Node, path: str, where: str) -> str:
        if node.value not in self.words:
            remedy = suggest(str(node.value), self.words)
            refuse(node, path, where, f"one of {', '.join(self.words)}", remedy)
        return str(node.value)

    def schema(self) -> Schema:
        return {"enum": list(self.words)}


@dataclass(frozen=True)
class Number:
    """A finite number."""

    low: float = float("-inf")
    whole: bool = False

    def read(self, node: Node, path: str, where: str) -> float | int:
        value = node.value
        kinds = (int,) if self.whole else (int, float)
        finite = (
            isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < float("inf")
        )
        if not finite or value < self.low:
            least = "" if self.low == float("-inf") else f" of at least {self.low:g}"
            expected = f"a {'whole ' if self.whole else 'finite '}number{least}"
            refuse(node, path, where, expected, "write a number")
        return value  # type: ignore[no-any-return]

    def schema(self) -> Schema:
        least = {} if self.low == float("-inf") else {"minimum": self.low}
        return {"type": "integer" if self.whole else "number"} | least


@dataclass(frozen=True)
class Scalar:
    """Any plain value; texts have a limited length."""

    longest: int = 1000

    def read(self, node: Node, path: str, where: str) -> Any:
        if isinstance(node.value, (dict, list)):
            refuse(node, path, where, "a plain value", "no lists and no mappings here")
        if isinstance(node.value, str) and len(node.value) > self.longest:
            refuse(node, path, where, f"at most {self.longest:,} characters", "shorten it")
        return node.value

    def schema(self) -> Schema:
        return {"type": ["string", "number", "boolean", "null"], "maxLength": self.longest}


@dataclass(frozen=True)
class Date:
    """A date, as 2027-01-31."""

    def read(self, node: Node, path: str, where: str) -> str:
        try:
            # Python 3.11 takes more forms than 3.10, as 20270131.
            if not isinstance(node.value, str) or not re.fullmatch(
                r"[0-9]{4}-[0-9]{2}-[0-9]{2}", node.value
            ):
                raise ValueError
            return datetime.date.fromisoformat(node.value).isoformat()
        except ValueError:
            refuse(node, path, where, "a day as 2027-01-31", "write year, month and day")

    def schema(self) -> Schema:
        return {"type": "string", "format": "date"}


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind, at least `least` of them."""

    kind: Kind
    least: int = 0

    def read(self, node: Node, path: str, where: str) -> tuple[Any, ...]:
        if not isinstance(node.value, list) or len(node.value) < self.least:
            expected = f"a list of at least {self.least}"
            refuse(node, path, where, expected, "write it as - items, or [a, b]")
        return tuple(
            self.kind.read(item, f"{path}[{i}]", where) for i, item in enumerate(node.value)
        )

    def schema(self) -> Schema:
        return {"type": "array", "items": self.kind.schema()} | (
            {"minItems": self.least} if self.least else {}
        )


@dataclass(frozen=True)
class MapOf:
    """A mapping from names to values of one kind."""

    kind: Kind
    least: int = 0

    def read(self, node: Node, path: str, where: str) -> dict[str, Any]:
        if not isinstance(node.value, dict) or len(node.value) < self.least:
            expected = f"a mapping of at least {self.least} names"
            refuse(node, path, where, expected, "write it as name: value")
        return {
            key: self.kind.read(item, f"{path}.{key}", where) for key, item in node.value.items()
        }

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": self.kind.schema()}


@dataclass(frozen=True)
class Key:
    """A key of a record: its kind, whether it is required, and its description."""

    kind: Kind
    about: str
    required: bool = False


@dataclass(frozen=True)
class RecordOf:
    """A mapping that allows only known keys, and the function that builds a record from it."""

    build: Callable[..., Any]
    keys: Mapping[str, Key]
    name: str
    choose: Callable[[Node], Mapping[str, Key]] = field(default=lambda _: {})

    def read(self, node: Node, path: str, where: str) -> Any:
        if not isinstance(node.value, dict):
            expected = f"a mapping with the keys of {self.name}"
            refuse(node, path, where, expected, f"keys: {', '.join(self.keys)}")
        keys = {**self.keys, **self.choose(node)}
        # Known keys first: a misspelt relation is reported before the keys that it would have allowed.
        read = {
            k: keys[k].kind.read(item, f"{path}.{k}", where)
            for k, item in node.value.items()
            if k in keys
        }
        for key, item in node.value.items():
            if key not in keys:
                at = Node(item.value, item.key_line or item.line)
                remedy = suggest(key, list(keys))
                refuse(at, f"{path}.{key}", where, f"a key of {self.name}", remedy, repr(key))
        missing = [key for key, spec in keys.items() if spec.required and key not in node.value]
        if missing:
            about = f"add {missing[0]}: {keys[missing[0]].about}"
            expected = f"the keys {', '.join(missing)}"
            refuse(node, path, where, expected, about, f"only {', '.join(node.value)}")
        return self.build(read, node.line)

    def schema(self) -> Schema:
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [key for key, spec in self.keys.items() if spec.required],
            "properties": {
                key: spec.kind.schema() | {"description": spec.about}
                for key, spec in self.keys.items()
            },
        }
