"""The handle of an asynchronous collective, used like torch.distributed's own `Work`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.communicator import Communicator


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
