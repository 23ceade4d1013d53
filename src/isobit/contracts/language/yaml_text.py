"""Read YAML as plain data with line numbers: no tags, anchors or duplicate keys; bounded in size and depth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from isobit.errors import ContractError

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
                "a contract",
                "an empty file",
                "isobit contract new writes one to start from",
                self.where,
                1,
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
