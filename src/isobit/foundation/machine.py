"""The fingerprint of this machine, thread counts, and whether subnormal numbers are flushed to zero."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
