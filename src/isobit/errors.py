"""Every exception that isobit raises; each has what was expected, what was received, and a remedy.

IsobitError
├── ArgumentError        a shape, dtype, device or layout that is not supported (also a ValueError)
├── CutError             a split that does not fall on segment edges (also a ValueError)
├── UnsupportedError     a transformation without a defined order of addition (also a RuntimeError)
├── EngineError          kernels that are missing, disabled or not attested (also a RuntimeError)
├── RevealError          a target whose order of addition cannot be revealed (also a RuntimeError)
├── AgreementError       ranks that should have the same bits, and do not (also a RuntimeError)
├── GuardError           a training step that breaks a rule of a watch (also a RuntimeError)
├── ServerError          a server that cannot be reached, or answers something else (also a RuntimeError)
├── ContractError        a contract that is not well-formed, or names code that is not trusted (also a ValueError)
└── SimulationError      a fault of a distributed program, with the ranks that caused it (also a RuntimeError)
    ├── DeadlockError    ranks that wait for each other, or for a rank that has left
    ├── MismatchError    ranks that call one collective, or exchange a message, with different arguments
    ├── OrphanError      work that was never waited for, or a message that was never received
    ├── PendingError     a buffer touched while a collective owns it
    ├── DivergenceError  values that should be equal on all ranks and are not
    ├── CorruptionError  bits that changed between sender and receiver
    ├── NonFiniteError   the first NaN or infinity that a rank sent
    ├── TrainingError    ranks that all finish, but train a wrong model; `kind` is the reason
    ├── RankFailedError  a rank that raised an error of its own
    ├── RankLostError    a rank that died, or that waited for one that did
    ├── DeviceError      a rank that uses the device of another rank
    ├── BusyError        a rank that computes, or waits, without ever letting the others run
    └── ReplayError      a run that differs from its recorded trace

PortableWarning          calls that use the portable executor because there are no kernels (a UserWarning)
RotaryWarning            a model whose rotary frequencies were rounded (a UserWarning)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any


class IsobitError(Exception):
    """The base of isobit's exceptions. The message names the public function that was called."""

    def __init__(self, *, expected: str, received: str, remedy: str) -> None:
        self.expected, self.received, self.remedy = expected, received, remedy
        super().__init__(f"expected {expected}\n  received: {received}\n  remedy: {remedy}")

    def __str__(self) -> str:
        function = called_function(self.__traceback__)
        return f"{function}: {self.args[0]}" if function else str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what a world had, which is large: errors of workers arrive as they were raised."""
        state = {**self.__dict__, "result": None} if "result" in self.__dict__ else self.__dict__
        return _restored_error, (type(self), self.args, state)

    @property
    def one_line(self) -> str:
        """The message on one line and without the function, for tables and records."""
        return f"expected {self.expected}; received {self.received}; remedy: {self.remedy}"


def _restored_error(
    kind: type[IsobitError], arguments: tuple[Any, ...], state: Mapping[str, Any]
) -> IsobitError:
    """Return an error that was pickled."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


def in_one_line(error: BaseException) -> str:
    """Return the message of any exception for a table or a record; ours on one line."""
    return error.one_line if isinstance(error, IsobitError) else str(error)


def called_function(traceback: TracebackType | None) -> str:
    """Return the public function that the user called, such as "isobit.linear", or nothing.

    The traceback is read outward from the raise while it is in this package; the outermost public
    function or method there is the one in the user's code.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    found = ""
    for frame in reversed(frames):
        if not str(frame.f_globals.get("__name__", "")).startswith("isobit."):
            break
        found = public_name(frame) or found
    owner, _, name = found.rpartition(".")
    if name.startswith(
        "_"
    ):  # a library calls this method back: name the method that the user called
        calls = (f.f_code.co_name for f in frames if is_method_of(f, owner.rpartition(".")[2]))
        found = next((f"{owner}.{called}" for called in calls if called[0] != "_"), owner)
    return found


def is_method_of(frame: FrameType, name: str) -> bool:
    """Return whether a frame is of a method, own or inherited, of an object whose class has this name."""
    return type(frame.f_locals.get("self")).__name__ == name


def public_name(frame: FrameType) -> str:
    """Return the public name of a frame's function or method, or nothing if it has none.

    Public is what a package lists in its stub (`HOMES`) or a module in its `__all__`; the shortest name is preferred.
    """
    home, name = frame.f_globals["__name__"], frame.f_code.co_name
    owner = frame.f_locals.get("self")
    public = name if owner is None else type(owner).__name__
    loaded = [each for each in list(sys.modules) if each.partition(".")[0] == "isobit"]
    for package in sorted(loaded, key=len):
        names = getattr(sys.modules.get(package), "__dict__", {})
        if names.get("HOMES", {}).get(public) == home or (
            package == home and public in names.get("__all__", ())
        ):
            called = f"{package}.{public}"
            return called if owner is None or name == "__init__" else f"{called}.{name}"
    return ""


class ArgumentError(IsobitError, ValueError):
    """A shape, dtype, device or layout that is not supported."""


class CutError(IsobitError, ValueError):
    """A split of a sum that does not fall on segment edges."""


class UnsupportedError(IsobitError, RuntimeError):
    """A transformation without a defined order of addition."""


class EngineError(IsobitError, RuntimeError):
    """Kernels that are missing, disabled or not attested."""


class PortableWarning(UserWarning):
    """Calls use the slow portable executor, as there are no native kernels; given once per process."""


class RotaryWarning(UserWarning):
    """A model's rotary frequencies were rounded, so that it differs from what its checkpoint gives."""


