"""An estimate of what the order costs a linear layer on an H100: arithmetic, nothing is timed.

One program of each kernel is run in the PTX machine, which counts what it executes. Time is the largest of four: of
products, of other floating-point instructions, of memory, and of the L2 cache. The chain is the same kernel with one
segment. If nothing overlaps, the price of the order is added to the time of the chain; that is the other bound.

Machine code says how many programs an SM has at a time. Programs come in waves, and a wave that is not full takes as
long as a full one. The host's Python before a launch is measured here, with a backend that launches nothing; Triton's
own launcher is not in it. A GPU that is faster than its host waits for it.
"""

import math
import re
import time
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.kernel_launches import Recording
from benchmarks.kernel_resources import measure
from isobit.certifying.running import sass
from isobit.certifying.running.backends import compiler_for
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
SMS, REGISTERS, SHARED, THREADS = 132, 65536, 228 * 1024, 2048  # of an H100, and of one SM


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
    best = max(products, memory, operands + moving, adding)
    places = SMS * programs_of_an_sm(launches[0])
    waves = math.prod(launches[0].grid) / places
    idle = (
        math.ceil(waves) / waves
    )  # where memory is the limit, fewer programs ask for as much of it
    whole = max(memory, idle * max(products, operands + moving, adding))
    return form, chain, best, chain + moving + adding, whole


def programs_of_an_sm(launch):
    """Return how many programs an SM has at a time, by registers, shared memory and threads."""
    found, threads = measure(launch, TARGET), 32 * launch.call.options.num_warps
    registers = -(-found.registers // 8) * 8 * threads  # a warp has them in units of 256
    return min(REGISTERS // registers, SHARED // (found.shared + 1024), THREADS // threads)


def show_machine_code(console):
    """Print what ptxas makes of the kernels of a layer."""
    table = Table(
        "sm_90, K = 4096", "registers", "KB of shared memory", "stages", "programs of an SM",
        "matrix instructions", "barriers", "waits for copies", "instructions",
    )  # fmt: skip
    launches = {one.name: one for rows in ROWS for one in launches_of(rows, 4096, EXTENT)}
    for name, launch in launches.items():
        found = measure(launch, TARGET)
        ptx = compiler_for(TARGET).compile(launch.kernel, launch.call).ptx
        code = sass.disassemble(sass.assemble(ptx, TARGET))
        kinds = (sass.MATRIX, ("BAR",), ("LDGDEPBAR", "DEPBAR"))
        table.add_row(
            name,
            str(found.registers),
            f"{found.shared / 1024:.0f}",
            str(launch.call.options.num_stages),
            str(programs_of_an_sm(launch)),
            *(f"{sass.count(code, kind)}" for kind in kinds),
            f"{len(code.splitlines()):,}",
        )
    console.print(table)


class Nowhere:
    """A backend that launches nothing."""

    kind, target, engine = "nowhere", TARGET, ENGINE_OF_TARGET[TARGET]

    def launch(self, *_):
        """Do nothing."""


def host_seconds(rows):
    """Return what Python takes for the products of a layer before their launches: the best of many calls.

    Products of many rows have few columns here: the form is the same, and the CPU takes long to allocate large results.
    """
    given = [
        [torch.empty(n, extent, dtype=torch.bfloat16) for n in (rows, min(columns, most))]
        for most in [64 if rows >= 128 else 1 << 20]
        for columns, extent in LAYER.values()
    ]
    best = math.inf
    with backends.use(Nowhere()), torch.no_grad():
        for _ in range(200):
            begun = time.perf_counter()
            for _ in range(5):
                for x, weight in given:
                    isobit.linear(x, weight)
            best = min(best, (time.perf_counter() - begun) / 5)
    return best


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
    show_machine_code(console)
    table = Table(
        "H100, bf16, a layer of Qwen3-8B: arithmetic",
        "forms",
        "one chain, µs",
        "the order, all overlapped",
        "nothing overlapped",
        "in whole waves, µs",
        "host's Python, µs, measured",
    )
    for rows in ROWS:
        found = [estimate(rows, *size, counted) for size in LAYER.values()]
        forms = ", ".join(dict.fromkeys(form for form, *_ in found))
        chain, best, worst, waves = (sum(each[at] for each in found) for at in (1, 2, 3, 4))
        shares = (f"+{100 * (time / chain - 1):.1f} %" for time in (best, worst))
        cells = (f"{1e6 * seconds:.1f}" for seconds in (waves, host_seconds(rows)))
        table.add_row(f"M = {rows:,}", forms, f"{1e6 * chain:.1f}", *shares, *cells)
    console.print(table)
    console.print(
        f"arithmetic, not measured: {TENSOR / 1e12:.0f} TFLOPS, {MEMORY / 1e12:.2f} TB/s of memory,"
        f" {CACHE / 1e12:.1f} TB/s of L2 (assumed), {LANES / 1e12:.1f} T fp32 operations a second;"
        " partial sums stay in the L2 cache; launches cost what Python does before them, on this machine"
    )
    return 0
