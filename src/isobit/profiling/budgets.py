"""Budgets of bricks: a file of claims about a recording, judged on its traces, and written from a good run.

[Note: A budget that can fail]
A claim is judged twice. On the traces it is kept, broken, or vacuous if it matches nothing. Then every limit of it is
judged on a planted copy of the traces in which that limit is exceeded: a copy added, a kernel stretched, a rank
delayed. A claim that does not notice its plant is void: it could not have failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from isobit.contracts.language.grammar import MAX_BYTES, Node, read_yaml
from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.foundation.records import ClaimRecord, ContractStatus, Planted
from isobit.profiling import account as causes
from isobit.profiling import planting
from isobit.profiling.api import in_order, profile_traces
from isobit.profiling.collectives import step_name
from isobit.profiling.records import Brick, Budgets, Claim, Profile
from isobit.profiling.trace import Trace, steps_of
from isobit.profiling.transfers import copies_by_step, unordered

SLACK = 0.1  # what --propose adds to a measurement
SHOWN = 2  # violations that a claim's detail names


class Recording:
    """The traces of one run, and the profile that is made of them when it is first asked for."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = in_order(traces)
        self.made: Profile | None = None

    @property
    def profile(self) -> Profile:
        """Where the time went."""
        if self.made is None:
            self.made = profile_traces(self.traces)
        return self.made


@dataclass(frozen=True)
class Seen:
    """What a claim saw: how much it matched, how much it compared, and each violation in words."""

    matched: int
    compared: int
    violations: tuple[str, ...]
    impossible: str = ""  # why it cannot be judged on these traces


def look_at_transfers(recording: Recording, claim: Claim) -> Seen:
    """Count copies of one direction per step, their bytes, and those of pageable memory."""
    matched, compared, wrong = 0, 0, []
    for trace in recording.traces:
        for name, copies in copies_by_step(trace, claim.where["direction"]).items():
            matched += len(copies)
            compared += len(claim.limits)
            place = f"rank {trace.rank}, {name}"
            most = claim.limits.get("per_step")
            if most is not None and len(copies) > most:
                wrong.append(f"{place}: {len(copies)} copies, at most {most}")
            size, largest = sum(e.size for e in copies), claim.limits.get("bytes_per_step")
            if largest is not None and size > largest:
                wrong.append(f"{place}: {size:,} bytes, at most {largest:,}")
            pageable = sum("Pageable" in e.name for e in copies)
            if claim.limits.get("pinned") and pageable:
                wrong.append(f"{place}: {pageable} copies of pageable memory")
    return Seen(matched, compared, tuple(wrong))


def look_at_synchronisation(recording: Recording, claim: Claim) -> Seen:
    """Require a synchronising call between a kernel of another stream and a copy that was launched after it."""
    matched, wrong = 0, []
    direction = claim.where["direction"]
    for trace in recording.traces:
        copies = [one for found in copies_by_step(trace, direction).values() for one in found]
        matched += sum(copy.launch is not None for copy in copies)
        for copy, kernel in unordered(trace, direction):
            runs = ", which still ran" if kernel.end > copy.start else ""
            wrong.append(
                f"rank {trace.rank}: {copy.name} at {copy.start} ns is not ordered after "
                f"{kernel.name[:60]} of another stream{runs}"
            )
    return Seen(matched, matched, tuple(wrong))


def look_at_bounds(recording: Recording, claim: Claim) -> Seen:
    """Compare the time of bricks with the least that they can take."""
    matched, compared, wrong, without = 0, 0, [], 0
    for rank in recording.profile.ranks:
        found = [brick for brick in rank.bricks if claim.means(brick)]
        known = [brick for brick in found if brick.bound]
        without += len(found) - len(known)
        matched += len(known)
        if known:
            compared += 1
            share = sum(b.bound for b in known) / sum(b.ns for b in known)
            if share < claim.limits["at_least"]:
                wrong.append(
                    f"rank {rank.rank}: {share:.1%} of the bound, at least {claim.limits['at_least']:.1%}"
                )
    if without and not matched:
        return Seen(0, 0, (), f"no bound is known for the {without} bricks that it matches")
    return Seen(matched, compared, tuple(wrong))


