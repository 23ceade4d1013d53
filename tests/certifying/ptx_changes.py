"""One random change of a float operation in PTX text."""

import re
from dataclasses import dataclass

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


def is_undisturbed(rows, moved):
    """Whether no row writes what the moved instruction reads or writes, or reads what it writes; if in doubt, not."""
    written, known = (
        set(REGISTER.findall(" ".join(part))) for part in (moved.operands[:1], moved.operands)
    )
    for row in rows:
        named = REGISTER.findall(row)
        plain = not re.search(r"[@{\[]", row)  # then the first register is the result
        if set(named) & (written if plain else known) or (plain and set(named[:1]) & known):
            return False
    return True


def swap_dependent(text, line, lines, random):
    """Exchange an instruction with the next float instruction that reads its result.

    Returns the new text, and the lines (from 1) on which it depends whether anything changes: only the first, whose
    result is read too early, if the second could as well be where the first is.
    """
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
            alone = is_undisturbed(rows[line.at + 1 : each.at], each)
            rows[line.at], rows[each.at] = rows[each.at], rows[line.at]
            return "\n".join(rows), {line.at + 1} if alone else {line.at + 1, each.at + 1}
    return None


def mutate(text, random):
    """Return one mutation: its kind, what changed, the new text, the lines (from 1), the registers exchanged."""
    lines = float_lines(text)
    while True:
        line = random.choice(lines)
        kind = random.choice([*KINDS, "dependent instructions swapped"])
        before = text.splitlines()[line.at].strip()
        if kind == "dependent instructions swapped":
            changed, moved = swap_dependent(text, line, lines, random) or (text, ())
            if changed == text:
                continue
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
