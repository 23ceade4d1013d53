"""Judge all configurations on one target: which expressions there are, and which rows have which.

[Note: labels]
A configuration with several rows is executed with a label on every row: the digits of the row's number, one execution
per digit. A row with label l must have the name that the reference has when *all* its rows have label l. Two rows
differ in some digit, so a row that reads another row is seen, and so is a row that is computed in another way. If it
does not have that name, the configuration is executed again with one label on all rows, which tells the two apart: then
all names are compared as expressions, and a row whose name differs only under labels reads another row.

[Note: integers of rows]
Integers are values, and rows are compared with rows that have the same integers. Where these differ between rows, a
configuration is executed again with its rows moved, each with its integers, so that a row is compared with itself at
another position. Integers carry no label: so the integers of every other row are changed, and the rest must stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from isobit.certifying.judging.configurations import Planned, PlannedInputs, Surveyed
from isobit.certifying.judging.paths import short_path
from isobit.certifying.machine.predicates import Compared, threshold_above
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
from isobit.certifying.running.storages import Arrangement, Names, Storages
from isobit.errors import IsobitError

AS_IT_IS = Arrangement()


def digits(count: int, base: int) -> int:
    """Return how many digits row numbers below a count have.

    Example:
        >>> digits(1, 4), digits(16, 4), digits(17, 4)
        (1, 2, 3)
    """
    needed = 1
    while base**needed < count:
        needed += 1
    return needed


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
    comparisons: dict[tuple[str, int], set[Compared]] = field(default_factory=dict)
    places: dict[tuple[str, int], str] = field(default_factory=dict)
    base: int = 0  # of labels; chosen with the reference
    again: dict[str, int] = field(
        default_factory=dict
    )  # integers -> rows compared at another position

    def execute(
        self,
        one: Planned,
        labels: list[int],
        record: bool = False,
        arrangement: Arrangement = AS_IT_IS,
        earlier: Storages | None = None,
    ) -> tuple[Execution, Rows]:
        """Execute a configuration once; labels are those of rows, wherever the arrangement puts them."""
        self.runs += 1
        surveyed = self.surveyed
        run = Execution(
            self.compiler,
            PlannedInputs(surveyed, one),
            [labels[row] for row in arrangement.order] or labels,
            nonce=self.runs,
            record=record,
            known=surveyed.known,
            arrangement=arrangement,
            earlier=earlier,
            choices=Choices(dict(one.autotune), labels=surveyed.labels),
        )
        try:
            call(surveyed.function, one.given, run, self.compiler.target)
        finally:  # also what was compiled before something went wrong
            for facts in run.facts:
                self.kernel_number(facts)
        self.places |= run.places
        for key, values in run.compared.items():
            self.comparisons.setdefault(key, set()).update(values)
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
        self.surveyed.check_values(one)
        if not self.references:
            self.choose_reference(one)
        runs = list[tuple[Rows, list[int]]]()
        found: list[tuple[str, int]] | None = []
        for labels in self.labels(count):
            run, rows = self.execute(one, labels)
            runs.append((rows, labels))
            if run.unwritten:
                return self.described(outcome, run, rows, count, unwritten(run, rows)), [], 0
            found = self.match(rows, labels)
            if found is None:
                break
        leaks = list[int]()
        if found is None:
            plain = self.execute(one, [0] * count)[1]
            found = self.classify(one, plain)
            for labels in list(self.labels(count))[len(runs) :]:
                runs.append((self.execute(one, labels)[1], labels))
            leaks = sorted({row for r, l in runs for row in self.leaks(r, plain, l, found)})
        for integers, number in found:
            self.groups[integers][number].rows += 1
        reason = leaking(leaks, count) if leaks else None
        same = all(number == 0 for _, number in found)
        if reason is None and same and count > 1 and self.surveyed.row_integers(one):
            rows, labels = runs[-1]
            reason = self.move_rows(one, rows, labels)
            reason = reason or self.change_integers(one, rows, labels)
        left = fusable(run) if reason is None else None
        if reason is None and left is None and found is not None:
            left = self.call_again(one, run, *runs[-1])
        if left is not None:
            outcome = replace(outcome, verdict=REFUSED, reason=left[0], remedy=left[1])
        outcome = self.described(outcome, run, rows, count, reason)
        return outcome, [] if reason else found, rows.names.shape[1]

    def call_again(
        self, one: Planned, run: Execution, rows: Rows, labels: list[int]
    ) -> tuple[str, str] | None:
        """Call the function a second time, if kernels left something behind: the rows must be as in the first call."""
        assert run.storages is not None
        left = run.storages.left_behind()
        if not left:
            return None
        again = self.execute(one, labels, earlier=run.storages)[1]
        if np.array_equal(again.names, rows.names):
            return None
        shapes = ", ".join(str(list(held.tensor.shape)) for held in left.values())
        return (
            f"kernels read what a call before left in a tensor that the function keeps ({shapes}): a second call has "
            "another result",
            "clear it in every call, or make it in the function",
        )

    def labels(self, count: int) -> Iterator[list[int]]:
        """Return labels of rows, the digits of their numbers: of two rows some digit differs."""
        place = 1
        while place == 1 or place < count:
            yield [row // place % self.base for row in range(count)]
            place *= self.base

    def choose_reference(self, one: Planned) -> None:
        """Execute a configuration under every label: what labelled rows are compared with.

        If rows have integers, the largest configuration has all of them.
        """
        plans = [p for p in self.surveyed.expanded if p.settings == one.settings]
        most = max(plans, key=lambda p: p.rows or 1)
        if one.rows is not None and self.surveyed.row_integers(one):
            try:
                self.surveyed.check_values(most)
                self.learn(most)
                return
            except IsobitError:
                self.references.clear()
        self.learn(one)

    def move_rows(self, one: Planned, rows: Rows, labels: list[int]) -> tuple[str, str] | None:
        """Execute a configuration with its rows at other positions; the rows must not change."""
        count = rows.count
        if len(set(rows.integers)) == 1:
            return None  # rows were compared with each other
        for shift in dict.fromkeys((1, count // 2)):
            order = tuple((row - shift) % count for row in range(count))
            moved = self.execute(one, labels, arrangement=Arrangement(order))[1]
            # The row at a position; or, if integers say where a row is stored, the row itself.
            for place in (order, tuple(range(count))):
                wrong = [
                    row
                    for at, row in enumerate(place)
                    if not self.is_reference(rows.integers[row], labels[row], moved, at)
                ]
                if not wrong:
                    break
            if wrong:
                return (
                    f"{len(wrong)} of {count} rows are computed in another way at another position; the first is row "
                    f"{wrong[0]}, moved by {shift}",
                    "let the order of a row follow its own values and sizes, not its position: no program_id in "
                    "branches or offsets of a sum",
                )
            for integers in rows.integers:
                self.again[integers] = self.again.get(integers, 0) + 1
        return None

    def change_integers(
        self, one: Planned, rows: Rows, labels: list[int]
    ) -> tuple[str, str] | None:
        """Change the integers of every other row; the rows between must not change."""
        count, changed = rows.count, 0
        for by in (-1, 1):
            for first in (0, 1):
                which = tuple(range(first, count, 2))
                try:
                    run = self.execute(one, labels, arrangement=Arrangement((), which, by))[1]
                except IsobitError:
                    continue  # integers that the kernel cannot have, such as an index outside
                changed += 1
                wrong = [
                    row
                    for row in range(1 - first, count, 2)
                    if not np.array_equal(run.names[row], self.expected(rows, labels, row))
                ]
                if wrong:
                    return (
                        f"{len(wrong)} rows depend on the integers of other rows; the first is row {wrong[0]}",
                        "a row must read its own integers only, and no maximum over the batch",
                    )
        if not changed:
            self.remarks.setdefault(
                "integers of rows could not be changed by one: that a row does not depend on the integers of others "
                "was not judged"
            )
        return None

    def expected(self, rows: Rows, labels: list[int], row: int) -> Names:
        """Return the names that a row must have; those that it had, if there is no reference."""
        found: Names = self.references.get((rows.integers[row], labels[row]), rows.names[row])
        return found

    def is_reference(self, integers: str, label: int, moved: Rows, at: int) -> bool:
        """Tell whether the row at a position has the names of the reference."""
        wanted = self.references.get((integers, label))
        return wanted is not None and np.array_equal(wanted, moved.names[at])

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
            found.append((rows.integers[row], number))
        return found

    def learn(self, one: Planned) -> None:
        """Execute a configuration under every label, and keep the names of its rows."""
        count = 1 if one.rows is None else one.rows
        counts = [p.rows or 1 for p in self.surveyed.expanded]
        self.base = self.cheapest_base(count, counts)
        plain = self.execute(one, [0] * count)[1]
        self.classify(one, plain)
        names: dict[tuple[str, int], Names] = {}
        for label in range(self.base if max(counts) > 1 else 1):
            rows = self.execute(one, [label] * count)[1] if label else plain
            for row, integers in enumerate(rows.integers):
                names.setdefault((integers, label), rows.names[row].copy())
        self.references = names

    def cheapest_base(self, reference: int, counts: list[int]) -> int:
        """Return the base of labels that needs the fewest programs: for references, and for digits of rows."""
        programs = {count: self.surveyed.programs.get(count, count) for count in counts}

        def cost(base: int) -> int:
            runs = sum(digits(count, base) * programs[count] for count in counts)
            return base * self.surveyed.programs.get(reference, reference) + runs

        return min(range(2, max(*counts, 2) + 1), key=cost)

    def thresholds(self) -> list[str]:
        """Return comparisons inside kernels that have another outcome with more rows than were tried."""
        found = [(key, threshold_above(values)) for key, values in self.comparisons.items()]
        texts = [
            f"with more rows than were tried, a number of the launch passes {number:,} in {self.places[key]}"
            for key, number in found
            if number is not None
        ]
        return list(dict.fromkeys(texts))

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
        return self.compared_rows(number) * self.elements[number]

    def compared_rows(self, number: int) -> int:
        """Return the rows of an outcome that another row was compared with, or the same at another position."""
        return sum(
            sum(each.rows for each in self.groups[integers]) + self.again.get(integers, 0) > 1
            for integers, _ in self.found[number]
        )


def fusable(run: Execution) -> tuple[str, str] | None:
    """Return the reason and the remedy for products that ptxas may fuse with a sum: names do not show it."""
    opened = [facts for facts in run.facts if facts.may_fuse]
    if not opened:
        return None
    names = ", ".join(dict.fromkeys(facts.kernel for facts in opened))
    return (
        f"in {names} the PTX leaves {max(facts.open_products for facts in opened)} products that ptxas may fuse with a "
        "sum, in one tile and not in another: the PTX does not fix the bits",
        "launch with enable_fp_fusion=False, or write tl.math.fma where products and sums are to be fused",
    )


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
