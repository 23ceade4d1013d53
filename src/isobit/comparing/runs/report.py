"""What two runs of a script showed, as plain records and as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.pages import write_card, write_facts, write_frame, write_table

# Why an operator is the first whose result differs.
RANDOM = "random numbers"
OUTSIDE = "data from outside torch"
EMPTY = "memory that was never written"
SCALAR = "a Python number"
SLICE = "another part of a tensor"
OPERATOR = "the operator itself"
PATH = "another path through the program"


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        number: its number in the run.
        operator: its name, such as `aten::mm`.
        module: the path of the module that called it, or "optimizer step".
        source: file and line of the caller.
        backward: whether it ran in the backward pass; module and source are then those of the forward call.
        step: optimizer steps before it.
    """

    number: int
    operator: str
    module: str
    source: str
    backward: bool
    step: int

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        backward = ", backward" if self.backward else ""
        return f"{self.operator}{where}{backward} ({self.source or 'no source line'})"


@dataclass(frozen=True)
class Origin:
    """The first operator whose result differs although no input that torch computed does.

    Attributes:
        call: in the first run.
        other: in the second run; another operator if the runs take different paths.
        why: one of the reasons above.
        detail: what differs, such as both values of a number.
        same_rows: whether data from outside has the same rows in another order.
    """

    call: Call
    other: Call
    why: str
    detail: str = ""
    same_rows: bool = False


@dataclass(frozen=True)
class Changed:
    """The first tensor of the training's state that differs.

    Attributes:
        step: the step, counted from 0.
        what: "loss", "gradient", "parameter", "optimizer state" or "steps".
        name: of the tensor.
        values: both losses, or what else can be shown.
    """

    step: int
    what: str
    name: str
    values: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        shown = f": {self.values[0]} and {self.values[1]}" if self.values[0] else ""
        return f"{self.what} {self.name}".strip() + shown


@dataclass(frozen=True)
class Comparison:
    """Two records, compared.

    Attributes:
        steps: optimizer steps of both runs.
        operators: calls of operators that were compared.
        tensors: losses, gradients, parameters and optimizer states that were compared.
        changed: the first difference of the training's state, None if there is none.
        origin: the operator that it comes from, None if no operator shows it.
        harmless: operators whose results differ without any effect on the training's state.
        evidence: what both runs knew at the start of that step.
        recording: the share of the time of the steps after the first that recording took.
    """

    steps: tuple[int, int]
    operators: int
    tensors: int
    changed: Changed | None
    origin: Origin | None
    harmless: tuple[Origin, ...]
    evidence: tuple[dict[str, Any], dict[str, Any]]
    recording: float | None = None

    @property
    def equal(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.tensors > 0 and min(self.steps) > 0 and self.changed is None


@dataclass(frozen=True)
class Cause:
    """A usual cause: whether it applies (None if that is not known), and what shows it."""

    name: str
    applies: bool | None
    shown_by: str


@dataclass(frozen=True)
class Report:
    """Everything about two runs of one script."""

    script: str
    arguments: tuple[str, ...]
    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    runs: int = 2
    seconds: float = 0.0
    served: str = ""  # the kind of device that the CPU stood in for

    @property
    def exit_code(self) -> int:
        """0 if the runs are equal, 1 if they differ."""
        return 0 if self.comparison.equal else 1


APPLIES = {True: "yes", None: "not known", False: "no"}


def write_twice_page(
    record: Mapping[str, Any], sentence: str, origin: Provenance | None = None
) -> str:
    """Return the page of one comparison.

    Args:
        record: The record of `--json`, with plain values.
        sentence: The verdict with its numbers.
        origin: Where the page comes from.
    """
    found = record["comparison"]
    body = ""
    if found["changed"] is not None:
        body += f"<h2>First difference</h2>{write_difference(found)}"
    if record["causes"]:
        order = [True, None, False]
        causes = sorted(record["causes"], key=lambda cause: order.index(cause["applies"]))
        rows = [[each["name"], APPLIES[each["applies"]], each["shown_by"]] for each in causes]
        body += "<h2>Causes</h2>" + write_table(["cause", "applies", "shown by"], rows)
    if found["harmless"]:
        rows = [[place_of(each["call"]), each["why"], each["detail"]] for each in found["harmless"]]
        body += "<h2>Differs without effect so far</h2>"
        body += write_table(["operator", "because of", "values"], rows)
    title = f"Two runs of {record['script']}"
    return write_frame(title, "good" if record["equal"] else "bad", sentence, body, origin)


def write_difference(found: Mapping[str, Any]) -> str:
    """Draw the first tensor of the training's state that differs, and the operator that it comes from."""
    changed, origin = found["changed"], found["origin"]
    facts = {"first run": changed["values"][0], "second run": changed["values"][1]}
    if origin is None:
        facts["comes from"] = "no operator: memory was changed outside of torch"
    else:
        facts["comes from"] = f"{place_of(origin['call'])}, call {origin['call']['number']}"
        facts["because of"] = f"{origin['why']}: {origin['detail']}"
    title = f"step {changed['step']}, {changed['what']} {changed['name']}".strip()
    return write_card(title, "", write_facts(facts))


def place_of(call: Mapping[str, Any]) -> str:
    """Return a call of an operator in words."""
    module = f" in {call['module']}" if call["module"] else ""
    backward = ", backward" if call["backward"] else ""
    return f"{call['operator']}{module}{backward} ({call['source'] or 'no source line'})"
