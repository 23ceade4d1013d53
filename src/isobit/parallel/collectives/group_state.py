"""What a process keeps for each group: its rank, tags, memory for what arrives, and a thread beside the caller."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store as _store

# Each exchange has tags of its own, so that those in flight together are never mixed up; far from what users take.
FIRST_TAG, TAGS = 1 << 24, 1 << 22
SECONDS_TO_END = 5


class Line:
    """A group, as one of its ranks sees it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = weakref.ref(group)
        self._tags = itertools.count()
        self._memory: list[Tensor] = []
        self._hosts: dict[int, bytes] | None = None
        self._has_messages: dict[str, bool] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, which outlives every call on it."""
        group = self._group()
        assert group is not None
        return group

    def next_tag(self) -> int:
        """The same number on all ranks, since all call in the same order."""
        return FIRST_TAG + next(self._tags) % TAGS

    def has_messages(self, tensor: Tensor) -> bool:
        """Whether this is gloo itself: its collectives copy what its messages send from where it lies."""
        kind = tensor.device.type
        if kind not in self._has_messages:
            self._has_messages[kind] = (
                type(self.group) is dist.ProcessGroup
                and kind == "cpu"
                and isinstance(self.group._get_backend(tensor.device), dist.ProcessGroupGloo)
            )
        return self._has_messages[kind]

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """A message to a rank of the group; the tensor is read where it lies."""
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """A message from a rank of the group, written where it shall lie."""
        return self.group.recv([tensor], peer, tag)

    def is_near(self, peer: int) -> bool:
        """Whether a rank runs on this host; decides who sends first, and no bit."""
        if self._hosts is None:
            self._hosts = {}
            _store().set(
                f"isobit host of {dist.get_global_rank(self.group, self.rank)}",
                socket.gethostname(),
            )
        if peer not in self._hosts:
            self._hosts[peer] = _store().get(
                f"isobit host of {dist.get_global_rank(self.group, peer)}"
            )
        return self._hosts[peer] == socket.gethostname().encode()

    def take_memory(self, size: int) -> Tensor:
        """Bytes that were used before, where there are any: new pages cost as much as the message that fills them."""
        kept = self._memory.pop() if self._memory else None
        return (
            kept
            if kept is not None and kept.numel() >= size
            else torch.empty(size, dtype=torch.uint8)
        )

    def give_memory(self, memory: Tensor) -> None:
        """Back for the next exchange."""
        self._memory.append(memory)

    def run(self, task: Callable[[], None]) -> None:
        """Runs a task after those before it, beside the caller; in the same order on all ranks."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            worker = threading.Thread(
                target=_serve, args=(self._tasks,), daemon=True, name="isobit exchange"
            )
            worker.start()
            weakref.finalize(self, _end, self._tasks, worker)
        self._tasks.put(task)


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last exchange would live until the next


def _end(tasks: queue.SimpleQueue[Callable[[], None] | None], worker: threading.Thread) -> None:
    """A thread that is inside torch while the interpreter ends would abort the process; one that hangs is left."""
    tasks.put(None)
    if worker is not threading.current_thread():
        worker.join(SECONDS_TO_END)


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()


def line_of(group: dist.ProcessGroup) -> Line:
    """The line of a group, made at its first call."""
    known = _lines.get(group)
    return _lines.setdefault(group, Line(group)) if known is None else known
