"""Run a script in fresh processes that record what it computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from isobit.comparing.runs import observed_run
from isobit.comparing.runs.compare import compare_records
from isobit.comparing.runs.fixes import FILES, HASH, IN_WORDS, SEED, THREADS, TIME, VARIABLES
from isobit.comparing.runs.report import (
    EMPTY,
    OPERATOR,
    OUTSIDE,
    PATH,
    RANDOM,
    SCALAR,
    SLICE,
    Cause,
    Comparison,
    Report,
)
from isobit.errors import ArgumentError
from isobit.foundation.script_process import command, last_lines

# Run a script in fresh processes that record what it computes.

POLL = 0.1  # seconds
OTHERWISE = "run it with python first; arguments after -- are passed to the script"
REMEDIES = (  # what a script last wrote, and what helps
    (
        re.compile(r"\b(LOCAL_)?(RANK|WORLD_SIZE)\b|\bMASTER_(ADDR|PORT)\b"),
        "start it as torchrun's only rank: env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 "
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 isobit compare runs …",
    ),
    (
        re.compile(
            r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|Torch not compiled with XPU"
        ),
        "pass --device cuda (or xpu, npu): the CPU then serves the device that the script names",
    ),
)


@dataclass(frozen=True)
class Job:
    """A script, its arguments, where its records are written, and the device that it finds: see `run_twice`."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    device: str = "cpu"
    python: str = sys.executable


def run_once(
    job: Job,
    name: str,
    steps: int,
    fixes: Sequence[str] = (),
    began: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Run the script in a fresh process, with the caller's environment, and return its record.

    Args:
        job: The script.
        name: Of the run; it names the record.
        steps: Optimizer steps after which the run ends.
        fixes: Suspects to fix, by name.
        began: When the first run began; files that changed since are reported when they are read.
        progress: Called with the number of steps done, now and then.

    Returns:
        The path of the record.

    Raises:
        ArgumentError: If the script fails.
    """
    record, told = job.folder / f"{name}.jsonl", job.folder / f"{name}.progress"
    request = observed_run.Request(
        steps=steps,
        device=job.device,
        record=str(record.resolve()),
        progress=str(told.resolve()),
        fixes=list(fixes),
        began=began or time.time(),
    )
    call = command(
        f"{observed_run.__name__}:main",
        json.dumps(asdict(request)),
        job.script,
        job.arguments,
        variables=[f"{k}={v}" for fix in fixes for k, v in VARIABLES.get(fix, {}).items()],
        python=job.python,
    )
    written = job.folder / f"{name}.output"
    with open(written, "wb") as output:
        process = subprocess.Popen(
            call, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            watch(process, told, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise failed(job, process.returncode, last_lines(written))
    return record


def watch(
    process: subprocess.Popen[bytes], told: Path, progress: Callable[[int], None] | None
) -> None:
    """Wait for a run, and pass on how many steps it has done."""
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
        with suppress(OSError, ValueError):
            if progress is not None:
                progress(int(told.read_text()))


def failed(job: Job, code: int, lines: str) -> ArgumentError:
    """Return the error for a script that failed, with the end of what it wrote."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ArgumentError(
        expected="a script that runs",
        received=f"{how} of {job.script}" + (f", after:\n{lines}" if lines else ""),
        remedy=next((r for what, r in REMEDIES if what.search(lines)), OTHERWISE),
    )


# Find out why two runs differ: what both runs knew, and runs with one suspect fixed.

# Which suspects could explain an origin, the likeliest first.
SUSPECTS = {
    RANDOM: (SEED, TIME, HASH),
    OUTSIDE: (SEED, HASH, TIME, THREADS),
    SCALAR: (SEED, TIME, HASH, THREADS),
    SLICE: (SEED, HASH, TIME, THREADS),
    OPERATOR: (THREADS,),
    EMPTY: (),
    PATH: (SEED, HASH, TIME, THREADS),
    "": (SEED, HASH, TIME, THREADS),
}


@dataclass
class Trials:
    """What runs with suspects fixed showed.

    Attributes:
        explained: suspects that had to be fixed until two runs were equal, in that order.
        equal: whether they were equal in the end.
        tried: what each trial showed, by suspect.
        runs: how many runs it took.
    """

    explained: list[str] = field(default_factory=list)
    equal: bool = False
    tried: dict[str, str] = field(default_factory=dict)
    runs: int = 0


