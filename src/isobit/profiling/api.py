"""Profile the traces of one run, and compare two profiles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from isobit.errors import ArgumentError
from isobit.profiling.account import Books, covered, union
from isobit.profiling.bounds import machine_of
from isobit.profiling.bricks import blocks_of, bricks_of
from isobit.profiling.collectives import Replay, blamed, causes_of, judge, match
from isobit.profiling.findings import find_all
from isobit.profiling.order_names import tile_of
from isobit.profiling.records import Account, Comparison, CoreTime, Profile, RankProfile, Row
from isobit.profiling.trace import Step, Trace, core_times_of, read_traces, steps_of

# Compare two profiles brick by brick; the differences add up to the difference of the step,
# exactly.
#
# Every nanosecond of a step belongs to one brick or to one reason of idle time (`Brick.wall`), so
# what two runs differ in is the sum of what their bricks differ in. Runs with other numbers of
# steps are compared per step: all sums are of integers, multiplied by the other run's number of
# steps.

BUSY = 0.02  # of the steps without a core, above which a note says so
PRODUCT = re.compile(r"gemm|^Cijk_|nvjet|cutlass|wmma|gemv", re.I)


def compare_profiles(left: Profile, right: Profile) -> Comparison:
    """Compare the first ranks of two profiles; the rows are by the size of their difference, the largest first."""
    before, after = left.ranks[0], right.ranks[0]
    sides = walls_of(before), walls_of(after)
    steps = len(before.steps), len(after.steps)
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        walls = tuple(side.get(key, (0, 0, ())) for side in sides)
        if walls[0][0] or walls[1][0]:
            rows.append(Row(*key, *walls[0], *walls[1]))
    rows.sort(key=lambda row: -abs(row.right * steps[0] - row.left * steps[1]))
    return Comparison(
        names=(before.name, after.name),
        digests=(before.digest, after.digest),
        devices=(before.device, after.device),
        steps=steps,
        totals=(before.whole.total, after.whole.total),
        rows=tuple(rows),
        notes=tuple(notes_of(left, right)),
    )


def walls_of(
    rank: RankProfile,
) -> dict[tuple[str, str, str, str], tuple[int, int, tuple[str, ...]]]:
    """Return time of the steps, calls and kernels by brick, and time by reason of idle time."""
    found = {
        (brick.kind, brick.operator, brick.shapes, brick.dtypes): (
            brick.wall,
            brick.calls,
            brick.kernels,
        )
        for brick in rank.bricks
    }
    for cause, ns in rank.whole.parts.items():
        if cause.startswith("idle: "):
            found["idle", cause.removeprefix("idle: "), "", ""] = (ns, 0, ())
    return found


def notes_of(left: Profile, right: Profile) -> list[str]:
    """Say what the comparison leaves out, and whether products use other kernels."""
    notes = [
        f"of the {side} run rank {profile.ranks[0].rank} is compared, of {len(profile.ranks)} ranks"
        for side, profile in (("first", left), ("second", right))
        if len(profile.ranks) > 1
    ]
    before, after = product_kernels(left.ranks[0]), product_kernels(right.ranks[0])
    if before - after and after:
        notes.append(
            f"{len(before - after)} of {len(before)} kernels of matrix products in A are not in B, which has "
            f"{len(after)}: "
            "they may add in a different order, so that bits differ; isobit audit compares them"
        )
    tiles = {tile_of(name) for name in before} - {""}, {tile_of(name) for name in after} - {""}
    if tiles[0] and tiles[1] and tiles[0] != tiles[1]:
        notes.append(
            f"tiles of matrix products: {name_tiles(tiles[0] - tiles[1])} only in A, {name_tiles(tiles[1] - tiles[0])} "
            f"only in B, {len(tiles[0] & tiles[1])} in both; the tile decides how a sum is cut"
        )
    return notes


def name_tiles(tiles: set[str]) -> str:
    """Return up to six tiles as text."""
    shown = sorted(tiles)[:6]
    more = f" and {len(tiles) - len(shown)} more" if len(tiles) > len(shown) else ""
    return (", ".join(shown) or "none") + more


def product_kernels(rank: RankProfile) -> set[str]:
    """Return the names of a rank's kernels of matrix products."""
    return {name for brick in rank.bricks for name in brick.kernels if PRODUCT.search(name)}


def profile(paths: Iterable[str | Path]) -> Profile:
    """Account for every nanosecond of every step in the traces of one run.

    Args:
        paths: Traces of torch.profiler, one per rank: Chrome JSON, also gzipped, folders of them, or tar archives.

    Returns:
        Where the time of each rank and step went. The parts of a step add up to it in integer nanoseconds.

    Raises:
        ArgumentError: If a file is no trace, or two traces are of one rank.
        OSError: If a file cannot be read.

    Example:
        >>> from isobit.profiling import profile
        >>> profile(["trace_rank0.json", "trace_rank1.json"]).ranks[1].whole.parts  # doctest: +SKIP
        {'compute': 110421537, 'exposed communication': 64187021, 'idle: data loader': 274010932}
    """
    return profile_traces(read_traces(Path(path) for path in paths))


