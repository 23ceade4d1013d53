"""A profile in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from isobit.foundation.plain_text import one_line
from isobit.foundation.records import ContractStatus
from isobit.profiling.records import Account, Comparison, Profile, RankProfile

MOST_RANKS = 3  # the longest; --html and --json have all
MOST_BRICKS = 3
MOST_LATE = 1
MOST_ROWS = 7
MOST_FINDINGS = 3
SMALL_PART = 0.02  # parts below this share are added up as "other"


def lines_of(profile: Profile) -> Iterator[str]:
    """Yield the lines that the command prints."""
    first = profile.ranks[0]
    steps = len(first.steps)
    yield (
        f"{len(profile.ranks)} of {many(profile.world, 'rank')}, {one_line(first.device)}, "
        f"{many(steps, 'step')} of {milliseconds(first.whole.total // steps)} ms on average"
    )
    shown = sorted(profile.ranks, key=lambda rank: -rank.whole.total)[:MOST_RANKS]
    for rank in shown:
        yield f"rank {rank.rank}: {sentence_of(rank.whole)}"
    if len(profile.ranks) > len(shown):
        yield f"… and {many(len(profile.ranks) - len(shown), 'shorter rank')}; --html and --json have all"
    yield from lines_of_ranks(profile)
    yield from lines_of_bricks(first)
    yield from lines_of_findings(profile)
    for rank in shown:
        if rank.outside:
            yield (
                f"note: rank {rank.rank}: {milliseconds(rank.outside)} ms of device work are outside of every step"
            )
        for note in rank.notes:
            yield f"note: rank {rank.rank}: {one_line(note)}"
    for note in profile.notes:
        yield f"note: {one_line(note)}"


def lines_of_budgets(found: ContractStatus) -> Iterator[str]:
    """Yield the verdict of each budget, and of all."""
    for claim in found.claims:
        caught = sum(one.caught for one in claim.planted)
        line = f"{claim.verdict} {one_line(claim.claim)} ({claim.relation}): {claim.inputs:,} matched, "
        line += f"{claim.compared:,} compared, {claim.differing:,} over"
        if claim.planted:
            line += f"; planted: {caught} of {len(claim.planted)} caught"
        yield line
        if claim.detail:
            yield f"  {one_line(claim.detail)}"
        if claim.verdict == "broken" and claim.if_fails:
            yield f"  likely causes: {one_line(claim.if_fails)}"
    kept = sum(claim.verdict == "kept" for claim in found.claims)
    planted = [one for claim in found.claims for one in claim.planted]
    yield (
        f"{found.verdict}: {kept} of {many(len(found.claims), 'budget')} kept; "
        f"planted: {sum(one.caught for one in planted)} of {len(planted)} caught"
    )


def lines_of_comparison(found: Comparison) -> Iterator[str]:
    """Yield the difference of two runs and the bricks that make most of it."""
    left, right = (total / steps for total, steps in zip(found.totals, found.steps, strict=True))
    for letter, name, device, steps, total in zip(
        "AB", found.names, found.devices, found.steps, (left, right), strict=True
    ):
        yield f"{letter} {one_line(name)}, {one_line(device)}, {many(steps, 'step')} of {milliseconds(total)} ms"
    yield f"B - A: {signed(right - left)} ms per step, of which (the rows add up)"
    rest = right - left
    for row in found.rows[:MOST_ROWS]:
        before, after = found.per_step(row)
        rest -= after - before
        words = " ".join(filter(None, (row.kind, one_line(row.operator), row.shapes, row.dtypes)))
        line = f"  {signed(after - before)} ms {words}: {milliseconds(before)} to {milliseconds(after)}"
        if row.left_calls * found.steps[1] != row.right_calls * found.steps[0]:
            line += f", {row.left_calls / found.steps[0]:g} to {row.right_calls / found.steps[1]:g} calls per step"
        if row.left_kernels and row.right_kernels and row.left_kernels[0] != row.right_kernels[0]:
            line += f", {one_line(row.left_kernels[0])} is now {one_line(row.right_kernels[0])}"
        yield line
    if len(found.rows) > MOST_ROWS:
        yield f"  {signed(rest)} ms {many(len(found.rows) - MOST_ROWS, 'more row')}; --json has all"
    for note in found.notes:
        yield f"note: {note}"


def signed(ns: float) -> str:
    """Return nanoseconds as milliseconds with a sign."""
    return f"{ns / 1e6:+,.3f}"


def lines_of_ranks(profile: Profile) -> Iterator[str]:
    """Yield how much of the collectives is waiting, for whom, and why those were late."""
    waiting = sum(one.waiting for one in profile.collectives)
    total = waiting + sum(one.moving for one in profile.collectives)
    if not total:
        return
    yield (
        f"{many(len(profile.collectives), 'collective')}, {milliseconds(total)} ms on all ranks: "
        f"{share(waiting, total)} waits for the last rank, {share(total - waiting, total)} comes after all have arrived"
    )
    for rank, ns in list(profile.waited_for.items())[:MOST_LATE]:
        if ns * 20 < waiting:
            break
        causes = profile.causes[rank]
        late = sum(causes.values())
        words = ", ".join(
            f"{cause} {milliseconds(ns)}" for cause, ns in list(causes.items())[:3] if ns > 0
        )
        line = f"  waited for rank {rank}: {share(ns, waiting)}; late by {milliseconds(late)} ms"
        saved = profile.savings[rank]
        line += f" ({words}, …)" if words else ""
        if saved is not None:
            line += f"; as the other ranks it would save {milliseconds(saved)} ms"
        yield line


def lines_of_findings(profile: Profile) -> Iterator[str]:
    """Yield the costliest findings with their remedies."""
    for one in profile.findings[:MOST_FINDINGS]:
        cost = f"{one.cost} {milliseconds(one.ns)} ms, {one.share:.1%}"
        if not one.ns:
            cost = f"{one.share:.1%} of the device time"
        yield f"{one.severity} {one.rule}, rank {one.rank}: {cost}; {one_line(one.detail)}"
        yield f"  remedy: {one.remedy}"
    more = len(profile.findings) - MOST_FINDINGS
    if more > 0:
        yield f"… and {many(more, 'more finding')}; --html and --json have all"
    if not profile.findings:
        yield "no finding"


def lines_of_bricks(rank: RankProfile) -> Iterator[str]:
    """Yield the longest bricks of a rank, and for how much of its device time a bound is known."""
    total = rank.device_time
    for brick in [one for one in rank.bricks if one.kind != "earlier"][:MOST_BRICKS]:
        of_bound = brick.of_bound
        bound = (
            f"{of_bound:.0%} of the bound by {brick.bound_by}"
            if of_bound is not None
            else "faster than memory: its data were in the cache"
            if brick.bound_by == "cache"
            else "no bound known"
        )
        where = f", mostly in {one_line(brick.module)}" if brick.module else ""
        words = " ".join(filter(None, (one_line(brick.operator), brick.shapes, brick.dtypes)))
        yield (
            f"  {milliseconds(brick.ns)} ms ({share(brick.ns, total)}) {brick.kind} {words}: "
            f"{many(brick.calls, 'call')}, {bound}{where}"
        )
    if total:
        known = rank.bounded_time
        bounds = sum(brick.bound for brick in rank.bricks)
        line = f"  rank {rank.rank}: {many(len(rank.bricks), 'brick')}; no bound is known for "
        line += f"{share(total - known, total)} of {milliseconds(total)} ms of work"
        if known:
            line += f"; the rest runs at {bounds / known:.0%} of its bound"
        yield line


def sentence_of(account: Account) -> str:
    """Return an account as a sum, the largest part first."""
    parts = sorted(account.parts.items(), key=lambda part: -part[1])
    large = [part for part in parts if part[1] >= SMALL_PART * account.total]
    other = account.total - sum(ns for _, ns in large)
    words = [f"{cause} {share(ns, account.total)}" for cause, ns in large]
    if other:
        words.append(f"other {share(other, account.total)}")
    text = f"{milliseconds(account.total)} ms = " + " + ".join(words)
    if account.hidden_communication:
        text += f"; communication behind compute: {milliseconds(account.hidden_communication)} ms"
    return text


def milliseconds(ns: float) -> str:
    """Return nanoseconds as milliseconds."""
    return f"{ns / 1e6:,.3f}"


def share(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{part / whole:.1%}" if whole else "-"


def many(count: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
