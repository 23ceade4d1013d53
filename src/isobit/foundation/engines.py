"""Where parallel work runs: processes of this machine, a cluster of Ray or of Dask, behind Python's Executor interface.

[Note: engines]
Work is a function and its arguments, submitted to a `concurrent.futures.Executor`. Results are written by the process
that submitted it, so a worker that dies has nothing to lose: Ray runs its task again on another one, and a task is
counted when its result arrives, which happens once. There is no queue or scheduler of our own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from isobit.errors import ArgumentError

LOCAL, RAY, DASK = "local", "ray", "dask:"
RETRIES = 5  # of a task whose worker or node died


def open_engine(on: str = LOCAL, jobs: int = 1) -> Executor:
    """Return the executor that `--on` names.

    Args:
        on: "local" for processes of this machine; "ray" for the cluster that RAY_ADDRESS names, or one that is started
            here; "ray://host:port" for a cluster elsewhere; "ray:host:port" for one whose node this is;
            "dask:tcp://host:port" for the scheduler of a Dask cluster.
        jobs: Number of local processes.

    Raises:
        ArgumentError: If there is no such engine, or its package is not installed.
    """
    if on == LOCAL:
        # Spawned: torch's threads do not survive a fork.
        return LocalExecutor(jobs, mp_context=get_context("spawn"))
    if on == RAY or on.startswith(("ray://", "ray:")):
        return RayExecutor("" if on == RAY else on if on.startswith("ray://") else on[4:])
    if on.startswith(DASK):
        return DaskExecutor(on.removeprefix(DASK))
    raise ArgumentError(
        expected="--on local, ray, ray:HOST:PORT, ray://HOST:PORT or dask:tcp://HOST:PORT",
        received=on,
        remedy='leave --on out for processes of this machine; pip install "isobit[ray]" for Ray',
    )


def check_engine(on: str) -> None:
    """Raise for an engine that does not exist, before anything is run."""
    if on != LOCAL and on != RAY and not on.startswith(("ray:", DASK)):
        open_engine(on)


class LocalExecutor(ProcessPoolExecutor):
    """Processes of this machine. A task whose process dies is not run again: it may be what ended it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes; raise an error with a remedy where one of them died."""
        super().__exit__(kind, error, trace)
        if isinstance(error, BrokenProcessPool):
            raise ArgumentError(
                expected="processes that live until their tasks are done",
                received="one that was killed, or that ended by itself",
                remedy="use fewer --jobs if memory ran out; without --jobs and --on the task runs in this process",
            ) from error


class RayExecutor(Executor):
    """Tasks of Ray as futures; a task whose worker or node dies is run again."""

    def __init__(self, address: str = "") -> None:
        """Join a cluster, or start one on this machine."""
        try:
            import ray
        except ImportError as error:
            raise ArgumentError(
                expected="the package ray",
                received=str(error),
                remedy='pip install "isobit[ray]", or leave --on out',
            ) from error
        self.ray: Any = ray
        self.started = not ray.is_initialized()
        if self.started:
            where = {"address": address} if address else {}
            ray.init(log_to_driver=False, logging_level="error", **where)
        self.refs: list[Any] = []
        self.task = ray.remote(max_retries=RETRIES, num_cpus=1)(call_with_path)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task, and return the future of its result."""
        ref = self.task.remote(list(sys.path), os.getcwd(), fn, args, kwargs)
        self.refs.append(ref)
        found: Future[Any] = ref.future()
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End tasks that were not waited for if asked to, and leave the cluster if it was joined here."""
        if cancel_futures:
            for ref in self.refs:
                self.ray.cancel(ref, force=True)
        if self.started:
            self.ray.shutdown()


class DaskExecutor(Executor):
    """Tasks of a Dask cluster as futures; a task whose worker dies is run again."""

    def __init__(self, address: str) -> None:
        """Join a cluster."""
        try:
            from distributed import Client
        except ImportError as error:
            raise ArgumentError(
                expected="the package distributed",
                received=str(error),
                remedy="pip install distributed, or leave --on out",
            ) from error
        try:
            self.client: Any = Client(address)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                expected="the address of a Dask scheduler",
                received=f"{address}: {str(error)[:200]}",
                remedy="name it as the scheduler prints it: --on dask:tcp://HOST:8786",
            ) from error
        self.executor = self.client.get_executor(retries=RETRIES)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task, and return the future of its result."""
        found: Future[Any] = self.executor.submit(
            call_with_path, list(sys.path), os.getcwd(), fn, args, kwargs
        )
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster."""
        self.executor.shutdown(wait=wait and not cancel_futures)
        self.client.close()


def call_with_path(
    path: list[str], folder: str, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a function with what the driver can import: where its folders exist, they are importable here too."""
    sys.path += [one for one in path if one and one not in sys.path and os.path.isdir(one)]
    if os.path.isdir(folder):
        os.chdir(folder)
    return fn(*args, **kwargs)