def try_fixes(job: Job, found: Comparison, progress: Callable[[str], None]) -> Trials:
    """Run pairs with one suspect fixed; keep a fix that makes them equal or moves the difference to a later call."""
    trials = Trials()
    steps = found.changed.step + 1 if found.changed else 1
    furthest = place_of(found)
    if found.evidence[1].get("files"):  # these files are there now, for every run
        again = run_pair(job, trials, steps, [FILES], progress)
        if again is not None and again.equal:
            trials.explained, trials.equal = [FILES], True
            return trials
    for fix in suspects_of(found):
        again = run_pair(job, trials, steps, [*trials.explained, fix], progress)
        if again is None:
            continue
        if again.equal:
            trials.explained.append(fix)
            trials.equal = True
            break
        if place_of(again) > furthest:
            furthest = place_of(again)
            trials.explained.append(fix)
            trials.tried[fix] = (
                f"with {IN_WORDS[fix]}, the runs first differ later: {again.changed}"
            )
    return trials


def run_pair(
    job: Job, trials: Trials, steps: int, fixes: list[str], progress: Callable[[str], None]
) -> Comparison | None:
    """Run a pair with suspects fixed, and a third run if the pair is equal, since that may be chance."""
    words = " and ".join(IN_WORDS[fix] for fix in fixes)
    progress(f"with {words}")
    try:
        records = [run_once(job, f"fixed{i}", steps, fixes) for i in (1, 2)]
        again = compare_records(*records)
        trials.runs += 2
        if again.equal:
            again = compare_records(records[0], run_once(job, "fixed3", steps, fixes))
            trials.runs += 1
    except ArgumentError as error:
        trials.tried[fixes[-1]] = f"the script fails with {words}: {error.received[:200]}"
        return None
    shown = "three runs are equal" if again.equal else "runs still differ"
    trials.tried[fixes[-1]] = f"with {words}, {shown}"
    return again


def place_of(found: Comparison) -> tuple[int, int]:
    """Return where two runs first differ: the step, and the number of the call."""
    return (found.changed.step if found.changed else 0, call_number(found))


def call_number(found: Comparison) -> int:
    """Return the number of the call that a difference comes from."""
    return found.origin.call.number if found.origin else sys.maxsize


def suspects_of(found: Comparison) -> Sequence[str]:
    """Return what could explain a difference, leaving out what both runs had fixed already."""
    left = found.evidence[0]
    why = found.origin.why if found.origin else ""
    listed = list(SUSPECTS[why])
    if SEED in listed and not generators_used(found):
        listed.remove(SEED)  # generators of the script's own could still be the cause
        listed.append(SEED)
    if left.get("hash_seed", "random") != "random" and HASH in listed:
        listed.remove(HASH)
    if left.get("threads") == 1 and THREADS in listed:
        listed.remove(THREADS)
    return listed


def generators_used(found: Comparison) -> list[str]:
    """Return the global generators whose states differ between the runs, and that were drawn from."""
    left, right = found.evidence
    start, now = left.get("rng_at_start") or {}, left.get("rng_at_loss") or left.get("rng") or {}
    others = right.get("rng_at_loss") or right.get("rng") or {}
    return [n for n, state in now.items() if state != others.get(n) and state != start.get(n)]


def judge_causes(found: Comparison, trials: Trials) -> list[Cause]:
    """Return every usual cause with whether it applies, and what shows it."""
    return [
        judge_seed(found, trials),
        judge_data(found, trials),
        judge_trial("time or process number", TIME, trials),
        judge_threads(found, trials),
        judge_environment(found),
        judge_files(found, trials),
        judge_operator(found, trials),
        judge_memory(found),
    ]


def judge_trial(name: str, fix: str, trials: Trials, otherwise: str = "not suspected") -> Cause:
    """Return a cause that a trial shows or excludes."""
    if fix in trials.explained:
        return Cause(name, True, trials.tried[fix])
    if fix in trials.tried:
        return Cause(name, None if "fails" in trials.tried[fix] else False, trials.tried[fix])
    return Cause(name, False, otherwise)


def judge_seed(found: Comparison, trials: Trials) -> Cause:
    """Return whether a random number generator is not seeded."""
    used = generators_used(found)
    states = f"the script draws from {', '.join(used)}, with states that differ" if used else ""
    cause = judge_trial("seed not set", SEED, trials, "no generator that was drawn from differs")
    drew = found.origin is not None and found.origin.why == RANDOM and not trials.explained
    if cause.applies or drew:
        shown = [states or "an operator draws from a generator that differs" if drew else states]
        return Cause(cause.name, True, "; ".join(filter(None, (*shown, trials.tried.get(SEED)))))
    if used and SEED not in trials.tried:
        return Cause(cause.name, None, states)
    return cause


