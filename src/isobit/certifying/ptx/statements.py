"""PTX text cut into statements: comments removed, line numbers and Python places kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from isobit.certifying.running.refusals import PtxSyntaxError

LABEL = re.compile(r"^([\w$]+)\s*:(?!:)\s*")
LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+(\d+)(.*)$")
INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")
INLINED_COMMENT = re.compile(r"@\[\s*([^\s:]+):(\d+)")
FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
# Directives that end with their line, not with a semicolon.
ENTRIES = (".visible .entry", ".entry", ".weak .entry")
LINE_DIRECTIVES = (".version", ".target", ".address_size", ".loc", ".file", ".section")

Place = tuple[int, int]  # file number and line
Spot = tuple[int, int, int]  # and column


@dataclass
class Statement:
    """One statement: "open", "close", "label", "line" (a line directive) or "text"."""

    kind: str
    text: str
    line: int
    place: Place | None
    callers: tuple[Place | tuple[str, int], ...]


def wrong(line: int, text: str, expected: str = "PTX that the parser knows") -> PtxSyntaxError:
    """Return the error for a line that is not known."""
    return PtxSyntaxError(
        expected=expected,
        received=f"PTX line {line}: {text.strip()[:160]}",
        remedy="compile with Triton 3.7.1, or report the line",
    )


def without_comments(text: str) -> list[tuple[str, str]]:
    """Return each line without its comments, and the `//` comment beside it."""
    blank = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)
    lines = []
    for line in blank.splitlines():
        quoted = re.match(r'^[^"/]*"[^"]*"[^"/]*', line) if '"' in line else None
        start = quoted.end() if quoted else 0
        at = line.find("//", start)
        lines.append((line, "") if at < 0 else (line[:at], line[at + 2 :]))
    return lines


class Splitter:
    """Cuts PTX text into statements, and remembers the `.file` table."""

    def __init__(self, text: str) -> None:
        self.lines = without_comments(text)
        self.files: dict[int, str] = {}
        self.place: Place | None = None
        self.callers: tuple[Place | tuple[str, int], ...] = ()
        self.called_at: dict[Spot, Spot] = {}  # of inlined code, as the last .loc of a spot has it
        self.in_section = False

    def statement(self, kind: str, text: str, line: int) -> Statement:
        """Return a statement at the current Python place."""
        return Statement(kind, text, line, self.place, self.callers)

    def __iter__(self) -> Iterator[Statement]:
        buffer, start = "", 0
        for number, (raw, comment) in enumerate(self.lines, 1):
            line = raw.strip()
            while line:
                if self.in_section:
                    line = self.skip_section(line)
                    continue
                if not buffer:
                    start = number
                    if line[0] in "{}":
                        yield self.statement("open" if line[0] == "{" else "close", line[0], number)
                        line = line[1:].strip()
                        continue
                    if line.startswith(LINE_DIRECTIVES):
                        yield from self.directive(line, comment, number)
                        break
                    label = LABEL.match(line)
                    if label:
                        yield self.statement("label", label[1], number)
                        line = line[label.end() :]
                        continue
                if (buffer or line).startswith(ENTRIES):
                    head, brace, rest = line.partition("{")
                    buffer = f"{buffer} {head}".strip()
                    if brace:
                        yield self.statement("entry", buffer, start)
                        yield self.statement("open", "{", number)
                        buffer, line = "", rest.strip()
                        continue
                    break
                head, end, rest = line.partition(";")
                buffer = f"{buffer} {head}".strip()
                if not end:
                    break
                if buffer:
                    yield self.statement("text", buffer, start)
                buffer, line = "", rest.strip()
        if buffer:
            raise wrong(start, buffer, "a statement that ends with a semicolon")

    def skip_section(self, line: str) -> str:
        """Skip a section of debugging data up to its closing brace."""
        if "}" in line:
            self.in_section = False
            return line.partition("}")[2].strip()
        return ""

    def chain(self, found: re.Match[str]) -> tuple[Place, ...]:
        """Return the calls around inlined code, innermost first; a `.loc` names only the innermost.

        The places of the outer calls come in `.loc` directives of their own, before that of the inlined code.
        """
        spot = (int(found[1]), int(found[2]), int(found[3]))
        self.called_at.pop(spot, None)
        if call := INLINED.search(found[4]):
            self.called_at[spot] = (int(call[1]), int(call[2]), int(call[3]))
        calls: list[Spot] = []
        while spot in self.called_at and self.called_at[spot] not in calls:
            spot = self.called_at[spot]
            calls.append(spot)
        return tuple(call[:2] for call in calls)

    def directive(self, line: str, comment: str, number: int) -> Iterator[Statement]:
        """Take a directive of one line."""
        if line.startswith(".loc"):
            found = LOC.match(line)
            if not found:
                raise wrong(number, line)
            self.place = (int(found[1]), int(found[2])) if int(found[2]) else None
            self.callers = self.chain(found) or tuple(
                (name, int(n)) for name, n in INLINED_COMMENT.findall(comment)
            )
        elif line.startswith(".file"):
            found = FILE.match(line)
            if not found:
                raise wrong(number, line)
            self.files[int(found[1])] = f"{found[2]}/{found[3]}" if found[3] else found[2]
        elif line.startswith(".section"):
            self.in_section = not line.endswith("}")
        else:
            yield self.statement("line", line, number)


def operands_of(text: str) -> list[str]:
    """Cut the operands of an instruction at the commas outside brackets."""
    found, level, current = [], 0, ""
    for letter in text:
        level += (letter in "{[(") - (letter in "}])")
        if letter == "," and not level:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    if current.strip() or found:
        found.append(current.strip())
    return found


def calls_function(line: int, text: str) -> PtxSyntaxError:
    """Return the error for a kernel that calls a function at run time, by what it is in Triton."""
    words = {
        "vprintf": ("tl.device_print", "remove it from the kernel: it changes no result"),
        "__assertfail": (
            "tl.device_assert",
            "remove it, or compile without debug: TRITON_DEBUG=0, and no debug=True at the launch",
        ),
    }
    what, remedy = next(
        (found for name, found in words.items() if name in text),
        ("a function call", "leave out noinline=True and functions of external libraries"),
    )
    return PtxSyntaxError(
        expected="a kernel that calls no function at run time",
        received=f"{what}: PTX line {line}: {text[:80]}",
        remedy=remedy,
    )