def look_at_shares(recording: Recording, claim: Claim) -> Seen:
    """Compare the share of one cause in the steps of each rank."""
    wrong = []
    for rank in recording.profile.ranks:
        share = share_of(rank.whole.parts, claim.where["of"]) / max(rank.whole.total, 1)
        wrong += [
            f"rank {rank.rank}: {share:.2%} of the steps is {claim.where['of']}, {words} {limit:.2%}"
            for key, limit, words, bad in (
                ("at_most", claim.limits.get("at_most"), "at most", share.__gt__),
                ("at_least", claim.limits.get("at_least"), "at least", share.__lt__),
            )
            if limit is not None and bad(limit)
        ]
    ranks = len(recording.profile.ranks)
    return Seen(ranks, ranks * len(claim.limits), tuple(wrong))


def look_at_waiting(recording: Recording, claim: Claim) -> Seen:
    """Compare the share of all ranks' time in which they wait for the last one in collectives."""
    profile = recording.profile
    if not profile.collectives:
        several = profile.world > len(profile.ranks)
        why = f"traces of {len(profile.ranks)} of {profile.world} ranks cannot tell waiting from moving"
        return Seen(0, 0, (), why if several else "")
    apart = [one for one in profile.collectives if one.apart]
    share = sum(one.waiting for one in apart) / sum(rank.whole.total for rank in profile.ranks)
    wrong: tuple[str, ...] = ()
    if share > claim.limits["at_most"]:
        rank = next(iter(profile.waited_for), 0)
        wrong = (f"{share:.2%} waits, most for rank {rank}, at most {claim.limits['at_most']:.2%}",)
    return Seen(len(apart), 1, wrong)


def look_at_counts(recording: Recording, claim: Claim) -> Seen:
    """Count calls of one kind per step."""
    matched, compared, wrong = 0, 0, []
    cause, most = causes.COUNTED[claim.where["of"]], claim.limits["per_step"]
    for trace in recording.traces:
        number = calls_by_step(trace, cause)
        matched += len(trace.host_slices)
        compared += len(number)
        wrong += [
            f"rank {trace.rank}, {name}: {count} {claim.where['of']}, at most {most}"
            for name, count in number.items()
            if count > most
        ]
    return Seen(matched, compared, tuple(wrong))


def calls_by_step(trace: Trace, cause: str) -> dict[str, int]:
    """Return how often the host does something of one kind in each step."""
    steps = steps_of(trace)
    number = dict.fromkeys((step.name for step in steps), 0)
    for event in trace.host_slices:
        if cause in causes.reasons_of(event.kind, event.name, event.loading):
            name = step_name(event, steps)
            if name:
                number[name] += 1
    return number


def look_at_time(recording: Recording, claim: Claim) -> Seen:
    """Compare the time per step of bricks, or of the step itself, in milliseconds."""
    matched, wrong = 0, []
    most = claim.limits["ms_per_step"]
    for rank in recording.profile.ranks:
        if claim.where:
            found = [brick for brick in rank.bricks if claim.means(brick)]
            matched += len(found)
            ns = sum(brick.ns for brick in found)
        else:
            matched, ns = matched + 1, rank.whole.total
        each = ns / len(rank.steps) / 1e6
        if each > most:
            wrong.append(f"rank {rank.rank}: {each:,.3f} ms per step, at most {most:,.3f}")
    return Seen(matched, len(recording.profile.ranks), tuple(wrong))


def share_of(parts: dict[str, int], cause: str) -> int:
    """Return the nanoseconds of a cause; "idle" is all idle time."""
    if cause == "idle":
        return sum(ns for name, ns in parts.items() if name.startswith("idle: "))
    return parts.get(cause, 0)


@dataclass(frozen=True)
class Relation:
    """What a relation takes in `where` and as limits, and how it is judged; every limit has a plant."""

    where: dict[str, bool]  # by key: whether it is required
    limits: dict[str, type]
    look: Callable[[Recording, Claim], Seen]


