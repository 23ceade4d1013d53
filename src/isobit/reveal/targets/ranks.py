"""The order of ranks in `torch.distributed.all_reduce`, with gloo and one process per rank."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from isobit.errors import EngineError
from isobit.reveal.target import FP32, Scale, Terms

SECONDS_TO_START, SECONDS_TO_ADD = 120, 60


class Ranks:
    """A group of gloo processes; each element of their all-reduce is a target.

    Use it as a context manager, which starts and stops the processes:
    `with targets.Ranks(4, 8) as group: certify(group.element, range(8))`.

    Args:
        ranks: the number of processes.
        elements: the number of elements of the tensor that is reduced.

    Raises:
        EngineError: The processes do not start, or do not answer.

    Example:
        >>> from isobit.reveal import targets
        >>> targets.Ranks(4, 8).element(0).n
        4
    """

    def __init__(self, ranks: int, elements: int) -> None:
        """Take the sizes; the processes start when the context is entered."""
        self.ranks, self.elements = ranks, elements
        self._known: dict[tuple[float, ...], list[float]] = {}

    def __enter__(self) -> Ranks:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(store, rank, self.ranks, self.elements, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)
        for rank, line in enumerate(self._lines):
            if not line.poll(SECONDS_TO_START) or line.recv() != "ready":
                self.__exit__(None, None, None)
                raise EngineError(
                    expected=f"{self.ranks} gloo processes within {SECONDS_TO_START} s",
                    received=f"none from rank {rank}",
                    remedy="free memory or use fewer ranks",
                )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the processes."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()

    def add(self, batch: Sequence[tuple[float, ...]]) -> list[list[float]]:
        """Return for each tuple (one value per rank) every element of the all-reduced tensor."""
        new = [values for values in dict.fromkeys(batch) if values not in self._known]
        if new:
            for rank, line in enumerate(self._lines):
                line.send([values[rank] for values in new])
            if not self._lines[0].poll(SECONDS_TO_ADD):
                raise EngineError(
                    expected=f"an answer of {self.ranks} ranks within {SECONDS_TO_ADD} s",
                    received="none",
                    remedy="a rank has exited or hangs: start again",
                )
            self._known.update(zip(new, self._lines[0].recv(), strict=True))
        return [self._known[values] for values in batch]

    def forget(self, values: tuple[float, ...]) -> None:
        """Drop a known answer, so that the processes compute it again."""
        self._known.pop(values, None)

    def element(self, element: int) -> RankTarget:
        """Return the sum of one element as a target."""
        return RankTarget(self, element)


@dataclass(frozen=True)
class RankTarget:
    """One element's sum over the ranks."""

    group: Ranks
    element: int

    kind: str = "sum"
    scale: Scale = FP32
    output_bits: int = 24
    scope: str = ""
    unlike: int = 0
    storage: str = "one aligned tensor per rank"

    @property
    def n(self) -> int:
        """The number of terms: one per rank."""
        return self.group.ranks

    @property
    def name(self) -> str:
        """A name for reports."""
        return (
            f"all_reduce over {self.n} gloo ranks, element {self.element} of {self.group.elements}"
        )

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """Return the sum of each probe; answers are shared between elements."""
        rows = []
        for probe in batch:
            values = [probe.fill if rank in probe.over else 0.0 for rank in range(self.n)]
            for rank, value in zip(probe.indices, probe.values, strict=True):
                values[rank] = value
            rows.append(tuple(values))
        return [found[self.element] for found in self.group.add(rows)]

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> list[float]:
        """Return the sum of this element, computed anew, so that a change would show."""
        self.group.forget(tuple(values))
        return [self.group.add([tuple(values)])[0][self.element]]

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> list[list[float]]:
        """Return the sum of each vector; answers are shared between elements."""
        return [
            [found[self.element]] for found in self.group.add([tuple(values) for values in batch])
        ]


def _serve(store: str, rank: int, ranks: int, elements: int, line: Connection) -> None:
    """Run one rank until the connection is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    line.send("ready")
    try:
        while True:
            found = []
            for value in line.recv():
                tensor = torch.full((elements,), value)
                dist.all_reduce(tensor)
                found.append(tensor.tolist())
            if rank == 0:
                line.send(found)
    except EOFError:
        dist.destroy_process_group()
