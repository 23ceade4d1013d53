"""An estimate of what the order costs a linear layer on an H100: arithmetic, nothing is timed.

One program of each kernel is run in the PTX machine, which counts what it executes. Time is the largest of four: of
products, of other floating-point instructions, of memory, and of the L2 cache. The chain is the same kernel with one
segment. If nothing overlaps, the price of the order is added to the time of the chain; that is the other bound.
"""

import re
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.kernel_launches import Recording
from isobit.certifying.running.compile import specialise
from isobit.foundation import backends
from isobit.order.engines import ENGINE_OF_TARGET
from isobit.order.plan import FeaturePlan
from tests.gpu.generic_kernels import run_call

# H100 SXM: NVIDIA's data sheet, dense bf16; 128 fp32 lanes per SM at 1.755 GHz; the L2 rate is an assumption.
TENSOR, MEMORY, CACHE, LANES = 989e12, 3.35e12, 5.5e12, 132 * 128 * 1.755e9
# Qwen3-8B: outputs and inputs of the products of a layer.
LAYER = {"q, k, v": (6144, 4096), "o": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)}  # fmt: skip
ROWS = (1, 8, 64, 512, 4096)
TARGET, EXTENT, TILE = "sm_90", 4096, 128 * 128


@dataclass
class Counting:
    """A backend that runs kernels in the PTX machine and counts what they execute."""

    target: str = TARGET

    def __post_init__(self):
        self.engine, self.found = ENGINE_OF_TARGET[self.target], {}

    def launch(self, kernel, grid, args, constants, options):
        call = specialise(kernel, self.target, args, {**constants, **options})
        machine, _ = run_call(self.target, kernel, call, grid)
        programs, threads = grid[0] * (grid[1] if len(grid) > 1 else 1), 32 * options["num_warps"]
        self.found[kernel.__name__] = summarise(machine.counts, programs, threads)


def summarise(counts, programs, threads):
    """Return per program: matrix instructions, fp32 instructions and bytes moved, from executed opcodes."""
    sums = Counter()
    for opcode, times in counts.items():
        each = times / programs
        if opcode.startswith(("wgmma.mma_async", "mma.sync", "tcgen05.mma")):
            sums["matrix"] += each
        elif re.match(r"(add|sub|mul|fma)\..*f32", opcode):
            sums["fp32"] += each * threads * (2 if "f32x2" in opcode else 1)
        elif opcode.startswith(("ld.global", "st.global", "cp.async")):
            sums[opcode[:2]] += each * threads * bytes_of(opcode)
        sums["all"] += each
    return sums


def bytes_of(opcode):
    """Return the bytes that one thread moves."""
    if opcode.startswith("cp.async"):
        return 16 if re.search(r"\.(cg|ca)\.", opcode) else 0
    bits = re.search(r"[bfusx](\d+)$", opcode)
    vector = re.search(r"\.v(\d)\.", opcode)
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1) if bits else 0


def count_programs():
    """Return what one program of each form executes, at K = 4096."""
    found = {}
    for name, rows, columns, segments in (
        ("linear_counter", 128, 128, None),
        ("linear_tile", 128, 128, 1),
        ("linear_segments", 8, 64, None),
    ):
        x, weight = (torch.randn(n, EXTENT).bfloat16() for n in (rows, columns))
        backend = Counting()
        count = segments or FeaturePlan(EXTENT).count
        planned = property(lambda _, count=count: count)
        with backends.use(backend), patch.object(FeaturePlan, "count", planned):
            isobit.linear(x, weight)
        found |= {name: backend.found[name]}
        found |= {k: v for k, v in backend.found.items() if k == "merge_segments"}
    return found


def launches_of(rows, columns, extent):
    """Return the launches of one product at real sizes."""
    backend = Recording(TARGET)
    x, weight = (torch.empty(n, extent, dtype=torch.bfloat16) for n in (rows, columns))
    with backends.use(backend):
        isobit.linear(x, weight)
    return backend.launches


def estimate(rows, columns, extent, counted):
    """Return (form, seconds of the chain, seconds of the order if all overlaps, seconds if nothing does)."""
    launches, segments = launches_of(rows, columns, extent), FeaturePlan(extent).count
    names, tile = [launch.name for launch in launches], launches[0].constants
    height, width = tile["BLOCK_M"], tile["BLOCK_N"]
    tiles, outputs = -(-rows // height) * -(-columns // width), rows * columns
    products = 2 * outputs * extent / TENSOR
    memory = 2 * (columns * extent + rows * extent + outputs) / MEMORY
    operands = 2 * tiles * (height + width) * extent / CACHE  # every program loads its own
    adds, moved, form = segments - 1, 0, "registers"  # moved: bytes of partial sums per output
    if "linear_counter" in names:
        counter, chain = counted["linear_counter"], counted["linear_tile"]
        adds = (counter["fp32"] - chain["fp32"]) / TILE
        moved, form = sum(counter[way] - chain[way] for way in ("ld", "st")) / TILE, "counter"
    elif "linear_segments" in names:
        moved, form = 2 * 4 * segments, "segments on the grid"
    chain = max(products, memory, operands)
    adding, moving = outputs * adds / LANES, outputs * moved / CACHE
    return form, chain, max(products, memory, operands + moving, adding), chain + moving + adding


def run(quick, threads, dtypes):
    """Print what programs execute, and the estimates."""
    console = Console(highlight=False, width=200)
    counted = count_programs()
    table = Table(
        "kernel, one program",
        "matrix instructions",
        "fp32 operations",
        "bytes loaded",
        "bytes stored",
        "instructions",
    )
    for name, sums in counted.items():
        keys = ("matrix", "fp32", "ld", "st", "all")
        loaded = {**sums, "ld": sums["ld"] + sums["cp"]}
        table.add_row(name, *(f"{loaded.get(key, 0):,.0f}" for key in keys))
    console.print(table)
    table = Table(
        "H100, bf16, a layer of Qwen3-8B: arithmetic",
        "forms",
        "one chain, µs",
        "the order, all overlapped",
        "nothing overlapped",
    )
    for rows in ROWS:
        found = [estimate(rows, *size, counted) for size in LAYER.values()]
        forms = ", ".join(dict.fromkeys(form for form, *_ in found))
        chain, best, worst = (sum(each[at] for each in found) for at in (1, 2, 3))
        shares = (f"+{100 * (time / chain - 1):.1f} %" for time in (best, worst))
        table.add_row(f"M = {rows:,}", forms, f"{1e6 * chain:.1f}", *shares)
    console.print(table)
    console.print(
        f"arithmetic, not measured: {TENSOR / 1e12:.0f} TFLOPS, {MEMORY / 1e12:.2f} TB/s of memory,"
        f" {CACHE / 1e12:.1f} TB/s of L2 (assumed), {LANES / 1e12:.1f} T fp32 operations a second;"
        " partial sums stay in the L2 cache; launches cost nothing"
    )
    return 0
