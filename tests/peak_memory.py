"""Peak memory of a call in this process: how much the resident set grew beyond what it was before."""

import gc
from pathlib import Path


def resident(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise AssertionError(key)


def peak_of(call):
    """Return the result of a call and the bytes by which memory grew at its peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = resident("VmRSS:")
    result = call()
    return result, resident("VmHWM:") - before