RELATIONS = {
    "transfers": Relation(
        {"direction": True},
        {"per_step": int, "bytes_per_step": int, "pinned": bool},
        look_at_transfers,
    ),
    "synchronised": Relation({"direction": True}, {}, look_at_synchronisation),
    "of_bound": Relation(
        {"operator": True, "shapes": False, "kind": False}, {"at_least": float}, look_at_bounds
    ),
    "share": Relation({"of": True}, {"at_most": float, "at_least": float}, look_at_shares),
    "waiting": Relation({}, {"at_most": float}, look_at_waiting),
    "count": Relation({"of": True}, {"per_step": int}, look_at_counts),
    "time": Relation(
        {"operator": False, "shapes": False, "kind": False}, {"ms_per_step": float}, look_at_time
    ),
}
SHARES = ("idle", *causes.CAUSES)


def read_budgets(path: Path) -> Budgets:
    """Read a budget file.

    Raises:
        ArgumentError: If a relation, key or limit is not known, or the file has no claim.
        ContractError: If it is no plain YAML.
        OSError: If it cannot be read.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode()
    except ValueError as error:
        raise ArgumentError(
            expected="a budget file in YAML",
            received=f"{path}: {error}",
            remedy="write one with isobit profile TRACE --propose FILE",
        ) from error
    root = read_yaml(text, str(path))
    top = mapping(root, path, {"id": True, "title": False, "claims": True})
    listed = top["claims"].value
    if not isinstance(listed, list) or not listed:
        refuse(path, top["claims"].line, "at least one claim", "none")
    claims = tuple(read_claim(node, path) for node in listed)
    twice = {claim.id for claim in claims if sum(one.id == claim.id for one in claims) > 1}
    if twice:
        refuse(path, top["claims"].line, "each id once", ", ".join(sorted(twice)))
    return Budgets(text_of(top["id"], path), str(path), claims)


def read_claim(node: Node, path: Path) -> Claim:
    """Read one claim: id, relation, where, if_fails, and the relation's limits."""
    given = node.value if isinstance(node.value, dict) else {}
    name = given["relation"].value if "relation" in given else None
    if name not in RELATIONS:
        refuse(path, node.line, f"a relation: {', '.join(RELATIONS)}", repr(name))
    relation = RELATIONS[name]
    keys = {"id": True, "relation": True, "where": False, "if_fails": False}
    found = mapping(node, path, keys | dict.fromkeys(relation.limits, False))
    where = mapping(found["where"], path, relation.where) if "where" in found else {}
    missing = [key for key, needed in relation.where.items() if needed and key not in where]
    if missing:
        refuse(path, node.line, f"where: {{{missing[0]}: …}} of {name}", "none")
    limits = {
        key: limit_of(found[key], kind, path)
        for key, kind in relation.limits.items()
        if key in found
    }
    if relation.limits and not limits:
        refuse(path, node.line, f"a limit of {name}: {', '.join(relation.limits)}", "none")
    chosen = {key: text_of(value, path) for key, value in where.items()}
    known = {"share": SHARES, "count": tuple(causes.COUNTED)}.get(name, ())
    if known and chosen["of"] not in known:
        refuse(path, node.line, f"of: {', '.join(known)}", repr(chosen["of"]))
    why = text_of(found["if_fails"], path) if "if_fails" in found else ""
    return Claim(text_of(found["id"], path), name, chosen, limits, why)


def mapping(node: Node, path: Path, keys: dict[str, bool]) -> dict[str, Node]:
    """Return the entries of a mapping whose keys are all known."""
    if not isinstance(node.value, dict):
        refuse(path, node.line, f"a mapping with {', '.join(keys)}", repr(node.plain())[:60])
    found: dict[str, Node] = node.value
    for key in found:
        if key not in keys:
            refuse(path, found[key].key_line or node.line, f"one of {', '.join(keys)}", repr(key))
    for key, needed in keys.items():
        if needed and key not in found:
            refuse(path, node.line, f"the key {key}", "none")
    return found


