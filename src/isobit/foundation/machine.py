"""The fingerprint of this machine, thread counts, and whether subnormal numbers are flushed to zero."""

from __future__ import annotations

import _thread
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from isobit.foundation import native
from isobit.foundation.processor import cpu_name
from isobit.foundation.records import Fingerprint

# Variables, since Python's compiler would multiply constants itself.
_LEAST_NORMAL, _HALF = sys.float_info.min, 0.5
_LEAST_FP32 = 2.0**-149
_GRAIN = 32768  # elements that torch gives to one thread of an elementwise operation


def fingerprint(order_version: int) -> Fingerprint:
    """Return what decides which engine runs, read from the running process."""
    return Fingerprint(
        cpu=cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 0,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        onednn=torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        flags=native.build_flags(),
        order_version=order_version,
    )


def flushes_subnormals(*, workers: bool = False) -> bool:
    """Return whether this thread replaces subnormal numbers by zero, as after `torch.set_flush_denormal(True)`.

    The mode belongs to a thread, and a thread of torch's pool takes it from the thread that started the pool, so
    results of stock operations may depend on which thread computes an element. isobit's kernels set their own mode.

    Args:
        workers: Check every thread of torch's intra-op pool too; this takes tens of microseconds instead of 0.1.
    """
    if _LEAST_NORMAL * _HALF == 0.0:
        return True
    if not workers or torch.get_num_threads() == 1:
        return False
    with _disable_current_modes():  # a watching mode must not see this operation
        number = torch.tensor(_LEAST_FP32, dtype=torch.float32, device="cpu")
        subnormals = number.expand(torch.get_num_threads() * _GRAIN)
        return int(torch.count_nonzero(subnormals)) < subnormals.numel()


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Use this many threads within a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Run code independently of the caller's settings: torch's modes, and flushing of subnormal numbers
# to zero.
#
# [Note: flushed subnormals]
# `torch.set_flush_denormal(True)` sets a flag of the calling thread. A thread of torch's pool takes
# the flag from the thread that starts the pool, and keeps it. So the result of a stock operation
# depends on the thread that computes an element, and thus on its position in the tensor. The native
# kernels set the flag in each of their threads. Python code cannot reach the threads of a pool, but
# a new thread has a pool of its own, which starts with the flag that it sets.

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
