"""Random changes of one float operation in PTX text, and whether the comparison with the plan catches them.

A mutation that leaves all names as they were is a miss, unless it provably changes nothing: its instruction is never
executed at these sizes, the registers that it exchanges hold the same constant whenever it is executed, or no output
depends on its result: the outputs keep their bits when the result is replaced by NaN, which arithmetic passes on, and
by other numbers (a thread that computes a copy of a value that another thread stores). Such a mutation is drawn again,
and the reason is counted. That the mutation itself leaves the bits of the outputs alone is no reason.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np

from isobit.compiled.refusals import MachineError, PtxSyntaxError
from tests.compiled.cases import (
    attention_case,
    judge,
    linear_case,
    patterns,
    rms_norm_case,
    softmax_case,
    weight_grad_case,
)
from tests.compiled.running import Session, raw

FLOAT = re.compile(
    r"^\s*(@!?%\w+\s+)?((?:add|sub|mul|fma|div|sqrt|max)\.[\w.]*f32(?:x2)?|cvt\.rn\.(?:bf16|f16)(?:x2)?\.f32"
    r"|selp\.f32|mma\.sync[\w.]*)\s+(.*);"
)
OTHER = {"add": "sub", "sub": "add", "mul": "add", "max": "min", "div": "mul", "fma": "fma"}
REGISTER = re.compile(r"%\w+")


@dataclass
class Line:
    """One float instruction of a PTX text."""

    at: int
    guard: str
    opcode: str
    operands: list

    def text(self):
        return f"\t{self.guard}{self.opcode} \t{', '.join(self.operands)};"

    @property
    def stem(self):
        return self.opcode.split(".")[0]


def float_lines(text):
    """Return the float instructions of a text, outside of inline assembly that spans lines."""
    found = []
    for at, line in enumerate(text.splitlines()):
        match = FLOAT.match(line)
        if match:
            operands = re.findall(r"\{[^}]*\}|[^,{}\s]+", match[3])
            found.append(Line(at, match[1] or "", match[2], operands))
    return found


def swap_operands(line, lines, random):
    """Exchange two operands whose order matters."""
    places = {"sub": (1, 2), "div": (1, 2), "fma": (2, 3), "selp": (1, 2)}.get(line.stem)
    if places is None and line.opcode.startswith("cvt") and "x2" in line.opcode:
        places = (1, 2)
    if places is None:
        return None
    i, j = places
    if line.operands[i] == line.operands[j]:
        return None
    line.operands[i], line.operands[j] = line.operands[j], line.operands[i]
    return line


def change_opcode(line, lines, random):
    """Replace the operation by another one with as many operands."""
    if (
        line.stem not in OTHER
        or line.stem == "fma"
        or (line.stem == "max" and len(line.operands) > 3)
    ):
        return None
    other = OTHER[line.stem]
    rounded = line.opcode if "rn" in line.opcode else line.opcode.replace(".f32", ".rn.f32")
    line.opcode = (
        line.opcode.replace("max", "min")
        if line.stem == "max"
        else rounded.replace(line.stem, other, 1)
    )
    return line


def change_rounding(line, lines, random):
    """Round toward zero instead of to nearest."""
    if ".rn" not in line.opcode:
        return None
    line.opcode = line.opcode.replace(".rn", ".rz", 1)
    return line


def change_register(line, lines, random):
    """Read another register that a float instruction has written before."""
    written = [
        match
        for each in lines
        if each.at < line.at and each.opcode == line.opcode and not each.operands[0].startswith("{")
        for match in REGISTER.findall(each.operands[0])
    ]
    places = [
        i
        for i in range(1, len(line.operands))
        if line.operands[i].startswith("%") and (line.stem != "selp" or i < 3)
    ]
    if not written or not places:
        return None
    place, other = random.choice(places), random.choice(written)
    if other == line.operands[place]:
        return None
    line.operands[place] = other
    return line


def change_fragment(line, lines, random):
    """Exchange two registers inside a fragment of a tensor-core instruction: A, B or the accumulator."""
    if line.stem != "mma":
        return None
    place = random.choice((1, 2, 3))
    items = re.findall(r"[^,{}\s]+", line.operands[place])
    i, j = random.sample(range(len(items)), 2)
    if items[i] == items[j]:
        return None
    items[i], items[j] = items[j], items[i]
    line.operands[place] = "{" + ", ".join(items) + "}"
    return line


def change_constant(line, lines, random):
    """Flip a bit of the fraction of a float constant."""
    places = [i for i, each in enumerate(line.operands) if re.fullmatch(r"0f[0-9A-Fa-f]{8}", each)]
    if not places:
        return None
    place = random.choice(places)
    bits = int(line.operands[place][2:], 16) ^ (1 << random.randrange(23))
    line.operands[place] = f"0f{bits:08X}"
    return line


def drop(line, lines, random):
    """Leave the instruction out."""
    line.opcode, line.operands = "", []
    return line


KINDS = {
    "operands swapped": swap_operands,
    "opcode changed": change_opcode,
    "rounding changed": change_rounding,
    "register replaced": change_register,
    "fragment registers swapped": change_fragment,
    "constant changed": change_constant,
    "instruction dropped": drop,
}


def swap_dependent(text, line, lines, random):
    """Exchange an instruction with the next float instruction that reads its result."""
    rows = text.splitlines()
    results = set(REGISTER.findall(line.operands[0]))
    for each in lines:
        if line.at < each.at <= line.at + 40 and results & set(
            REGISTER.findall(" ".join(each.operands[1:]))
        ):
            if any(
                re.match(r"\s*(\$\w+:|.*\bbra)", row) and "tmp" not in row
                for row in rows[line.at : each.at]
            ):
                return None
            rows[line.at], rows[each.at] = rows[each.at], rows[line.at]
            return "\n".join(rows)
    return None


def mutate(text, random):
    """Return one mutation: its kind, what changed, the new text, the lines (from 1), the registers exchanged."""
    lines = float_lines(text)
    while True:
        line = random.choice(lines)
        kind = random.choice([*KINDS, "dependent instructions swapped"])
        before = text.splitlines()[line.at].strip()
        if kind == "dependent instructions swapped":
            changed = swap_dependent(text, line, lines, random)
            if changed is None or changed == text:
                continue
            pairs = zip(text.splitlines(), changed.splitlines(), strict=True)
            moved = {at + 1 for at, (old, new) in enumerate(pairs) if old != new}
            return {"kind": kind, "what": before, "text": changed, "lines": moved, "exchanged": ()}
        made = KINDS[kind](
            Line(line.at, line.guard, line.opcode, list(line.operands)), lines, random
        )
        if made is None:
            continue
        rows = text.splitlines()
        rows[line.at] = made.text() if made.opcode else ""
        what = f"{before} -> {rows[line.at].strip() or 'nothing'}"
        places = {"exchanged": exchanged(line, made), "lines": {line.at + 1}}
        return {"kind": kind, "what": what, "text": "\n".join(rows), **places}


def exchanged(before, after):
    """Return the two registers of which one stands where the other stood, or nothing."""
    old, new = (REGISTER.findall(" ".join(each.operands)) for each in (before, after))
    pairs = {tuple(sorted(pair)) for pair in zip(old, new, strict=False) if pair[0] != pair[1]}
    same_text = before.opcode == after.opcode and len(old) == len(new)
    return pairs.pop() if same_text and len(pairs) == 1 else ()


SUBJECTS = (
    ("sm_80", lambda: linear_case("bf16", 16, 16, 64)),
    ("sm_90", lambda: linear_case("f16", 16, 8, 512, (16, 8, 64), warps=1)),
    ("sm_80", lambda: linear_case("f32", 16, 16, 32, (16, 16, 16))),
    ("sm_100", lambda: linear_case("f32", 16, 16, 32, (16, 16, 16))),
    ("sm_90", lambda: rms_norm_case("f32", 2, 64)),
    ("sm_100", lambda: softmax_case("bf16", 2, 256)),
    ("sm_90", lambda: attention_case("bf16", 8, 192, chunk=128)),
    ("sm_80", lambda: weight_grad_case("bf16", [32, 16], 16, 16, (16, 16, 16))),
)


@dataclass
class Tally:
    """What became of the mutations that were drawn."""

    caught: Counter = field(default_factory=Counter)  # by kind
    how: Counter = field(default_factory=Counter)  # names, or the refusal
    again: Counter = field(default_factory=Counter)  # drawn again, by reason
    bits: int = 0  # of those caught by names, how many changed a bit of the output on one input
    missed: list = field(default_factory=list)


def try_mutations(count, seed, subjects=SUBJECTS):
    """Draw mutations until `count` are judged."""
    random, tally, made = Random(seed), Tally(), {}
    while sum(tally.caught.values()) + len(tally.missed) < count:
        number = random.randrange(len(subjects))
        target, make = subjects[number]
        if number not in made:
            made[number] = make()
        judge_one(made[number], target, random, tally)
    return tally


def judge_one(case, target, random, tally):
    """Draw one mutation of a case and judge it."""
    drawn = {}

    def change(kernel, text):
        drawn.update(mutate(text, random))
        return drawn["text"]

    try:
        found = judge(case, target, mutate=change)
    except (MachineError, PtxSyntaxError) as error:
        tally.caught[drawn["kind"]] += 1
        tally.how[f"refused ({type(error).__name__})"] += 1
        return
    if found.names_differ:
        tally.caught[drawn["kind"]] += 1
        tally.how["names"] += 1
        tally.bits += found.bits_differ > 0
        return
    reason = neutral(case, target, drawn)
    if reason:
        tally.again[reason] += 1
    else:
        tally.missed.append((target, case.operator, case.dtype, drawn["kind"], drawn["what"]))


def neutral(case, target, drawn):
    """Return why a mutation changes nothing, or "" if that is not certain. The original program is asked."""
    for launch in case.launches:
        program = launch.compile(target)[0].program
        changed = [each for each in program.instructions if each.line in drawn["lines"]]
        if not changed:
            continue
        contents = Contents(changed[0], drawn["exchanged"])
        session = Session(target, watch=contents)
        for each in case.launches:
            session.run(each)
        if not any(session.hits[program.name, each.index] for each in changed):
            return "never executed at these sizes"
        if contents.same:
            return "the exchanged registers hold the same constant"
        if not any(reaches_an_output(case, target, each) for each in changed):
            return "no output depends on the result"
    return ""


REPLACEMENTS = (
    0x7FC00000,
    0x7F7FFFFF,
    0xC2F6E979,
    0x3F800000,
)  # NaN, the largest number, -123.456, 1


def reaches_an_output(case, target, instruction):
    """Whether an output changes when the result of an instruction is replaced in all threads."""
    outputs = []
    for bits in (None, *REPLACEMENTS):
        case.output.fill_(float("nan"))
        watch = None if bits is None else Replaced(instruction, bits)
        session = Session(target, names=False, races=False, watch=watch)
        for launch in case.launches:
            session.run(launch)
        outputs.append(patterns(raw(case.output)).copy())
    return any((outputs[0] != each).any() for each in outputs[1:])


class Replaced:
    """Writes other bits over the result of an instruction after each execution."""

    def __init__(self, instruction, bits):
        self.line, self.bits = instruction.line, bits
        self.results = REGISTER.findall(repr(instruction.operands[:1]))

    def look(self, machine):
        pass

    def after(self, machine):
        for register in machine.program.registers:
            if register.name in self.results:
                kind = machine.values[register.index].dtype.type
                both = self.bits if register.width <= 32 else self.bits * 0x1_0000_0001
                value = both >> 16 if register.width == 16 else both
                machine.values[register.index] = np.full(machine.threads, value, kind)


class Contents:
    """Looks at two registers whenever an instruction is executed: do both hold one constant in all threads?"""

    def __init__(self, instruction, exchanged):
        self.line, self.exchanged, self.same = instruction.line, exchanged, bool(exchanged)

    def look(self, machine):
        places = {each.name: each.index for each in machine.program.registers}
        held = [machine.values[places[name]] for name in self.exchanged]
        named = [machine.named[places[name]] for name in self.exchanged]
        constant = all(each is None for each in named)  # no thread's value depends on float data
        self.same = self.same and constant and (held[0] == held[1]).all()

    def after(self, machine):
        pass
