"""What Python costs before a launch: operators as a GPU's host calls them, with a backend that runs nothing.

The launch itself is not in it: what Triton does on the host for each kernel, and the driver. Sizes are those of a
decode step of Qwen3-0.6B in bf16, without gradients; a call is the second or later one with its sizes.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import isobit
from isobit.foundation import backends

HIDDEN, MIDDLE, HEADS, KEY_HEADS, DEPTH, KEYS, WORDS = 1024, 3072, 16, 8, 128, 300, 8192
GOALS = {"linear": 15, "attention, decode": 60}  # µs
ROUNDS, CALLS = 15, 500


class Nowhere:
    """A backend that counts launches and runs nothing."""

    kind, target, engine = "nowhere", "sm_90", "tc25x16"

    def __init__(self):
        self.launches = 0

    def launch(self, *_):
        self.launches += 1


def cases():
    """Return calls of operators by name."""

    def made(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    x, norm, wide, words = made(1, HIDDEN), made(HIDDEN), made(MIDDLE, HIDDEN), made(WORDS, HIDDEN)
    q, keys = made(1, 1, HEADS, DEPTH), made(1, KEYS, KEY_HEADS, DEPTH)
    gate, targets = made(1, MIDDLE), torch.zeros(1, dtype=torch.int64)
    return {
        "linear": lambda: isobit.linear(x, wide),
        "rms_norm": lambda: isobit.rms_norm(x, norm),
        "swiglu": lambda: isobit.swiglu(gate, gate),
        "attention, decode": lambda: isobit.attention(q, keys, keys, is_causal=True),
        "linear_logprob": lambda: isobit.linear_logprob(x, words, targets),
    }


def run(quick, threads, dtypes):
    """Print microseconds per call, the median and quartiles of rounds."""
    torch.set_num_threads(1)
    table = Table("operator", "launches of a call", "µs of a call: median", "quartiles", "goal")
    calls, times, launches = cases(), {}, {}
    with torch.no_grad(), backends.use(Nowhere()) as backend:
        for name, call in calls.items():
            for _ in range(20):
                call()
            backend.launches = 0
            call()
            launches[name] = backend.launches
        for _ in range(ROUNDS):
            for name, call in calls.items():
                begun = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times.setdefault(name, []).append((time.perf_counter() - begun) / CALLS * 1e6)
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        goal = str(GOALS.get(name, ""))
        table.add_row(name, str(launches[name]), f"{median:.1f}", f"{low:.1f} to {high:.1f}", goal)
    Console(highlight=False, width=160).print(table)
    return 0
