"""An exchange that runs on beside its caller, as torch.distributed's own works do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.group_state import Line


class Flight(dist.Work):
    """Ends by itself on gloo, in its group's thread; elsewhere in wait() or get_future()."""

    def __init__(self, finish: Callable[[], None], result: Tensor, line: Line | None) -> None:
        super().__init__()
        self._finish, self._result = finish, result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._begun = line is not None
        if line is not None:
            line.run(self._run)

    def _run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result is in place; the transport's own timeout holds."""
        if not self._begun:
            self._begun = True
            self._run()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether wait() would return at once."""
        return self._future.done()

    def result(self) -> list[Tensor]:
        """The tensor that holds the sum, as torch's own works give it."""
        self.wait()
        return [self._result]

    def get_future(self) -> torch.futures.Future[Any]:
        """For hooks of DistributedDataParallel: its value is the tensor."""
        if not self._begun:
            self.wait()
        return self._future
