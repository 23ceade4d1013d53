"""Find out why two runs differ: what both runs knew, and runs with one suspect fixed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isobit.comparing.runs.compare import compare_records
from isobit.comparing.runs.fixes_by_name import FILES, HASH, IN_WORDS, SEED, THREADS, TIME
from isobit.comparing.runs.launch import Job, run_once
from isobit.comparing.runs.records import (
    EMPTY,
    OPERATOR,
    OUTSIDE,
    PATH,
    RANDOM,
    SCALAR,
    SLICE,
    Cause,
    Comparison,
)
from isobit.errors import ArgumentError

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
