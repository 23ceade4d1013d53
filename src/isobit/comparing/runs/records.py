"""What two runs of a script showed, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
