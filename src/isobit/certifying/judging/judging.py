"""Judge all configurations on one target: which expressions there are, and which rows have which.

[Note: labels]
A configuration with several rows is executed with a label on every row, one of `LABELS`, drawn anew for each
configuration. A row with label l must have the name that the reference has when *all* its rows have label l; so a row
that reads a row with another label is seen, and so is a row that is computed in another way. If it does not have that
name, the configuration is executed again with one label on all rows, which tells the two apart: then all names are
compared as expressions, and a row whose name differs only under labels reads another row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from isobit.certifying.judging.configurations import Planned, Surveyed
from isobit.certifying.judging.paths import short_path
from isobit.certifying.names.row_names import Rows, rows_of
from isobit.certifying.records import (
    BROKEN,
    REFUSED,
    Configuration,
    KernelFacts,
    Outcome,
    Share,
)
from isobit.certifying.running.capture import Choices
from isobit.certifying.running.compile import Compiler, LaunchError
from isobit.certifying.running.execution import Execution, call
from isobit.certifying.running.refusals import (
    AddressError,
    FloatAtomicError,
    MachineError,
    RaceError,
)
from isobit.certifying.running.storages import Names
from isobit.errors import IsobitError

LABELS = 4


@dataclass
class Expression:
    """One expression of a group of rows with the same integers: its digest and where it was first seen."""

    digest: str
    planned: Planned
    row: int
    rows: int = 0  # how many rows have it, in all configurations


@dataclass
class Judge:
    """Executes configurations on one target and sorts their rows by expression.

    Attributes:
        groups: digest of a row's integers -> its expressions, the reference first.
        references: (integers, label) -> names of the reference's row under that label.
    """

    surveyed: Surveyed
    compiler: Compiler
    groups: dict[str, list[Expression]] = field(default_factory=dict)
    references: dict[tuple[str, int], Names] = field(default_factory=dict)
    bits: dict[int, bytes] = field(default_factory=dict)
    kernels: list[KernelFacts] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    found: list[list[tuple[str, int]]] = field(default_factory=list)  # per outcome and row
    elements: list[int] = field(default_factory=list)  # per outcome: elements of a row
    skipped: list[str] = field(default_factory=list)
    remarks: dict[str, None] = field(default_factory=dict)
    approximate: set[str] = field(default_factory=set)
    runs: int = 0

    def execute(
        self, one: Planned, labels: list[int], record: bool = False
    ) -> tuple[Execution, Rows]:
        """Execute a configuration once."""
        self.runs += 1
        surveyed = self.surveyed
        run = Execution(
            self.compiler,
            lambda key, number, tensor: surveyed.axis(one, key, number),
            labels,
            nonce=self.runs,
            record=record,
            fill=surveyed.fill,
            argument_of=lambda key, number: surveyed.argument(one, key, number),
            choices=Choices(dict(one.autotune)),
        )
        try:
            call(surveyed.function, one.given, run, self.compiler.target)
        finally:  # also what was compiled before something went wrong
            for facts in run.facts:
                self.kernel_number(facts)
        self.remarks.update(dict.fromkeys(run.remarks))
        self.approximate |= run.approximate
        shapes = [shape for shape, _ in surveyed.pilots[one.plain].outputs]
        return run, rows_of(run, shapes, surveyed.output_axes(one), one.rows)

    def configuration(self, one: Planned) -> Configuration:
        """Return the record of a configuration."""
        settings = tuple((name, shown(value)) for name, value in one.settings)
        return Configuration(self.compiler.target, one.rows, settings, one.autotune)

    def judge(self, one: Planned) -> None:
        """Execute a configuration and sort its rows; a failure is its outcome."""
        began = time.perf_counter()
        outcome = Outcome(self.configuration(one))
        rows: list[tuple[str, int]] = []
        elements = 0
        try:
            outcome, rows, elements = self.sort(one, outcome)
        except LaunchError as error:
            if one.autotune:  # the autotuner leaves it out, too
                self.skipped.append(f"{outcome.configuration}: {error.received}")
                return
            outcome = failed(outcome, error)
        except IsobitError as error:
            outcome = failed(outcome, error)
        self.outcomes.append(replace(outcome, seconds=time.perf_counter() - began))
        self.found.append(rows)
        self.elements.append(elements)

    def sort(self, one: Planned, outcome: Outcome) -> tuple[Outcome, list[tuple[str, int]], int]:
        """Execute a configuration and find the expression of every row."""
        count = 1 if one.rows is None else one.rows
        first = not self.references
        labels = [0] * count if first else self.draw(count)
        run, rows = self.execute(one, labels)
        if run.unwritten:
            return self.described(outcome, run, rows, count, unwritten(run, rows)), [], 0
        found, leaks = None if first else self.match(rows, labels), list[int]()
        if found is None:
            plain = self.execute(one, [0] * count)[1] if any(labels) else rows
            found = self.classify(one, plain)
            if first:
                self.learn(one, plain, count)
                labels = self.draw(count)
                rows = self.execute(one, labels)[1] if any(labels) else rows
            leaks = self.leaks(rows, plain, labels, found)
        reason = leaking(leaks, count) if leaks else None
        outcome = self.described(outcome, run, rows, count, reason)
        return outcome, [] if leaks else found, rows.names.shape[1]

    def described(
        self,
        outcome: Outcome,
        run: Execution,
        rows: Rows,
        count: int,
        broken: tuple[str, str] | None,
    ) -> Outcome:
        """Return an outcome with the counts of an execution, broken if there is a reason."""
        outcome = replace(
            outcome,
            unwritten=run.unwritten,
            launches=len(run.launched),
            kernels=tuple(self.kernel_number(facts) for facts in run.facts),
            executed=run.executed,
            bits_equal=sum(self.bits.get(r) == b for r, b in enumerate(rows.bits)),
            bits_rows=sum(r in self.bits for r in range(count)),
        )
        if broken is not None:
            return replace(outcome, verdict=BROKEN, reason=broken[0], remedy=broken[1])
        for row, bits in enumerate(rows.bits):
            self.bits.setdefault(row, bits)
        return outcome

    def draw(self, count: int) -> list[int]:
        """Draw a label for every row, the same in every process."""
        if count == 1:
            return [0]
        generator = np.random.default_rng([count, len(self.outcomes)])
        return [int(n) for n in generator.integers(0, LABELS, count)]

    def leaks(
        self, rows: Rows, plain: Rows, labels: list[int], found: list[tuple[str, int]]
    ) -> list[int]:
        """Return rows that have the reference's expression under one label, but not under labels."""
        leaking = []
        for row, label in enumerate(labels):
            integers, expression = found[row]
            wanted = self.references.get((integers, label)) if expression == 0 else None
            if wanted is None and label == 0:
                wanted = plain.names[row]
            if wanted is not None and not np.array_equal(wanted, rows.names[row]):
                leaking.append(row)
        return leaking

    def match(self, rows: Rows, labels: list[int]) -> list[tuple[str, int]] | None:
        """Return the rows as rows of the reference, or None if any is not."""
        for row, label in enumerate(labels):
            wanted = self.references.get((rows.integers[row], label))
            if wanted is None or not np.array_equal(wanted, rows.names[row]):
                return None
        for integers in rows.integers:
            self.groups[integers][0].rows += 1
        return [(integers, 0) for integers in rows.integers]

    def classify(self, one: Planned, rows: Rows) -> list[tuple[str, int]]:
        """Return the expression of every row, where all rows have one label; new ones are added."""
        found = []
        for row in range(rows.count):
            digest = rows.digest(row)
            known = self.groups.setdefault(rows.integers[row], [])
            number = next((i for i, each in enumerate(known) if each.digest == digest), None)
            if number is None:
                number = len(known)
                known.append(Expression(digest, one, row))
            known[number].rows += 1
            found.append((rows.integers[row], number))
        return found

    def learn(self, one: Planned, rows: Rows, count: int) -> None:
        """Execute the first configuration under every label: what labelled rows are compared with."""
        if self.references:
            return
        for row, integers in enumerate(rows.integers):
            self.references.setdefault((integers, 0), rows.names[row].copy())
        if max((p.rows or 1) for p in self.surveyed.expanded) == 1:
            return
        for label in range(1, LABELS):
            _, labelled = self.execute(one, [label] * count)
            for row, integers in enumerate(labelled.integers):
                self.references.setdefault((integers, label), labelled.names[row].copy())

    def kernel_number(self, facts: KernelFacts) -> int:
        """Return the number of a compiled kernel in the list, adding it if it is new."""
        if facts not in self.kernels:
            self.kernels.append(facts)
        return self.kernels.index(facts)

    def shares(self, number: int, digests: dict[int, str]) -> tuple[Share, ...]:
        """Return the expressions of an outcome's rows, the one with the most rows first."""
        rows: dict[int, list[int]] = {}
        for row, (_, expression) in enumerate(self.found[number]):
            rows.setdefault(expression, []).append(row)
        shares = [Share(digests[e], len(r), r[0]) for e, r in rows.items()]
        return tuple(sorted(shares, key=lambda share: (-share.rows, share.first)))

    def compared(self, number: int) -> int:
        """Return the elements of an outcome whose row has another to be compared with."""
        rows = sum(
            sum(each.rows for each in self.groups[integers]) > 1
            for integers, _ in self.found[number]
        )
        return rows * self.elements[number]


