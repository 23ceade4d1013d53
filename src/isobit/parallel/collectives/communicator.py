"""The communicator of a process group (rank, tags, receive buffers, thread), and the handle of a collective."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Each collective has a tag of its own, so that concurrent ones are never mixed up. The range is far
# from the tags that users choose.
FIRST_TAG, TAGS = 1 << 24, 1 << 22
SECONDS_TO_END = 5


class Communicator:
    """One process group, seen from one of its ranks. `communicator_of` makes one per group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Look up rank and size; threads and buffers are made when first needed."""
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = weakref.ref(group)
        self._tags = itertools.count()
        self._buffers: list[Tensor] = []
        self._uses_send_recv: dict[str, bool] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which outlives every call on it."""
        group = self._group()
        assert group is not None
        return group

    def next_tag(self) -> int:
        """Return a new tag, the same on all ranks, since all call collectives in one order."""
        return FIRST_TAG + next(self._tags) % TAGS

    def uses_send_recv(self, tensor: Tensor) -> bool:
        """Return whether the backend is gloo, which sends a tensor without copying it first."""
        kind = tensor.device.type
        if kind not in self._uses_send_recv:
            self._uses_send_recv[kind] = (
                type(self.group) is dist.ProcessGroup
                and kind == "cpu"
                and isinstance(self.group._get_backend(tensor.device), dist.ProcessGroupGloo)
            )
        return self._uses_send_recv[kind]

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Send a contiguous tensor to a rank of the group, without a copy."""
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Receive from a rank of the group into a contiguous tensor."""
        return self.group.recv([tensor], peer, tag)

    def borrow_buffer(self, size: int) -> Tensor:
        """Return at least `size` bytes, reused where possible.

        Touching new pages costs as much as receiving the message that fills them.
        """
        kept = self._buffers.pop() if self._buffers else None
        if kept is not None and kept.numel() >= size:
            return kept
        return torch.empty(size, dtype=torch.uint8)

    def return_buffer(self, buffer: Tensor) -> None:
        """Give a borrowed buffer back for the next collective."""
        self._buffers.append(buffer)

    def run_in_thread(self, task: Callable[[], None]) -> None:
        """Run a task in the background after those before it: in one order on all ranks."""
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            worker = threading.Thread(
                target=_serve, args=(self._tasks,), daemon=True, name="isobit communicator"
            )
            worker.start()
            weakref.finalize(self, _end, self._tasks, worker)
        self._tasks.put(task)


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise the last collective's tensors would live until the next one


def _end(tasks: queue.SimpleQueue[Callable[[], None] | None], worker: threading.Thread) -> None:
    """Stop a worker, but do not wait long for one that hangs.

    A thread inside torch while the interpreter ends would abort the process.
    """
    tasks.put(None)
    if worker is not threading.current_thread():
        worker.join(SECONDS_TO_END)


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)


def communicator_of(group: dist.ProcessGroup) -> Communicator:
    """Return the communicator of a group; it is made at the first call."""
    known = _communicators.get(group)
    return _communicators.setdefault(group, Communicator(group)) if known is None else known


# The handle of an asynchronous collective, used like torch.distributed's own `Work`.


class AsyncWork(dist.Work):
    """A collective that was started with `async_op=True`.

    On gloo it runs in the communicator's thread; on other backends its additions run in `wait()` or
    `get_future()`.
    """

    def __init__(
        self, finish: Callable[[], None], result: Tensor, comm: Communicator | None
    ) -> None:
        """Call `finish` in the thread of `comm`, or in `wait()` if that is None."""
        super().__init__()
        self._finish, self._result = finish, result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._begun = comm is not None
        if comm is not None:
            comm.run_in_thread(self._run)

    def _run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the result is in place; the backend's own timeout applies."""
        if not self._begun:
            self._begun = True
            self._run()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once."""
        return self._future.done()

    def result(self) -> list[Tensor]:
        """Wait, and return the result in a list, as torch's own works do."""
        self.wait()
        return [self._result]

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result, for communication hooks of DistributedDataParallel."""
        if not self._begun:
            self.wait()
        return self._future
