"""Random changes of one float operation in PTX text, and whether the comparison with the plan catches them.

A mutation that leaves all names as they were is a miss, unless it provably changes nothing: its instruction is never
executed at these sizes, the registers that it exchanges hold the same constant whenever it is executed, or no output
depends on its result: the outputs keep their bits when the result is replaced by NaN, which arithmetic passes on, and
by other numbers (a thread that computes a copy of a value that another thread stores). Such a mutation is drawn again,
and the reason is counted. That the mutation itself leaves the bits of the outputs alone is no reason.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np

from isobit.certifying.running.refusals import MachineError, PtxSyntaxError
from tests.certifying.attention_cases import attention_case
from tests.certifying.cases import (
    judge,
    linear_case,
    patterns,
    rms_norm_case,
    softmax_case,
    weight_grad_case,
)
from tests.certifying.ptx_changes import REGISTER, mutate
from tests.certifying.running import Session, raw

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

    judged: Counter = field(default_factory=Counter)  # by kind and by what became of it
    refusals: Counter = field(default_factory=Counter)  # by error
    again: Counter = field(default_factory=Counter)  # drawn again, by reason
    bits: int = 0  # of those caught by names, how many changed a bit of the output on one input
    missed: list = field(default_factory=list)

    def of(self, fate):
        """How many mutations were caught by "names", "refused" or "missed"."""
        return sum(count for (_, each), count in self.judged.items() if each == fate)


def try_mutations(count, seed, subjects=SUBJECTS):
    """Draw mutations until `count` are judged."""
    random, tally, made = Random(seed), Tally(), {}
    while tally.judged.total() < count:
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
        tally.judged[drawn["kind"], "refused"] += 1
        tally.refusals[type(error).__name__] += 1
        return
    if found.names_differ:
        tally.judged[drawn["kind"], "names"] += 1
        tally.bits += found.bits_differ > 0
        return
    reason = neutral(case, target, drawn)
    if reason:
        tally.again[reason] += 1
    else:
        tally.judged[drawn["kind"], "missed"] += 1
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
