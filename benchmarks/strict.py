"""A child process in which MKL is told to be reproducible, since it reads MKL_CBWR once, at start.

Reads lines `threads rows k n repetitions` and answers each with the median seconds of stock fp32 F.linear.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch


class Strict:
    """The parent's side: one child, asked shape by shape, in turn with the other timings."""

    def __init__(self):
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.strict"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            # Passive: its threads must not spin on the cores while others are timed.
            env={"MKL_CBWR": "AVX512,STRICT", "OMP_WAIT_POLICY": "passive"},
        )

    def seconds(self, *numbers):
        self._child.stdin.write(" ".join(map(str, numbers)) + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def close(self):
        self._child.stdin.close()
        self._child.wait()


def serve():
    held = {}
    for line in sys.stdin:
        threads, rows, k, n, repetitions = map(int, line.split())
        torch.set_num_threads(threads)
        if held.get("shape") != (rows, k, n):
            held = {"shape": (rows, k, n), "x": torch.randn(rows, k), "w": torch.randn(n, k)}
            torch.nn.functional.linear(held["x"], held["w"])
        times = []
        with torch.inference_mode():
            for _ in range(repetitions):
                start = time.perf_counter()
                torch.nn.functional.linear(held["x"], held["w"])
                times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


if __name__ == "__main__":
    serve()
