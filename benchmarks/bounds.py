"""What this machine can do at most, beside what stock and isobit reach: fp32 products and one row, one thread.

The bounds are two loops in C, compiled here: fused multiply-adds in registers, and sums of vectors that are read from
memory or from the last cache. All contenders take turns; figures are medians.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import isobit
from isobit import bits
from isobit.foundation.machine import thread_count

SOURCE = """
#include <stdint.h>
typedef float lanes __attribute__((vector_size(64), aligned(4)));
#define CHAINS 24
float multiply_add(int64_t steps, float x) {
  lanes sums[CHAINS] = {}, factor = {}, addend = {};
  factor += x;
  addend += x;
  for (int i = 0; i < CHAINS; i++) sums[i] += i * x;  // otherwise all are one
  for (int64_t step = 0; step < steps; step++)
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + addend;
  for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
  return sums[0][0];
}
float read_all(const float* data, int64_t count) {
  lanes sums[8] = {};
  for (int64_t at = 0; at < count; at += 128)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[i] += *(const lanes*)(data + at + 16 * i);
  for (int i = 1; i < 8; i++) sums[0] += sums[i];
  return sums[0][0];
}
"""
CHAINS, LANES, STEPS = 24, 16, 200_000
SHAPES = ((512, 1024, 1024), (512, 2048, 1024), (512, 1024, 3072), (2048, 3072, 1024))
LARGE = (65536, 1024)  # a weight of 256 MB, which no cache holds


def loops(folder):
    """Compile the two loops for this machine."""
    source, library = Path(folder) / "bounds.c", Path(folder) / "bounds.so"
    source.write_text(SOURCE)
    flags = ["-O3", "-mavx512f", "-ffp-contract=fast", "-mprefer-vector-width=512"]
    subprocess.run(["gcc", *flags, "-shared", "-fPIC", source, "-o", library], check=True)
    found = ctypes.CDLL(str(library))
    found.multiply_add.argtypes = (ctypes.c_int64, ctypes.c_float)
    found.read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


def medians(contenders, rounds):
    """Return the median time of each, all by turns; the first round warms up."""
    times = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def products(library, console, rounds):
    """Print GFLOP/s of the three products of a layer, beside multiply-adds in registers."""
    peak = 2 * CHAINS * LANES * STEPS
    table = Table(
        "fp32, one thread", "multiply-adds", "stock: forward", "dX", "dW", "isobit: forward", "dX", "dW"
    )  # fmt: skip
    shares = []
    for rows, outputs, length in SHAPES:
        x, weight = torch.randn(rows, length), torch.randn(outputs, length)
        grad = torch.randn(rows, outputs)
        found = medians(
            {
                "peak": lambda: library.multiply_add(STEPS, 0.5),
                "stock: forward": lambda x=x, w=weight: F.linear(x, w),
                "stock: dX": lambda g=grad, w=weight: g @ w,
                "stock: dW": lambda g=grad, x=x: g.t() @ x,
                "forward": lambda x=x, w=weight: isobit.linear(x, w),
                "dX": lambda g=grad, w=weight: torch.ops.isobit.linear_input_grad(g, w),
                "dW": lambda g=grad, x=x: torch.ops.isobit.linear_weight_grad(g, x, None, 0),
            },
            rounds,
        )
        work = 2 * rows * outputs * length
        rates = [(peak if name == "peak" else work) / t * 1e-9 for name, t in found.items()]
        shares.append([rate / rates[0] for rate in rates[1:]])
        table.add_row(f"{rows} × {outputs} × {length}", *(f"{rate:.0f}" for rate in rates))
    console.print(table)
    stock, ours = ([min(s[a:b]) for s in shares] for a, b in ((0, 3), (3, 6)))
    console.print(
        f"GFLOP/s; of multiply-adds in registers stock reaches at least {min(stock):.2f}, "
        f"isobit at least {min(ours):.2f}"
    )


def one_row(library, console, rounds):
    """Print GB/s of a product of one row, beside a loop that reads as many bytes."""
    table = Table("one row, one thread", "dtype", "reading", "stock", "isobit", "isobit, frozen")
    for outputs, length in (*(shape[1:] for shape in SHAPES[:3]), LARGE):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = (torch.randn(n, length).to(dtype) for n in (1, outputs))
            layer = isobit.nn.Linear(length, outputs, bias=False, dtype=dtype)
            layer.load_state_dict({"weight": weight})
            isobit.freeze(layer)
            count = weight.numel() * weight.element_size()
            assert bits.equal(isobit.linear(x, weight), layer(x))
            with torch.no_grad():
                found = medians(
                    {
                        "reading": lambda w=weight, n=count: library.read_all(w.data_ptr(), n // 4),
                        "stock": lambda x=x, w=weight: F.linear(x, w),
                        "isobit": lambda x=x, w=weight: isobit.linear(x, w),
                        "frozen": lambda x=x, layer=layer: layer(x),
                    },
                    rounds,
                )
            rates = (f"{count / t * 1e-9:.1f}" for t in found.values())
            size = f"{outputs} × {length}, {count / 2**20:.0f} MB"
            table.add_row(size, str(dtype).removeprefix("torch."), *rates)
    console.print(table)
    console.print("GB/s of weight; weights up to 33 MB stay in this machine's last cache")


def run(quick, threads, dtypes):
    """Print both tables."""
    console = Console(highlight=False, width=140)
    with tempfile.TemporaryDirectory() as folder, thread_count(1):
        library = loops(folder)
        products(library, console, 5 if quick else 15)
        one_row(library, console, 9 if quick else 41)
    return 0
