"""The fingerprint of this machine: what decides which engine runs, and so which bits come out."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isobit import native
from isobit.processor import cpu_name
from isobit.records import Fingerprint


def fingerprint(order_version: int) -> Fingerprint:
    """Read from the running process, never from configuration."""
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


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Runs with so many threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
