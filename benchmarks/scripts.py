"""Torchrun scripts of tests/simulator/scripts, unmodified: in the simulator on 2, 8 and 64 ranks, and with gloo.

Results of each script are kept (kept.py), so that a run that was stopped goes on.
"""

import logging
import re
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kept import SIMULATOR, Kept
from isobit.simulator.program.script import Script
from isobit.simulator.sweep import Plan, run_seed
from tests.simulator.script_cases import (
    CASES,
    FOLDER,
    ScriptFailed,
    losses_in,
    run_with_gloo,
    words_of,
)

SOURCES = (*SIMULATOR, "tests/simulator/scripts", "tests/simulator/script_cases.py")
PROCESSES = (
    2  # with gloo: a sum of two has one order, so that losses may be compared digit by digit
)


def run(quick, threads, dtypes):
    """Prints a table; the exit code is the number of scripts that failed or whose losses differ."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(highlight=False, width=180)
    sizes = (8,) if quick else (8, 64)
    table = Table("script", "pattern", *(f"{n} ranks, CPU s" for n in sizes), "last loss", "gloo")
    clean, compared, same, seconds = 0, 0, 0, 0.0
    kept = Kept("scripts", SOURCES)
    for name, case in CASES.items():
        runs = [
            kept.result(f"{name} {ranks}", partial(time_ranks, name, ranks), lambda run: not run[0])
            for ranks in sizes
        ]
        cells = [", ".join(found) or f"{took:.1f}" for found, _, took in runs]
        clean += sum(not found for found, _, _ in runs)
        seconds += sum(took for _, _, took in runs)
        losses = runs[-1][1]
        answer, equal = kept.result(
            f"{name} gloo", partial(compare_with_gloo, name), lambda found: found[1]
        )
        compared, same = compared + (case.gloo is not None), same + equal
        print(name, *cells, answer, file=sys.stderr, flush=True)
        table.add_row(name, case.title, *cells, f"{losses[-1]:.5f}" if losses else "", answer)
    console.print(table)
    total = len(CASES) * len(sizes)
    console.print(f"{len(CASES)} scripts: {clean} of {total} runs complete without a finding")
    console.print(f"gloo, {PROCESSES} processes: losses equal in {same} of {compared} scripts")
    console.print(f"{seconds:.0f} s of one core, without gloo and what is compared with it")
    return (total - clean) + (compared - same)


def time_ranks(name, ranks):
    """Return what `simulate` does, and the processor time that it takes."""
    begun = time.process_time()
    found, losses = simulate(name, ranks)
    return found, losses, time.process_time() - begun


def compare_with_gloo(name):
    """Return in words how the losses of two processes compare with those of two ranks, and whether they are equal."""
    if CASES[name].gloo is None:
        return "not run: it asks for GPUs", False
    try:
        with tempfile.TemporaryDirectory() as folder:
            real = losses_in(run_with_gloo(name, PROCESSES, Path(folder)))
    except ScriptFailed as failure:
        print(failure, file=sys.stderr)
        return f"failed: {reason_in(str(failure))}", False
    found, ours = simulate(name, PROCESSES)
    if ours == real and real and not found:
        return f"{len(real)} losses equal", True
    return f"{real or 'no loss'} against {found or ours}", False


def reason_in(errors):
    """Return the line that names a Python error, or the first line."""
    named = re.search(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", errors, re.M)
    return (named[1] if named else errors.strip().split("\n")[0])[:80]


def simulate(name, ranks):
    """Return the kinds of findings of one seed, and the losses that rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Script(FOLDER / f"{name}.py", words_of(name, folder))
        done = run_seed(Plan(script, ranks, [0]), 0)
    return [found.kind for found in done.found], losses_in(done.printed[0])
