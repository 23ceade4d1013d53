"""The state of one run: its schedule, network, ranks, faults and checkers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit.simulator.call_sites import user_line
from isobit.simulator.checkers.sent_data import DataWatch
from isobit.simulator.checkers.step_record import StepCopies
from isobit.simulator.checkers.training import Training
from isobit.simulator.collectives import Call
from isobit.simulator.faults import (
    Die,
    Drop,
    Fault,
    Flip,
    PlantNaN,
    Stall,
    Stalled,
    Straggle,
    flip_bit,
    plant_nan,
)
from isobit.simulator.findings import Findings, Killed
from isobit.simulator.flight_recorder import FlightRecorder
from isobit.simulator.network import Network
from isobit.simulator.program.environment import launcher_variables
from isobit.simulator.rank import Rank
from isobit.simulator.schedule import Recorder, Schedule, Trace
from isobit.simulator.torch.store import RankStore


@dataclass(frozen=True)
class Settings:
    """What a run is started with; see `World` for the meaning of each."""

    ranks: int
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    delays: bool = True
    watch: tuple[str, ...] = ()
    poison: bool = True
    sends: str = "buffered"
    strict: bool = True
    patience: float = 120.0
    lines: int | None = None
    ignore: frozenset[str] = frozenset()
    flight_recorder: Path | None = None
    accelerator: str = ""


class Run:
    """Everything that exists once per run. Each part receives what it needs from here.

    Attributes:
        recorder: Writes the trace.
        schedule: Decides which rank runs next.
        findings: What the checkers have found.
        training: The checker of training steps, if they are watched.
        watch: The checker of the data that ranks send.
        network: Carries collectives and messages.
        store: The key-value store of the rendezvous.
        ranks: The ranks.
        flight_recorder: The last calls of each rank, if they are to be written.
        group_calls: Which ranks made each process group of which members, and where.
    """

    def __init__(
        self, settings: Settings, recorded: Trace | None = None, copies: StepCopies | None = None
    ) -> None:
        """Build all parts of a run; see `execute` for its arguments."""
        self.settings = settings
        count, seed, delays = settings.ranks, settings.seed, settings.delays
        trace = Trace(count, seed, delays, settings.faults, settings.sends)
        self.recorder = Recorder(trace, recorded)
        self.schedule = Schedule(count, seed, delays, self.recorder)
        self.findings = Findings(settings.strict)
        self.training = (
            Training(count, self.findings, settings.ignore, copies)
            if "training" in settings.watch
            else None
        )
        self.watch = DataWatch(settings.watch, self.findings, self.training)
        self.network = Network(self.schedule, self.recorder, self.findings, self.watch)
        self.store = RankStore()
        self.ranks = [
            Rank(
                index,
                count,
                seed,
                launcher_variables(index, count),
                self.schedule,
                self.findings,
                self.watch.chosen,
                skew,
            )
            for index, skew in enumerate(self.schedule.skew())
        ]
        for rank in self.ranks:
            rank.accelerator = settings.accelerator
        self.group_calls: dict[tuple[str, int], dict[tuple[int, ...], dict[int, str]]] = {}
        self.flight_recorder = (
            FlightRecorder(count, settings.sends == "buffered")
            if settings.flight_recorder is not None
            else None
        )
        self._faults = {(fault.rank, fault.call): fault for fault in reversed(settings.faults)}

    def note_group(self, rank: Rank, name: str, members: tuple[int, ...]) -> None:
        """Note that a rank, member or not, makes a process group of these members."""
        rank.incarnations[name] = rank.incarnations.get(name, -1) + 1
        calls = self.group_calls.setdefault((name, rank.incarnations[name]), {})
        calls.setdefault(members, {})[rank.index] = user_line(sys._getframe(1))

    def begin_call(self, rank: Rank, call: Call, what: str) -> bool:
        """Start a communication call: advance the clock, apply faults; return whether the data is lost."""
        rank.check()
        rank.calls += 1
        self.schedule.compute(rank.index)
        self.recorder.note(rank.index, rank.clock, what)
        fault = self._faults.get((rank.index, rank.calls))
        if isinstance(fault, PlantNaN):
            plant_nan(call.inputs, fault.element)
        self.watch.on_call(call, what)
        return fault is not None and self._apply(fault, rank, call, what)

    def _apply(self, fault: Fault, rank: Rank, call: Call, what: str) -> bool:
        self.recorder.note(rank.index, rank.clock, f"fault {fault}")
        if isinstance(fault, Die):
            rank.death = Killed(what)
            raise rank.death
        if isinstance(fault, Stall):
            if fault.seconds is None:
                rank.wait_for(Stalled(), False)
            else:
                rank.clock += int(fault.seconds * 1e6)
        elif isinstance(fault, Straggle):
            self.schedule.slowness[rank.index] = fault.factor
        elif isinstance(fault, Flip) and call.inputs:
            if fault.to is None:
                contiguous = torch.contiguous_format
                call.sent = [tensor.data.clone(memory_format=contiguous) for tensor in call.inputs]
                flip_bit(call.sent[0], fault.element, fault.bit)
            else:
                call.flipped_to = fault
        elif isinstance(fault, Drop):
            self.findings.lost[rank.index] = (
                f"the data that rank {rank.index} sent in {what} was dropped"
            )
            return True
        return False
