"""Reads the PTX that Triton emits. Syntax that is not known is an error that names its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from isobit.certifying.ptx.program import (
    WIDTHS,
    Address,
    Guard,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Parameter,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from isobit.certifying.running.refusals import PtxSyntaxError

# PTX text cut into statements: comments removed, line numbers and Python places kept.

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


ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*)\))?([^)]*)$", re.S)
PARAMETER = re.compile(
    r"^\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr)?(?:\s+\.\w+(?:::\w+)?(?:\s+\d+)?)*?\s+"
    r"([\w$]+)(?:\[(\d+)\])?$"
)
SIZES = re.compile(r"\.(reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
KNOWN_ENTRY = re.compile(
    r"\.(?:reqntid|maxntid)\s+\d+(?:\s*,\s*\d+)*|\.minnctapersm\s+\d+|\.maxnreg\s+\d+"
    r"|\.reqnctapercluster\s+1(?:\s*,\s*1)*"
)
REG = re.compile(r"^\.reg\s+\.(\w+)\s+(.+)$", re.S)
VARIABLE = re.compile(
    r"^(?:\.extern\s+|\.visible\s+|\.weak\s+)?\.(shared|global|const)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)
NUMBER = re.compile(r"^(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
FLOAT32, FLOAT64 = re.compile(r"^0[fF]([0-9a-fA-F]{8})$"), re.compile(r"^0[dD]([0-9a-fA-F]{16})$")
NAME = re.compile(r"^[%$\w][\w$.%]*$")
SPECIALS = re.compile(
    r"^%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|^%(?:laneid|warpid|nwarpid|cluster_ctarank|cluster_nctarank|clock|clock64|globaltimer"
    r"|smid|nsmid|gridid|lanemask_(?:eq|lt|le|gt|ge)|dynamic_smem_size|total_smem_size)$"
)
OPCODE = re.compile(r"^[a-z][\w]*(?:\.[\w:]+)*$")


def parse(text: str) -> Program:
    """Return the kernel of a PTX module.

    Args:
        text: PTX of one kernel, as `kernel.asm["ptx"]` of Triton has it.

    Raises:
        PtxSyntaxError: text that is not known, with its line.

    Example:
        >>> text = '''.version 8.0
        ... .target sm_80
        ... .entry double(.param .u64 double_param_0) .reqntid 32 {
        ...   .reg .b64 %rd<2>;
        ...   ld.param.b64 %rd1, [double_param_0];
        ...   ret;
        ... }'''
        >>> program = parse(text)
        >>> program.threads, [each.opcode for each in program.instructions]
        (32, ['ld.param.b64', 'ret'])
    """
    return Parser(text).program()


class Parser:
    """One pass over the statements of a module."""

    def __init__(self, text: str) -> None:
        self.splitter = Splitter(text)
        self.scopes: list[dict[str, Register]] = []
        self.label_scopes: list[dict[str, str]] = []
        self.made = Program(name="", target="", threads=0)
        self.waiting: list[tuple[Instruction, list[dict[str, str]], Statement]] = []

    def program(self) -> Program:
        """Return the parsed kernel."""
        for statement in self.splitter:
            getattr(self, f"take_{statement.kind}")(statement)
        if not self.made.name:
            raise wrong(1, "no .entry", "a module with one kernel")
        if self.scopes:
            raise wrong(len(self.splitter.lines), "the end of the text", "closed scopes")
        self.made.files = self.splitter.files
        for instruction, labels, statement in self.waiting:
            self.resolve(instruction, labels, statement)
        return self.made

    def take_line(self, statement: Statement) -> None:
        """Take `.version`, `.target` or `.address_size`."""
        words = statement.text.split()
        if words[0] == ".target":
            self.made.target = words[1].rstrip(",")
        elif words[0] == ".address_size" and words[1] != "64":
            raise wrong(statement.line, statement.text, "addresses of 64 bits")

    def take_entry(self, statement: Statement) -> None:
        """Take the head of the kernel: its name, parameters and number of threads."""
        if self.made.name:
            raise wrong(statement.line, statement.text, "one kernel in a module")
        found = ENTRY.search(statement.text)
        if not found:
            raise wrong(statement.line, statement.text)
        self.made.name = found[1]
        for one in operands_of(found[2] or ""):
            parameter = PARAMETER.match(" ".join(one.split()))
            if not parameter or parameter[1] not in WIDTHS:
                raise wrong(statement.line, one)
            self.made.parameters.append(
                Parameter(parameter[1], parameter[2], int(parameter[3] or 0))
            )
        rest = KNOWN_ENTRY.sub("", found[3]).strip()
        sizes = {kind: (int(x), y or "1", z or "1") for kind, x, y, z in SIZES.findall(found[3])}
        size = sizes.get("reqntid") or sizes.get("maxntid")
        if ".reqnctapercluster" in rest:
            raise wrong(statement.line, found[3], "a CTA that runs by itself (num_ctas=1)")
        if rest or size is None or size[1:] != ("1", "1"):
            raise wrong(statement.line, found[3], "a kernel with .reqntid along x")
        self.made.threads = size[0]

    def take_open(self, statement: Statement) -> None:
        """Open a scope of registers and labels."""
        if not self.made.name:
            raise wrong(statement.line, statement.text)
        self.scopes.append({})
        self.label_scopes.append({})

    def take_close(self, statement: Statement) -> None:
        """Close the innermost scope."""
        if not self.scopes:
            raise wrong(statement.line, statement.text)
        self.scopes.pop()
        self.label_scopes.pop()

    def take_label(self, statement: Statement) -> None:
        """Take a label; one in an inner scope may repeat a name."""
        if not self.scopes:
            raise wrong(statement.line, statement.text)
        unique = statement.text
        if len(self.scopes) > 1:
            unique = f"{statement.text} at line {statement.line}"
        if unique in self.made.labels:
            raise wrong(statement.line, statement.text, "a label that is given once")
        self.label_scopes[-1][statement.text] = unique
        self.made.labels[unique] = len(self.made.instructions)

    def take_text(self, statement: Statement) -> None:
        """Take a declaration or an instruction."""
        text = " ".join(statement.text.split())
        if text.startswith(".reg"):
            self.declare(statement, text)
        elif text.startswith(".pragma"):
            return
        elif text.startswith(".branchtargets"):
            raise wrong(statement.line, text, "no warp specialisation (warp_specialize=False)")
        elif text.startswith((".extern .func", ".visible .func", ".func")):
            raise calls_function(statement.line, text)
        elif text.startswith("."):
            self.variable(statement, text)
        elif self.scopes:
            self.instruction(statement, text)
        else:
            raise wrong(statement.line, text)

    def declare(self, statement: Statement, text: str) -> None:
        """Declare registers, one by one or as `%r<10>`."""
        found = REG.match(text)
        if not found or found[1] not in WIDTHS or not self.scopes:
            raise wrong(statement.line, text)
        for one in found[2].split(","):
            name, bracket, count = one.strip().partition("<")
            many = [f"{name}{i}" for i in range(int(count[:-1]))] if bracket else [name]
            for each in many:
                if not NAME.match(each):
                    raise wrong(statement.line, text)
                register = Register(each, found[1], len(self.made.registers))
                self.made.registers.append(register)
                self.scopes[-1][each] = register

    def variable(self, statement: Statement, text: str) -> None:
        """Declare a variable in shared or global memory."""
        if text.startswith(".local"):
            raise PtxSyntaxError(
                expected="a kernel without arrays in local memory",
                received=f"PTX line {statement.line}: {text}",
                remedy="tl.sin and tl.cos need them, and branch on their argument: use a polynomial",
            )
        found = VARIABLE.match(text)
        if not found or found[3] not in WIDTHS:
            raise wrong(statement.line, text)
        size = WIDTHS[found[3]] // 8
        count = 1 if found[5] is None else int(found[5] or 0)
        data = None
        if found[6] is not None:
            values = [int(v.strip(), 0) for v in found[6].strip("{} ").split(",") if v.strip()]
            raw = b"".join((v % (1 << 8 * size)).to_bytes(size, "little") for v in values)
            data = raw.ljust(size * count, b"\0")
        space = "global" if found[1] == "const" else found[1]
        if space == "global" and data is None:
            data = bytes(size * count)
        align = int(found[2] or size)
        self.made.variables[found[4]] = Variable(found[4], space, align, size * count, data)

    def instruction(self, statement: Statement, text: str) -> None:
        """Take an instruction; its operands are resolved when all labels are known."""
        guard, body = None, text
        if body.startswith("@"):
            word, _, body = body[1:].strip().partition(" ")
            if word == "!":
                name, _, body = body.strip().partition(" ")
                word = "!" + name
            register = self.register(word.lstrip("!"))
            if register is None or register.type != "pred":
                raise wrong(statement.line, text, "a guard that is a declared predicate")
            guard = Guard(register, word.startswith("!"))
        opcode, _, rest = body.strip().partition(" ")
        if not OPCODE.match(opcode):
            raise wrong(statement.line, text)
        operands = tuple(self.operand(one, statement) for one in operands_of(rest))
        made = Instruction(
            guard, opcode, operands, statement.line, None, text, len(self.made.instructions)
        )
        self.made.instructions.append(made)
        self.waiting.append((made, list(self.label_scopes), statement))

    def register(self, name: str) -> Register | None:
        """Find a register from the innermost scope outward."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def operand(self, text: str, statement: Statement) -> Operand:
        """Return one operand."""
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.operand(one, statement) for one in operands_of(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            return self.address(text[1:-1].strip(), statement)
        if text == "_":
            return Sink()
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self.operand(first, statement), self.operand(second, statement))
        for pattern, kind in ((FLOAT32, "f32"), (FLOAT64, "f64")):
            found = pattern.match(text)
            if found:
                return Immediate(int(found[1], 16), kind)
        number = NUMBER.match(text)
        if number:
            value = int(number[2], 0) if not number[2].isdigit() else int(number[2])
            return Immediate(-value if number[1] else value, "int")
        register = self.register(text)
        if register is not None:
            return register
        if SPECIALS.match(text):
            return Special(text)
        if not NAME.match(text) or text.startswith("%"):
            raise wrong(statement.line, statement.text, f"a known operand, not {text!r}")
        return Symbol(text)

    def address(self, text: str, statement: Statement) -> Operand:
        """Return an operand in brackets."""
        if "," in text or "{" in text:  # a tensor map and coordinates
            return Vector(tuple(self.operand(one, statement) for one in operands_of(text)))
        found = re.match(r"^([%$\w.]+)\s*(?:([+-])\s*([+-]?\s*\w+))?$", text)
        if not found:
            raise wrong(statement.line, statement.text)
        offset = int((found[3] or "0").replace(" ", ""), 0)
        return Address(self.operand(found[1], statement), -offset if found[2] == "-" else offset)

    def resolve(
        self, made: Instruction, labels: list[dict[str, str]], statement: Statement
    ) -> None:
        """Give an instruction its labels and its Python place."""
        if made.parts[0] == "bra":
            name = made.operands[0].name if isinstance(made.operands[0], Symbol) else ""
            unique = next((scope[name] for scope in reversed(labels) if name in scope), None)
            if unique is None:
                raise wrong(made.line, made.text, "a branch to a known label")
            made.operands = (Symbol(unique), *made.operands[1:])
        files = self.splitter.files
        if statement.place is not None and statement.place[0] in files:
            made.source = (files[statement.place[0]], statement.place[1])
        made.call_sites = tuple(self.caller(*each) for each in statement.callers)

    def caller(self, file: int | str, line: int) -> tuple[str, int]:
        """Return the place of a call; a comment has only the name of its file."""
        files = self.splitter.files
        if isinstance(file, int):
            return files.get(file, str(file)), line
        whole = [each for each in files.values() if PurePosixPath(each).name == file]
        return (whole[0] if len(whole) == 1 else file), line
