"""Run code independently of the caller's settings: torch's modes, and flushing of subnormal numbers to zero.

[Note: flushed subnormals]
`torch.set_flush_denormal(True)` sets a flag of the calling thread. A thread of torch's pool takes the flag from the
thread that starts the pool, and keeps it. So the result of a stock operation depends on the thread that computes an
element, and thus on its position in the tensor. The native kernels set the flag in each of their threads. Python code
cannot reach the threads of a pool, but a new thread has a pool of its own, which starts with the flag that it sets.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from isobit.foundation.machine import flushes_subnormals

P = ParamSpec("P")
T = TypeVar("T")


def run_apart(function: Callable[[], T]) -> T:
    """Run `function` in a new thread that keeps subnormals, outside of every torch mode of the caller.

    Modes (FakeTensorMode, torch.func, torch.device, autocast, inference_mode, no_grad) belong to a thread. The default
    dtype and the deterministic mode belong to the process, and are not changed. Raises what `function` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    # Not threading.Thread, which may be replaced: the simulator schedules the threads of a program.
    done = _thread.allocate_lock()

    def run() -> None:
        try:
            torch.set_flush_denormal(False)
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(run, ())
    done.acquire()
    if errors:
        raise errors[0]
    return results[0]


def keeping_subnormals(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate stock arithmetic so that its bits depend neither on flushed subnormals nor on a default device."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        # torch.device(...) and set_default_device are torch functions' modes.
        with torch._C.DisableTorchFunction():
            if not flushes_subnormals(workers=True):
                return function(*args, **options)
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return function(*args, **options)

        return run_apart(run)

    return call