class RevealError(IsobitError, RuntimeError):
    """A target whose order of addition cannot be revealed: not a sum, not repeatable, or not a plain tree."""


class AgreementError(IsobitError, RuntimeError):
    """Ranks that should have the same bits, and do not; `agreement` is the record of the check."""

    agreement: object = None


class GuardError(IsobitError, RuntimeError):
    """A training step that breaks a rule of `isobit.guards.watch`; `event` is the finding."""

    event: object = None


class ServerError(IsobitError, RuntimeError):
    """A server that cannot be reached, does not answer in time, or answers something else."""


class ContractError(IsobitError, ValueError):
    """A contract that is not well-formed, names code that is not trusted, or requires what cannot be checked."""

    def __init__(
        self, *, expected: str, received: str, remedy: str, where: str = "", line: int = 0
    ) -> None:
        super().__init__(expected=expected, received=received, remedy=remedy)
        self.where, self.line = where, line

    def __str__(self) -> str:
        text = super().__str__()
        return f"{self.place}: {text}" if self.place else text

    @property
    def place(self) -> str:
        """The file, and the line if it is known."""
        return f"{self.where}:{self.line}" if self.line else self.where

    @property
    def one_line(self) -> str:
        """The message on one line, after its file and line."""
        text = super().one_line
        return f"{self.place}: {text}" if self.place else text


class SimulationError(IsobitError, RuntimeError):
    """A fault of a distributed program; `ranks` caused it, and `stacks` has the stack of each rank."""

    kind = "fault"

    def __init__(
        self,
        *,
        expected: str,
        received: str,
        remedy: str,
        ranks: Sequence[int] = (),
        stacks: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(expected=expected, received=received, remedy=remedy)
        self.ranks, self.stacks = (
            tuple(ranks),
            {rank: tuple(lines) for rank, lines in (stacks or {}).items()},
        )
        self.result: Any = None  # what the world had when it raised: values, trace, findings
        self.note = ""  # what else was seen, which may have led to it
        self.follows = ""  # the kind of an earlier finding that this one may follow from

    def __str__(self) -> str:
        places = [
            f"\n  rank {rank} at {lines[0]}" for rank, lines in sorted(self.stacks.items()) if lines
        ]
        note = f"\n  note: {self.note}" if self.note else ""
        return super().__str__() + "".join(places) + note


class DeadlockError(SimulationError):
    """Ranks that wait for each other, or for a rank that has left; `waits` maps a rank to those it waits for."""

    kind = "deadlock"
    waits: Mapping[int, Sequence[int]] = {}
    cycle: Sequence[int] = ()


class MismatchError(SimulationError):
    """Ranks that call one collective, or exchange a message, with different arguments."""

    kind = "mismatch"


class OrphanError(SimulationError):
    """Work that was never waited for, or a message that was never received."""

    kind = "orphan"


class PendingError(SimulationError):
    """A buffer read or written while a collective owns it."""

    kind = "pending"


class DivergenceError(SimulationError):
    """Values that should be equal on all ranks and are not."""

    kind = "tensors differ"


class CorruptionError(SimulationError):
    """Bits that changed between sender and receiver."""

    kind = "corruption"


class NonFiniteError(SimulationError):
    """The first NaN or infinity that a rank sent."""

    kind = "not finite"


class TrainingError(SimulationError):
    """Ranks that all finish, but train a wrong model; `kind` is the reason."""


class RankFailedError(SimulationError):
    """A rank raised an error, which is the cause of this one."""

    kind = "rank failed"


class RankLostError(SimulationError):
    """A rank died, or waited for one that did."""

    kind = "rank lost"


class DeviceError(SimulationError):
    """A rank that uses the device of another rank."""

    kind = "device shared"


class BusyError(SimulationError):
    """A rank computes or waits without letting the others run."""

    kind = "rank busy"


class ReplayError(SimulationError):
    """A run that differs from its recorded trace."""

    kind = "replay departs"
