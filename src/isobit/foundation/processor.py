"""The processor's name, read without torch."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the model of the CPU as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
