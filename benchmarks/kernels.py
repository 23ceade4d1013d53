"""The Triton kernels of every executor, compiled without a GPU: registers, spills and shared memory."""

import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.kernel_launches import (
    LARGE,
    SHORT,
    distinct,
    product_operators,
    record,
    row_operators,
)
from benchmarks.kernel_resources import LIMITS, measure

NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx950", "gfx1100")
ROWS = (512, 64, 1)  # every form of a product and of attention
# Constants that are sizes of a call, not of a tile; a kernel is shown at the first sizes that it is launched with.
SIZES = {"N", "K", "WIDTH", "HEADS", "HALF", "KEY_HEADS", "GROUP", "DEPTH", "LEVELS", "CHUNK"}
FLAGS = {"HAS_BIAS", "BIASED", "FINAL", "CAPPED", "CENTRED", "TRANSPOSED", "INVERSE"}


def tile_of(launch):
    """Return the constants of a launch that are a tile, with warps and stages: "BLOCK_M=128 ... 8 warps 3 stages"."""
    left_out = SIZES | FLAGS | ({"ROWS"} if launch.name == "look_up" else set())
    shown = [f"{k}={v}" for k, v in launch.constants.items() if k not in left_out]
    options = launch.call.options
    return " ".join([*shown, f"{options.num_warps} warps", f"{options.num_stages} stages"])


def shown_as(launch):
    """Return a launch's row of the table, without its dtype; kernels of one name in two folders are two rows."""
    name = launch.name + (" (transposed)" if launch.constants.get("TRANSPOSED") else "")
    return launch.operator, name, tile_of(launch)


def launches_of(target, dtype):
    """Return one launch per kernel and tile of a dtype; only products and attention have tiles of their own in fp32."""
    found = [] if dtype == torch.float32 else record(target, LARGE, ROWS[0], dtype, row_operators)
    for rows in ROWS:
        found += record(target, LARGE, rows, dtype, product_operators)
    found = distinct(found, lambda launch: (launch.kernel.fn.__module__, *shown_as(launch)[1:]))
    if dtype == torch.float32:
        found = [each for each in found if each.operator in ("linear", "attention")]
        found = [each for each in found if each.name not in ("fold_runs", "merge_runs")]
    return found


def measure_all(targets, quick):
    """Return {(operator, kernel, tile, dtype): {target: resources, or None if not compiled}}.

    With `quick` nothing is compiled; what an earlier run has compiled is shown.
    """
    todo = []
    for dtype in (torch.bfloat16, torch.float32):
        for target in targets:
            todo += [(dtype, target, launch) for launch in launches_of(target, dtype)]
    rows = {}
    for dtype, target, launch in track(todo, console=Console(stderr=True), transient=True):
        row = rows.setdefault((*shown_as(launch), SHORT[dtype]), {})
        row[target] = measure(launch, target, only_kept=quick)
    return rows


def show_resources(console, targets, quick):
    """Print registers, spilled bytes and shared memory; return how many binaries there are, and which spill."""
    table = Table("operator", "kernel", "tile", "dtype", *targets)
    count, missing, spilled, too_large = 0, 0, [], []
    for (operator, kernel, tile, dtype), row in measure_all(targets, quick).items():
        cells = []
        for target in targets:
            found = row.get(target)
            cells.append("not compiled" if target in row and found is None else "")
            missing += target in row and found is None
            if found is None:
                continue
            count += 1
            cells[-1] = f"{found.registers} / {found.spills} / {found.shared / 1024:.1f}"
            what = f"{target} {dtype} {kernel} ({tile})"
            if found.spills:
                spilled.append(f"{what}: {found.spills} bytes")
            if found.shared > LIMITS[target]:
                too_large.append(f"{what}: {found.shared} bytes of shared memory")
        table.add_row(operator, kernel, tile, dtype, *cells)
    console.print(table)
    return count, missing, spilled, too_large


def run(quick, threads, dtypes):
    """Print the tables; return 1 if a program does not fit into shared memory, or nothing was compiled."""
    console, begun = Console(highlight=False, width=260), time.process_time()
    results = [show_resources(console, targets, quick) for targets in (NVIDIA, AMD)]
    count, missing = (sum(each[at] for each in results) for at in (0, 1))
    spilled, too_large = ([line for each in results for line in each[at]] for at in (2, 3))
    console.print(
        f"{count} of {count + missing} binaries compiled; {len(spilled)} spill; {len(too_large)} do not fit"
    )
    for line in spilled:
        console.print(f"spills: {line}")
    for line in too_large:
        console.print(f"does not fit: {line}")
    console.print(f"{time.process_time() - begun:.0f} s of one core, without ptxas")
    return int(not count or bool(too_large))