def compare(left: str | Path, right: str | Path) -> Comparison:
    """Compare two runs brick by brick.

    Args:
        left: A trace, or a folder or archive of the traces of one run.
        right: That of the other run.

    Returns:
        The time of each brick and each reason of idle time in both. Their differences add up to that of the step.

    Raises:
        ArgumentError: If a file is no trace.
        OSError: If a file cannot be read.

    Example:
        >>> from isobit.profiling import compare
        >>> compare("before.json", "after.json").rows[0]  # doctest: +SKIP
        Row(kind='kernel', operator='aten::mm', ...)
    """
    return compare_profiles(profile([left]), profile([right]))


def are_one_run(traces: Sequence[Trace]) -> bool:
    """Whether traces are of different ranks of one world, and so of one run as far as they say."""
    worlds = {trace.world for trace in traces}
    return len({trace.rank for trace in traces}) == len(traces) and len(worlds) == 1


def profile_traces(traces: Sequence[Trace]) -> Profile:
    """Profile traces that were read."""
    traces = in_order(traces)
    world = max(trace.world for trace in traces) or len(traces)
    steps = {trace.rank: steps_of(trace) for trace in traces}
    books = {trace.rank: Books(trace) for trace in traces}
    ranks = tuple(profile_rank(trace, books[trace.rank], steps[trace.rank]) for trace in traces)
    found = with_collectives(Profile(ranks=ranks, world=world), traces, books, steps)
    return replace(found, findings=find_all(found, traces, books, steps))


def with_collectives(
    profile: Profile,
    traces: Sequence[Trace],
    books: dict[int, Books],
    steps: dict[int, tuple[Step, ...]],
) -> Profile:
    """Add what the collectives of all ranks show."""
    matched = match(traces, steps, profile.world)
    if matched is None:
        return profile
    collectives = judge(matched, books, steps)
    waited_for = blamed(collectives)
    apart = [m for m, one in zip(matched.meetings, collectives, strict=True) if one.apart]
    replay = Replay(matched, apart, steps)
    return replace(
        profile,
        collectives=collectives,
        waited_for=waited_for,
        causes={rank: causes_of(collectives, rank) for rank in waited_for},
        savings={rank: replay.saved(rank) for rank in waited_for},
        notes=tuple(matched.notes),
    )


def in_order(traces: Sequence[Trace]) -> list[Trace]:
    """Return traces by rank; each must be of another rank of one world."""
    if not traces:
        raise ArgumentError(
            expected="at least one trace",
            received="none",
            remedy="name a trace or a folder of traces",
        )
    counts = Counter(trace.rank for trace in traces)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        names = [trace.name for trace in traces if trace.rank == twice[0]]
        raise ArgumentError(
            expected="one trace per rank of one run",
            received=f"{counts[twice[0]]} traces of rank {twice[0]}: {', '.join(names[:3])}",
            remedy="name the traces of one recording; a rank is in the trace's distributedInfo, or else in its name "
            "as rank3 or worker3",
        )
    worlds = {trace.world for trace in traces if trace.world}
    if len(worlds) > 1:
        raise ArgumentError(
            expected="traces of one run",
            received=f"traces of runs on {' and '.join(map(str, sorted(worlds)))} ranks",
            remedy="name the traces of one run",
        )
    return sorted(traces, key=lambda trace: trace.rank)


def profile_rank(trace: Trace, books: Books, steps: Sequence[Step]) -> RankProfile:
    """Profile one trace."""
    accounts = tuple(books.account(step) for step in steps)
    machine = None if trace.on_cpu else machine_of(trace.gpu)
    times = core_times_of(trace, steps)
    notes = busy_machine(times, sum(account.total for account in accounts))
    return RankProfile(
        name=trace.name,
        digest=trace.digest,
        rank=trace.rank,
        device="CPU" if trace.on_cpu else trace.gpu or "a GPU without a name",
        whole=Account.of_all(accounts),
        steps=accounts,
        bricks=bricks_of(books, steps),
        blocks=blocks_of(trace, steps),
        peaks=machine.source if machine is not None else "",
        outside=work_outside(trace, steps),
        core_times=times,
        notes=(*trace.notes, *notes),
    )


def busy_machine(times: dict[str, CoreTime], total: int) -> tuple[str, ...]:
    """Say so if the main thread often had no core."""
    waited = sum(time.lost for time in times.values())
    if not times or waited < BUSY * total:
        return ()
    return (
        f"its main thread had no core for {waited / len(times) / 1e6:,.3f} ms of a step: other programs use the "
        "processor, and findings about the host count only what exceeds that; record on an idle machine",
    )


def work_outside(trace: Trace, steps: Sequence[Step]) -> int:
    """Return the nanoseconds of device work outside of every step."""
    busy = union((event.start, event.end) for event in trace.device)
    inside = sum(covered(busy, step.start, step.end) for step in steps)
    return sum(end - start for start, end in busy) - inside