def unwritten(run: Execution, rows: Rows) -> tuple[str, str]:
    """Return the reason and the remedy for outputs that are not written."""
    return (
        f"{run.unwritten} of {rows.names.size} output elements are not written by any kernel",
        "store every element of the output; check the grid and the masks of stores",
    )


def leaking(rows: list[int], count: int) -> tuple[str, str]:
    """Return the reason and the remedy for rows that read another row."""
    return (
        f"{len(rows)} of {count} rows depend on another row; the first is row {rows[0]}",
        "check the masks and offsets of loads: a row must read its own inputs only",
    )


def failed(outcome: Outcome, error: IsobitError) -> Outcome:
    """Return the outcome of a configuration that raised an error."""
    outside = isinstance(error, AddressError)
    broken = outside or isinstance(error, (RaceError, FloatAtomicError))
    where, received = "", error.received
    if isinstance(error, MachineError):
        received = received.partition(", at PTX line ")[0]  # `where` has the place
        source = f"{short_path(error.source[0])}:{error.source[1]}, " if error.source else ""
        where = f"{source}PTX line {error.ptx_line}" if error.ptx_line else ""
    return replace(
        outcome,
        verdict=BROKEN if broken else REFUSED,
        reason=received if broken and not outside else f"{received} (expected {error.expected})",
        remedy=error.remedy,
        where=where,
    )


def shown(value: object) -> str:
    """Return a setting's value as text."""
    name = getattr(value, "__name__", None)
    return str(name or value).removeprefix("torch.")