def limit_of(node: Node, kind: type, path: Path) -> Any:
    """Read a limit: a number that is not negative, or true."""
    value = node.value
    if kind is bool and value is True:
        return True
    numbers = (int,) if kind is int else (int, float)
    if kind is not bool and type(value) in numbers and 0 <= value < float("inf"):
        return value
    return refuse(
        path, node.line, "true" if kind is bool else "a number that is not negative", repr(value)
    )


def text_of(node: Node, path: Path) -> str:
    """Read a text."""
    if not isinstance(node.value, str) or not node.value.strip():
        refuse(path, node.line, "a text", repr(node.plain())[:60])
    return str(node.value)


def refuse(path: Path, line: int, expected: str, received: str) -> NoReturn:
    """Raise an error that names the line."""
    raise ArgumentError(
        expected=expected,
        received=f"{path}:{line}: {received}",
        remedy="correct the file; isobit profile TRACE --propose FILE writes a valid one",
    )


def judge_budgets(
    budgets: Budgets,
    traces: Sequence[Trace],
    each: Callable[[ClaimRecord], None] = lambda record: None,
) -> ContractStatus:
    """Judge every claim on the traces of one run, and on planted copies of them; `each` is called with every result."""
    recording = Recording(traces)
    claims = []
    for claim in budgets.claims:
        claims.append(judge_claim(claim, recording))
        each(claims[-1])
    worst = next(
        (
            verdict
            for verdict in ("broken", "void", "vacuous", "could-not-run")
            if any(claim.verdict == verdict for claim in claims)
        ),
        "kept",
    )
    return ContractStatus(
        id=budgets.id,
        version="1",
        title="budgets of a recording",
        path=budgets.path,
        digest="+".join(trace.digest[:16] for trace in traces),
        verdict=worst,
        level=2 if worst == "kept" else 1,
        required=2,
        obligations=len(claims),
        claims=tuple(claims),
        subject="trace",
    )


