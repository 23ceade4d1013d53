"""Binaries per operator over numbers of rows: distinct compiled kernels, counted by Triton's own specialisation.

Nothing is compiled: two launches share a binary if kernel, types, constants, options, and what Triton derives from the
values of arguments are equal. A form for few rows is another binary than one for many, so that the first numbers of
rows, which reach every form, may add binaries. Any further number must add none.
"""

import resource
from collections import defaultdict
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_launches import (
    LARGE,
    MIXTURE,
    ROW_COUNTS,
    SHORT,
    SMALL,
    every_operator,
    record,
)

WORDS = 151_936  # of all three; the memory of their tables is not touched
FURTHER = (4, 5, 15, 16, 33, 48, 99, 113, 127, 128, 129, 256, 777, 1000, 2048)


def count(target, models, dtype, row_counts, calls=every_operator):
    """Return {operator: [launches, number of binaries after each number of rows, without Triton's specialisation]}."""
    keys, written = defaultdict(set), defaultdict(set)
    launches, totals = defaultdict(int), defaultdict(list)
    for rows in row_counts:
        for model in models:
            for launch in record(target, model, rows, dtype, calls):
                keys[launch.operator].add(launch.key)
                written[launch.operator].add(launch.written)
                launches[launch.operator] += 1
        for operator, found in keys.items():
            totals[operator].append(len(found))
    return {each: (launches[each], totals[each], len(written[each])) for each in keys}


def growing(found, first):
    """Return the operators whose binaries grow after the first numbers of rows."""
    return [
        f"{operator}: {totals[first - 1]} binaries at {first} numbers of rows, {totals[-1]} at {len(totals)}"
        for operator, (_, totals, _) in found.items()
        if totals[-1] != totals[first - 1]
    ]


def run(quick, threads, dtypes):
    """Print binaries per operator; return 1 if the number of one grows with the number of rows."""
    console = Console(highlight=False, width=200)
    further = FURTHER[::4] if quick else FURTHER
    header = [f"M = {rows}" for rows in ROW_COUNTS]
    header[1:] = [f"and {rows}" for rows in ROW_COUNTS[1:]]
    table = Table(
        "operator, both ways", "dtype", "launches", *header, f"and {len(further)} more", "by values"
    )
    torch.utils.deterministic.fill_uninitialized_memory = False  # of this process
    grows, every = [], [replace(each, words=WORDS) for each in (LARGE, SMALL, MIXTURE)]
    for dtype in (torch.bfloat16, torch.float32):
        found = count("sm_90", every, dtype, ROW_COUNTS + further)
        grows += growing(found, len(ROW_COUNTS))
        for operator, (launches, totals, written) in found.items():
            shown = [*totals[: len(ROW_COUNTS)], totals[-1], totals[-1] - written]
            table.add_row(operator, SHORT[dtype], str(launches), *map(str, shown))
    console.print(table)
    console.print(
        f"binaries for sm_90 at the sizes of {', '.join(each.name for each in every)} and {WORDS:,} words; the"
        f" {len(further)} further numbers of rows are {', '.join(map(str, further))}; {len(grows)} operators grow with"
        f" them; at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory"
    )
    for line in grows:
        console.print(f"grows: {line}")
    return int(bool(grows))
