"""A profile in words and as a self-contained HTML report; from records only, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isobit.foundation.plain_text import one_line
from isobit.foundation.records import ContractStatus, Provenance
from isobit.profiling.records import (
    Account,
    Brick,
    Collective,
    Comparison,
    Finding,
    Profile,
    RankProfile,
)
from isobit.profiling.roofline import STYLE, write_roofline
from isobit.report.markup import escape
from isobit.report.pages import BASE_STYLE, write_document

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
        if any(brick.order for brick in rank.bricks):
            yield (
                f"  by the names of kernels the order of addition depends on: {words_of_orders(rank)}; isobit audit "
                "compares bits"
            )


def words_of_orders(rank: RankProfile) -> str:
    """Return the shares of the time of kernels and collectives by what the order of their sums depends on."""
    found: dict[str, int] = {}
    for brick in rank.bricks:
        if brick.order:
            found[brick.order] = found.get(brick.order, 0) + brick.ns
    total = sum(found.values())
    parts = sorted(found.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {share(ns, total)}" for name, ns in parts)


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


# A profile as a self-contained HTML report: findings, where the steps went per rank, ranks × collectives, bricks.

PAGE_RANKS, PAGE_BRICKS, PAGE_COLLECTIVES, PAGE_FINDINGS = 64, 30, 40, 30
PAGE_STYLE = """
:root{--compute:#3b74b5;--talk:#8a6fb5;--copy:#2f8f8b;--early:#9aa3b2;--loader:#d9631e;--host:#c9941f;--wait:#c4496b;
--none:#c5cad3;--queue:#5f8f3a}
@media (prefers-color-scheme:dark){:root{--compute:#7fb0e3;--talk:#b79be3;--copy:#6cc7c2;--early:#6b7280;
--loader:#f08a4b;--host:#e0b85a;--wait:#ee86a3;--none:#4a5160;--queue:#9ccc72}}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.name{min-width:12rem}td:last-child{min-width:9rem}
.rank{display:grid;grid-template-columns:5.5rem 1fr 6.5rem;gap:.6rem;align-items:center;margin:.2rem 0}
.bar{display:flex;height:1.1rem;border-radius:3px;overflow:hidden;background:#8882}.bar span{display:block}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;list-style:none;font-size:.85rem}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.35rem;vertical-align:-.08rem}
.meter{display:inline-block;width:5rem;height:.6rem;background:#8883;border-radius:3px;overflow:hidden}
.meter b{display:block;height:100%;background:var(--compute)}
.found{border:1px solid #8884;border-left:4px solid var(--bad);border-radius:8px;padding:.5rem .9rem;margin:.6rem 0}
.found.info{border-left-color:var(--mute)}.found p{margin:.15rem 0;overflow-wrap:anywhere}
@media (max-width:560px){.rank{grid-template-columns:1fr auto}.rank .bar{grid-column:1/-1;grid-row:2}}
"""
BODY = """<p class="verdict {tone}">{verdict}</p>
<h2>What costs time</h2>{findings}
<h2>Where the steps went</h2><p class="mute">Each bar is all steps of a rank; its parts add up to them to the
nanosecond.</p>{ranks}
{collectives}
<h2>Bricks of rank {rank}</h2><p class="mute">{bounds}</p>{roofline}{bricks}
{blocks}{notes}"""
COLOURS = {
    "compute": "compute",
    "exposed communication": "talk",
    "exposed copies": "copy",
    "work from before the trace": "early",
    "idle: data loader": "loader",
    "idle: host waits for the device": "wait",
    "idle: launched, not started": "queue",
    "idle: nothing recorded": "none",
}


# Reasons of the host share a colour, in shades.
SHADES = {
    "idle: host in Python": 0.8,
    "idle: host in launch calls": 0.6,
    "idle: host in the optimizer": 0.45,
}


def colour(cause: str) -> str:
    """Return the style of a cause."""
    shade = f";opacity:{SHADES[cause]}" if cause in SHADES else ""
    return f"var(--{COLOURS.get(cause, 'host')}){shade}"


def write_profile_page(profile: Profile, origin: Provenance | None = None) -> str:
    """Return the report of one profile."""
    first = profile.ranks[0]
    notes = [f"rank {rank.rank}: {note}" for rank in profile.ranks for note in rank.notes]
    notes += [
        f"rank {rank.rank}: {milliseconds(rank.outside)} ms of device work are outside of every step"
        for rank in profile.ranks
        if rank.outside
    ]
    items = "".join(f"<li>{escape(note)}" for note in (*profile.notes, *notes))
    verdict = (
        f"{many(len(profile.findings), 'finding')}; {len(profile.ranks)} of {many(profile.world, 'rank')}, "
        f"{first.device}, {many(len(first.steps), 'step')} of "
        f"{milliseconds(first.whole.total / len(first.steps))} ms on average"
    )
    body = BODY.format(
        tone="bad" if profile.exit_code else "good",
        verdict=escape(verdict),
        findings="".join(map(write_finding, profile.findings[:PAGE_FINDINGS])) or "<p>Nothing.</p>",
        ranks=write_ranks(profile),
        collectives=write_collectives(profile),
        rank=first.rank,
        bounds=escape(words_of_bounds(profile)),
        roofline=write_roofline(first),
        bricks=write_bricks(first.bricks, first.device_time),
        blocks=write_blocks(profile),
        notes=f"<h2>Notes</h2><ul>{items}</ul>" if items else "",
    )
    return write_document(
        f"Profile of {first.name}"
        if len(profile.ranks) == 1
        else f"Profile of {len(profile.ranks)} ranks",
        BASE_STYLE + PAGE_STYLE + STYLE,
        body,
        origin,
    )


def write_finding(one: Finding) -> str:
    """Return the box of one finding."""
    cost = f"{milliseconds(one.ns)} ms, {one.share:.1%} ({one.cost})"
    if not one.ns:
        cost = f"costs no time; {one.share:.1%} of the device time"
    evidence = "; ".join(f"{piece.name}: {milliseconds(piece.ns)} ms" for piece in one.evidence)
    shown = f'<p class="mute">longest: {escape(evidence)}</p>' if evidence else ""
    return (
        f'<div class="found {one.severity}"><p><b>{escape(one.rule)}</b>, rank {one.rank}: {escape(cost)}</p>'
        f"<p>{escape(one.detail)}</p>{shown}<p>{escape(one.remedy)}</p></div>"
    )


def write_ranks(profile: Profile) -> str:
    """Return a bar per rank, as long as its steps, and the key of the colours."""
    longest = max(rank.whole.total for rank in profile.ranks)
    sums: dict[str, int] = {}
    for rank in profile.ranks:
        for cause, ns in rank.whole.parts.items():
            sums[cause] = sums.get(cause, 0) + ns
    total = sum(sums.values())
    order = sorted(sums, key=lambda cause: -sums[cause])  # one for all ranks, to compare them
    rows = "".join(
        f'<div class="rank"><span>rank {rank.rank}</span>{write_bar(rank.whole, longest, order)}'
        f"<span>{milliseconds(rank.whole.total)} ms</span></div>"
        for rank in profile.ranks[:PAGE_RANKS]
    )
    key = "".join(
        f'<li><i style="background:{colour(cause)}"></i>{escape(cause)} {share(ns, total)}'
        for cause, ns in ((cause, sums[cause]) for cause in order)
    )
    more = len(profile.ranks) - PAGE_RANKS
    rest = f"<p>… and {many(more, 'more rank')}</p>" if more > 0 else ""
    return f'{rows}{rest}<ul class="key">{key}</ul>'


def write_bar(account: Account, longest: int, order: Sequence[str]) -> str:
    """Return the bar of one account."""
    parts = [(cause, account.parts[cause]) for cause in order if cause in account.parts]
    spans = "".join(
        f'<span style="width:{100 * ns / longest:.3f}%;background:{colour(cause)}" '
        f'title="{escape(cause)}: {milliseconds(ns)} ms, {share(ns, account.total)}"></span>'
        for cause, ns in parts
    )
    return f'<div class="bar" role="img" aria-label="parts of the steps">{spans}</div>'


def write_collectives(profile: Profile) -> str:
    """Return the table of collectives: who was last, how long the others waited, and why."""
    found = profile.collectives
    if not found:
        return ""
    waiting = sum(one.waiting for one in found)
    total = waiting + sum(one.moving for one in found)
    rows = "".join(
        map(write_collective, sorted(found, key=lambda one: -one.waiting)[:PAGE_COLLECTIVES])
    )
    more = len(found) - PAGE_COLLECTIVES
    rest = f"<p>… and {many(more, 'more collective')}</p>" if more > 0 else ""
    return (
        f"<h2>Ranks and collectives</h2><p>{escape(many(len(found), 'collective'))}: {share(waiting, total)} of their "
        f"time waits for the last rank, {share(total - waiting, total)} comes after all have arrived.</p>"
        '<div class="wide"><table><tr><th>collective<th class="number">last rank<th class="number">longest wait, ms'
        '<th class="number">moving, ms<th class="number">late, ms<th>why, against the median rank; the parts add up'
        f"{rows}</table></div>{rest}"
    )


def write_collective(one: Collective) -> str:
    """Return the row of one collective."""
    parts = "; ".join(
        f"{cause} {milliseconds(ns)}"
        for cause, ns in list(one.lateness.parts.items())[:3]
        if ns > 0
    )
    return (
        f'<tr><td class="name">{one.number} {escape(one.name)} <span class="mute">{escape(one.detail)}</span>'
        f'<td class="number">{one.last}<td class="number">{milliseconds(max(one.waits.values()))}'
        f'<td class="number">{milliseconds(max(one.moves.values()))}'
        f'<td class="number">{milliseconds(one.lateness.ns)}<td>{escape(parts)}'
    )


def words_of_bounds(profile: Profile) -> str:
    """Say for how much time a bound is known, and by which rates."""
    first = profile.ranks[0]
    unknown = first.device_time - first.bounded_time
    text = f"No bound is known for {share(unknown, first.device_time)} of {milliseconds(first.device_time)} ms of work."
    return f"{text} Peak rates: {first.peaks}." if first.peaks else text


def write_bricks(bricks: tuple[Brick, ...], total: int) -> str:
    """Return the table of the longest bricks."""
    shown = [brick for brick in bricks if brick.kind != "earlier"]
    rows = "".join(write_brick(brick, total) for brick in shown[:PAGE_BRICKS])
    more = len(shown) - PAGE_BRICKS
    rest = f"<p>… and {many(more, 'more brick')}; --json has all</p>" if more > 0 else ""
    return (
        '<div class="wide"><table><tr><th>brick<th class="number">calls<th class="number">ms<th class="number">of the '
        f"work<th>of its bound<th>order by<th>mostly in{rows}</table></div>{rest}"
    )


def write_brick(brick: Brick, total: int) -> str:
    """Return the row of one brick."""
    of_bound = brick.of_bound
    if of_bound is not None:
        meter = f'<span class="meter"><b style="width:{100 * min(of_bound, 1):.1f}%"></b></span>'
        bound = f"{meter} {of_bound:.0%}, {escape(brick.bound_by)}"
    else:
        words = "data in the cache" if brick.bound_by == "cache" else "no bound known"
        bound = f'<span class="mute">{words}</span>'
    shapes = escape(" ".join(filter(None, (brick.shapes, brick.dtypes))))
    order = f'<span style="white-space:nowrap" title="{escape(brick.order_words)}">{escape(brick.order)}</span>'
    return (
        f'<tr><td class="name">{escape(brick.operator)} <span class="mute">{shapes}</span>'
        f'<td class="number">{brick.calls:,}<td class="number">{milliseconds(brick.ns)}'
        f'<td class="number">{share(brick.ns, total)}<td>{bound}<td>{order}<td>{escape(brick.module)}'
    )


def write_blocks(profile: Profile) -> str:
    """Return the table of blocks, if modules were recorded."""
    blocks = profile.ranks[0].blocks
    if not blocks:
        return ""
    rows = "".join(
        f'<tr><td class="name">{escape(block.name)}<td class="number">{milliseconds(block.forward)}'
        f'<td class="number">{milliseconds(block.backward)}'
        for block in blocks
    )
    return (
        '<h2>Blocks</h2><div class="wide"><table><tr><th>block<th class="number">forward, ms<th class="number">'
        f"backward, ms{rows}</table></div>"
    )