def judge_claim(claim: Claim, recording: Recording) -> ClaimRecord:
    """Judge one claim."""
    begin = time.perf_counter()
    seen = RELATIONS[claim.relation].look(recording, claim)
    record = ClaimRecord(
        claim=claim.id,
        relation=claim.relation,
        verdict="kept",
        level=2,
        required=2,
        cases=len(recording.traces),
        inputs=seen.matched,
        compared=seen.compared,
        differing=len(seen.violations),
        if_fails=claim.if_fails,
    )
    if seen.impossible:
        record = replace(record, verdict="could-not-run", level=0, detail=seen.impossible)
    elif seen.violations:
        more = len(seen.violations) - SHOWN
        detail = "; ".join(seen.violations[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        record = replace(record, verdict="broken", level=1, at=2, detail=detail)
    elif not seen.matched:
        record = replace(record, verdict="vacuous", level=1, detail="it matches nothing")
    else:
        planted = tuple(judge_plants(claim, recording))
        record = replace(record, planted=planted)
        if not planted or not all(one.caught for one in planted):
            names = ", ".join(one.name for one in planted if not one.caught) or "there is none"
            detail = f"the claim does not notice what was planted: {names}"
            record = replace(record, verdict="void", level=1, detail=detail)
    return replace(record, seconds=round(time.perf_counter() - begin, 3))


def judge_plants(claim: Claim, recording: Recording) -> Iterator[Planted]:
    """Yield for each limit whether the claim breaks on traces that exceed it."""
    look = RELATIONS[claim.relation].look
    for limit in claim.limits or {"": None}:
        alone = replace(claim, limits={limit: claim.limits[limit]} if limit else {})
        traces = planting.exceed(recording.traces, recording.profile, alone)
        seen = look(Recording(traces), alone) if traces is not None else Seen(0, 0, ())
        name = limit or claim.relation
        detail = seen.violations[0] if seen.violations else "not noticed"
        yield Planted(name, bool(seen.violations), detail)


def propose(traces: Sequence[Trace], slack: float = SLACK) -> str:
    """Write a budget file that these traces keep: what was measured, and the slack."""
    found = profile_traces(traces)
    lines = [
        f"# Written by isobit profile --propose: measured, with a slack of {slack:.0%}.",
        "id: train-step-bricks-v1",
        "claims:",
        *proposed_transfers(traces),
    ]
    add = lines.append
    on_gpu = [trace for trace in traces if not trace.on_cpu]
    if on_gpu:
        to_host = Claim("C-STREAMSYNC-001", "synchronised", {"direction": "DtoH"}, {})
        seen = look_at_synchronisation(Recording(on_gpu), to_host)
        if seen.matched and not seen.violations:
            add("  - {id: C-STREAMSYNC-001, relation: synchronised, where: {direction: DtoH}}")
    for name, cause in (("COMM", causes.EXPOSED), ("IDLE", "idle")):
        share = max(share_of(r.whole.parts, cause) / max(r.whole.total, 1) for r in found.ranks)
        if share * (1 + slack) + 0.01 < 1:
            limit = share * (1 + slack) + 0.01
            add(
                f"  - {{id: {name}, relation: share, where: {{of: {cause}}}, at_most: {limit:.4f}}}"
            )
    if any(one.apart for one in found.collectives):
        waits = sum(one.waiting for one in found.collectives if one.apart)
        share = waits / sum(rank.whole.total for rank in found.ranks)
        add(f"  - {{id: RANKS, relation: waiting, at_most: {share * (1 + slack) + 0.01:.4f}}}")
    for name, cause in causes.COUNTED.items():
        most = max(max(calls_by_step(trace, cause).values(), default=0) for trace in traces)
        key = name.upper().replace(" ", "-")
        add(f"  - {{id: {key}, relation: count, where: {{of: {name}}}, per_step: {most}}}")
    lines += proposed_bricks(found, slack)
    step = max(rank.whole.total / len(rank.steps) for rank in found.ranks) / 1e6
    add(f"  - {{id: STEP, relation: time, ms_per_step: {step * (1 + slack):.3f}}}")
    return "\n".join(lines) + "\n"


def proposed_transfers(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a claim for each direction of copies: how many a step has, and their bytes."""
    for direction in ("HtoD", "DtoH", "DtoD"):
        number, size, pageable = 0, 0, False
        for trace in traces:
            for copies in copies_by_step(trace, direction).values():
                number, size = max(number, len(copies)), max(size, sum(e.size for e in copies))
                pageable = pageable or any("Pageable" in e.name for e in copies)
        if number:
            name = "C-GPUTRAIN-002" if direction == "HtoD" else f"TRANSFERS-{direction}"
            pinned = ", pinned: true" if not pageable and direction != "DtoD" else ""
            yield (
                f"  - {{id: {name}, relation: transfers, where: {{direction: {direction}}}, per_step: {number}, "
                f"bytes_per_step: {size}{pinned}}}"
            )


def proposed_bricks(profile: Profile, slack: float, most: int = 5) -> Iterator[str]:
    """Yield a claim for the longest kernels of the first rank: their time per step, and their share of the bound."""
    rank = profile.ranks[0]
    kernels: dict[str, list[Brick]] = {}
    for brick in rank.bricks:
        if brick.kind == "kernel" and not any(c in brick.operator for c in "*?[]|'\"\n"):
            kernels.setdefault(brick.operator, []).append(brick)
    longest = sorted(kernels, key=lambda name: -sum(b.ns for b in kernels[name]))[:most]
    for number, name in enumerate(longest):
        each = max(
            sum(b.ns for b in r.bricks if b.kind == "kernel" and b.operator == name) / len(r.steps)
            for r in profile.ranks
        )
        where = f'{{operator: "{name}", kind: kernel}}'
        limit = each / 1e6 * (1 + slack)
        yield f"  - {{id: TIME-{number + 1}, relation: time, where: {where}, ms_per_step: {limit:.6f}}}"
        shares = [
            sum(b.bound for b in known) / sum(b.ns for b in known)
            for r in profile.ranks
            if (known := [b for b in r.bricks if b.kind == "kernel" and b.operator == name and b.bound])
        ]  # fmt: skip
        if shares:
            least = min(shares) * (1 - slack)
            yield f"  - {{id: BOUND-{number + 1}, relation: of_bound, where: {where}, at_least: {least:.4f}}}"
