"""Dumps of a run in the format of torch's flight recorder: a pickle per rank, as NCCL's watchdog writes them.

A hang on a cluster leaves such files behind, and `isobit autopsy` explains them. Here each deadlock of a simulated run
leaves them too, so that its cause is known.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isobit.foundation.files import write_bytes
from isobit.simulator.call_sites import user_stack
from isobit.simulator.collectives import Call, Group, GroupKey, Message, Operation, Receive
from isobit.simulator.rank import Rank

VERSION = "2.10"  # of the format, in torch 2.13
ENTRIES = 2000  # torch's default of TORCH_FR_BUFFER_SIZE
NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
}
# The names of c10::ScalarType.
DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


@dataclass
class Kept:
    """One call: its fields, and what shows whether it has completed."""

    fields: dict[str, Any]
    progress: Operation | Receive | Message

    def is_done(self) -> bool:
        """Return whether the call has completed."""
        if isinstance(self.progress, Operation):
            return self.progress.done and self.progress.failure is None
        if isinstance(self.progress, Receive):
            message = self.progress.message
            return message is not None and fits(self.progress, message)
        return self.progress.taken


class FlightRecorder:
    """The last calls of every rank, and the groups in which they were made."""

    def __init__(self, ranks: int, buffered: bool, entries: int = ENTRIES) -> None:
        """Start with empty buffers; `buffered` sends complete at once."""
        self.kept: list[deque[Kept]] = [deque(maxlen=entries) for _ in range(ranks)]
        self._buffered = buffered
        self._made = [0] * ranks
        self._groups: list[dict[GroupKey, Group]] = [{} for _ in range(ranks)]
        self._messages: dict[tuple[int, GroupKey], int] = {}
        self._numbers: dict[tuple[int, GroupKey], int] = {}

    def note_collective(self, rank: Rank, number: int, call: Call, operation: Operation) -> None:
        """Record a call of a collective."""
        inputs, outputs = shapes(call.inputs), shapes(call.outputs)
        if call.kind in ("all_gather", "all_to_all"):
            outputs = [[sum(t.numel() for t in call.outputs)]]
        if call.kind in ("reduce_scatter", "all_to_all"):
            inputs = [[sum(t.numel() for t in call.inputs)]]
        name = NAMES.get(call.kind, call.kind)
        group = operation.group
        self._numbers[rank.index, group.key] = number
        self._keep(
            rank, group, name, False, inputs, outputs, call.inputs or call.outputs, operation
        )

    def note_send(self, rank: Rank, group: Group, target: int, message: Message) -> None:
        """Record a send."""
        name = f"send {message.source}->{target}"
        self._keep(rank, group, name, True, shapes(message.tensors), [], message.tensors, message)

    def note_receive(self, rank: Rank, receive: Receive) -> None:
        """Record a receive; one from any rank has source -1."""
        source = -1 if receive.source is None else receive.source
        name = f"recv {receive.member}<-{source}"
        group, tensors = receive.group, receive.tensors
        self._keep(rank, group, name, True, [], shapes(tensors), tensors, receive)

    def _keep(
        self,
        rank: Rank,
        group: Group,
        name: str,
        p2p: bool,
        inputs: list[list[int]],
        outputs: list[list[int]],
        tensors: Sequence[Tensor],
        progress: Operation | Receive | Message,
    ) -> None:
        index, key = rank.index, (rank.index, group.key)
        self._groups[index].setdefault(group.key, group)
        self._messages[key] = self._messages.get(key, 0) + p2p
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors[:1]]
        dtypes = [DTYPES.get(dtype, dtype) for dtype in dtypes] or ["Float"]
        whole = rank.world_size == len(group.members) and group.name == "0"
        fields = {
            "frames": frames_of(user_stack(sys._getframe(1))),
            "record_id": self._made[index],
            "pg_id": list(self._groups[index]).index(group.key),
            "process_group": (group.name, "default_pg" if whole else "undefined"),
            "thread_name": f"rank {index}",
            "thread_id": "0",
            "collective_seq_id": self._numbers.get(key, 0),
            "p2p_seq_id": self._messages[key],
            "op_id": self._messages[key] + self._numbers.get(key, 0),
            "profiling_name": f"nccl:{name}",
            "time_created_ns": rank.clock * 1000,
            "input_sizes": inputs or [[0]],
            "input_dtypes": dtypes,
            "output_sizes": outputs or [[0]],
            "output_dtypes": dtypes,
            "timeout_ms": group.timeout // 1000,
            "is_p2p": p2p,
        }
        self._made[index] += 1
        self.kept[index].append(Kept(fields, progress))

    def dump(self, rank: int) -> dict[str, Any]:
        """Return the dump of one rank. Of each group, the first call that is not completed has started."""
        entries, open_groups, misfits = [], set(), self._misfits()
        for kept in self.kept[rank]:
            fields, progress = kept.fields, kept.progress
            done = kept.is_done()
            if isinstance(progress, Message):  # one that does not fit its buffer never arrives
                done = (done or self._buffered) and id(progress) not in misfits
            started = done or fields["pg_id"] not in open_groups
            if not done:
                open_groups.add(fields["pg_id"])
            at = fields["time_created_ns"] + 1000
            entries.append(
                fields
                | {
                    "state": "completed" if done else "started" if started else "scheduled",
                    "time_discovered_started_ns": at if started else None,
                    "time_discovered_completed_ns": at if done else None,
                    "retired": done,
                }
            )
        groups = {
            group.name: {"name": group.name, "desc": "", "ranks": str(list(group.members))}
            for group in self._groups[rank].values()
        }
        for entry in entries:
            groups[entry["process_group"][0]]["desc"] = entry["process_group"][1]
        return {
            "version": VERSION,
            "pg_config": groups,
            "comm_lib_version": "",
            "pg_status": {},
            "entries": entries,
        }

    def _misfits(self) -> set[int]:
        """Return the messages that were sent into buffers of another size."""
        return {
            id(kept.progress.message)
            for calls in self.kept
            for kept in calls
            if isinstance(kept.progress, Receive)
            and kept.progress.message is not None
            and not fits(kept.progress, kept.progress.message)
        }

    def write(self, folder: Path) -> None:
        """Write a file per rank, under the name that torch uses, in place of those of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("nccl_trace_rank_*"):  # of an earlier run, maybe of more ranks
            old.unlink()
        for rank in range(len(self.kept)):
            data = pickle.dumps(self.dump(rank), protocol=2)
            write_bytes(folder / f"nccl_trace_rank_{rank}", data)


def fits(receive: Receive, message: Message) -> bool:
    """Return whether a message has the sizes and dtypes of the buffers that receive it."""
    sides = ([(t.numel(), t.dtype) for t in side.tensors] for side in (receive, message))
    return next(sides) == next(sides)


def shapes(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the shape of each tensor."""
    return [list(tensor.shape) for tensor in tensors]


def frames_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Convert lines of `user_stack` to torch's records."""
    frames = []
    for line in lines:
        place, _, name = line.rpartition(" in ")
        path, _, number = place.rpartition(":")
        frames.append({"name": name, "filename": path, "line": int(number)})
    return frames