def judge_data(found: Comparison, trials: Trials) -> Cause:
    """Return whether data come in another order: rows of a batch, or what hashes order."""
    origin = found.origin
    rows = "a batch has the same rows in another order" if origin and origin.same_rows else ""
    if HASH in trials.explained:
        return Cause("data order", True, "; ".join(filter(None, (rows, trials.tried[HASH]))))
    if rows:
        return Cause("data order", True, rows)
    return judge_trial("data order", HASH, trials)


def judge_threads(found: Comparison, trials: Trials) -> Cause:
    """Return whether the number of threads, or a race between them, decides."""
    counts = [e.get("threads") for e in found.evidence]
    if counts[0] != counts[1]:
        return Cause("threads", True, f"torch uses {counts[0]} threads, then {counts[1]}")
    why = f"both runs use {counts[0]} threads" if counts[0] != 1 else "both runs use one thread"
    return judge_trial("threads", THREADS, trials, why)


def judge_environment(found: Comparison) -> Cause:
    """Return whether variables or versions of packages differ."""
    left, right = found.evidence
    differ = []
    for key in ("variables", "versions"):
        ours, others = left.get(key, {}), right.get(key, {})
        differ += sorted(n for n in {*ours, *others} if ours.get(n) != others.get(n))
    if differ:
        return Cause("environment", True, f"these differ: {', '.join(differ[:10])}")
    counts = (
        f"{len(left.get('variables', {}))} variables and {len(left.get('versions', {}))} versions"
    )
    return Cause("environment", False, f"{counts} are equal")


def judge_files(found: Comparison, trials: Trials) -> Cause:
    """Return whether the second run read what the first one left behind."""
    paths, name = found.evidence[1].get("files", []), "files of the first run"
    if not paths:
        return Cause(name, False, "the second run read none")
    read = f"the second run read {', '.join(paths[:5])}"
    if FILES not in trials.tried:
        return Cause(name, None, read)
    return Cause(name, FILES in trials.explained, f"{read}; {trials.tried[FILES]}")


def judge_operator(found: Comparison, trials: Trials) -> Cause:
    """Return whether an operator gives different results for equal inputs."""
    if found.origin is None or found.origin.why != OPERATOR:
        return Cause(
            "operator that is not repeatable", False, "no operator with equal inputs differs first"
        )
    return Cause(
        "operator that is not repeatable", True, f"{found.origin.call}: {found.origin.detail}"
    )


def judge_memory(found: Comparison) -> Cause:
    """Return whether an operator reads memory that nobody wrote."""
    if found.origin is None or found.origin.why != EMPTY:
        return Cause("memory that was never written", False, "no operator reads such memory first")
    return Cause(
        "memory that was never written", True, f"{found.origin.call}: {found.origin.detail}"
    )


def run_twice(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = 5,
    causes: bool = True,
    device: str = "cpu",
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """Run a script twice in fresh processes and compare what it computes, bit for bit.

    Args:
        script: A Python script that trains with an optimizer of torch.optim.
        arguments: Its command line.
        steps: Optimizer steps after which each run ends.
        causes: If the runs differ, run the script again with one suspect fixed at a time.
        device: The kind of device that the CPU serves, with torchrun's variables for one rank: "cuda", "xpu" or "npu";
            "auto" for the kind that the script names if this machine lacks it, "cpu" for none.
        progress: Called with what is running and the number of steps done.

    Returns:
        The first difference, where it comes from, and which of the usual causes apply.

    Raises:
        ArgumentError: If the script fails or takes no optimizer step.
    """
    began = time.time()
    tell = progress or (lambda what, done: None)
    with tempfile.TemporaryDirectory(prefix="isobit-twice-") as folder:
        job = Job(script.resolve(), tuple(arguments), Path(folder), device)
        records = [
            run_once(job, name, steps, began=began, progress=partial(tell, f"{name} run"))
            for name in ("first", "second")
        ]
        found = compare_records(*records)
        refuse_nothing(script, found)
        trials = Trials()
        if causes and not found.equal:
            trials = try_fixes(job, found, lambda what: tell(what, 0))
    judged = () if found.equal else tuple(judge_causes(found, trials))
    shown = str(script), tuple(arguments)
    served = found.evidence[0].get("served", "")
    return Report(*shown, found, judged, 2 + trials.runs, time.time() - began, served)


def refuse_nothing(script: Path, found: Comparison) -> None:
    """Raise if no optimizer step was seen: zero comparisons are not a pass."""
    if max(found.steps) == 0:
        raise ArgumentError(
            expected="a script that takes optimizer steps",
            received=f"no step of a torch.optim optimizer, and {found.operators:,} operators, in {script}",
            remedy="name the script that trains, in one process; arguments after -- are passed to the script",
        )
