"""The tensor-core leaves against mmasim, bit for bit, for each instruction that Triton emits."""

import time

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.leaf_cases import INSTRUCTIONS, KINDS, ROWS, computed, draw, expected

OUTPUTS = 1_000_000
TILES = 40  # at once: what stays in memory


def run(quick, threads, dtypes):
    """Compare at least a million outputs an instruction, or 20,000 with --quick."""
    console = Console(highlight=False, width=140)
    table = Table(
        "target", "instruction", "engine", "outputs", "subnormal", "±0", "±inf", "NaN", "differ"
    )
    wrong = total = 0
    started = time.perf_counter()
    for instruction in track(INSTRUCTIONS, console=Console(stderr=True), transient=True):
        counts = compare(instruction, 20_000 if quick else OUTPUTS)
        wrong, total = wrong + counts["differ"], total + counts["outputs"]
        table.add_row(
            instruction.target,
            instruction.name,
            instruction.engine,
            *(
                f"{counts[name]:,}"
                for name in ("outputs", "subnormal", "zero", "infinite", "nan", "differ")
            ),
        )
    console.print(table)
    seconds = time.perf_counter() - started
    console.print(f"{wrong:,} of {total:,} outputs differ from mmasim ({seconds:.0f} s)")
    return int(wrong > 0 or total == 0)


def compare(instruction, outputs, seed=0):
    """Count the outputs that differ, and what they were."""
    model = instruction.model()
    generator = np.random.default_rng(seed)
    counts = dict.fromkeys(("outputs", "subnormal", "zero", "infinite", "nan", "differ"), 0)
    for kind in KINDS:
        tiles = -(-outputs // (len(KINDS) * ROWS * ROWS))
        for at in range(0, tiles, TILES):
            a, b, c = draw(instruction, model.k, kind, min(TILES, tiles - at), generator)
            want = expected(model, instruction, a, b, c)
            size = want & 0x7FFFFFFF
            counts["outputs"] += want.size
            counts["subnormal"] += int(((size > 0) & (size < 0x800000)).sum())
            counts["zero"] += int((size == 0).sum())
            counts["infinite"] += int((size == 0x7F800000).sum())
            counts["nan"] += int((size > 0x7F800000).sum())
            counts["differ"] += int((want != computed(instruction, a, b, c)).sum())
    return counts
