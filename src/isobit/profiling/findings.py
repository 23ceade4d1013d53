"""Findings: what costs time in a profile, by rules with limits, evidence and a remedy each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import median_high, median_low

from isobit.profiling import account as causes
from isobit.profiling.account import Books
from isobit.profiling.bounds import PRODUCTS
from isobit.profiling.order_names import DEPENDENT, order_of
from isobit.profiling.records import Brick, Collective, Finding, Profile, RankProfile, Slice
from isobit.profiling.trace import Step, Trace

HOST = (causes.LAUNCHING, causes.OPERATORS, causes.PYTHON, causes.OPTIMIZER)
MOST_SLICES = 3
# Limits: shares of the steps, or of the device's time where a brick is judged.
LOADER, HOST_BOUND, WAITS, ALLOCATOR, COMPILING = 0.05, 0.25, 0.02, 0.01, 0.01
MOVING, WAITING, UNKNOWN, NOT_STARTED = 0.10, 0.10, 0.10, 0.20
PAGEABLE, LOW, CASTS, LAYOUTS, PRODUCTS_IN_FP32, ORDER = 0.005, 0.05, 0.05, 0.05, 0.05, 0.01
OF_BOUND = 0.25  # a brick below this share of its bound is slow
CLEAR, BY_CHANCE = 0.25, 0.05  # a wait that needs no statistics; and the probability for the others
ALIKE = 4  # collectives, of which the fastest shows what their size needs
SHARED = 2  # how much slower a program becomes next to another one on the same core
SHORT_CALL = 20_000  # ns; below this the launch, not the bound, sets the time

REMEDIES = {
    "data-loader": "give the DataLoader workers (num_workers, persistent_workers, pin_memory), or prepare data before",
    "host-bound": "launch fewer, larger kernels: torch.compile, CUDA graphs, fused optimizers, a larger batch",
    "host-waits": "do not read values of the device inside the step (.item(), print, tolist); log every n steps",
    "allocator": "keep shapes constant, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "not-started": "it waits for an event, another device or work that is not in the trace: look at what came before",
    "compiling": "record after warm-up; if it repeats, TORCH_LOGS=recompiles names the guard that fails",
    "slow-rank": "look at the named cause on that rank first; the network is not the reason",
    "exposed-communication": "overlap with compute (buckets, prefetch), or send less (dtype, sharding)",
    "communication-unknown": "record all ranks: one rank cannot tell waiting from moving",
    "communication-not-judged": "record on an idle machine with a core for each rank and one for its threads that send",
    "pageable-copies": "use pinned memory (pin_memory=True) and non_blocking=True",
    "low-share-of-bound": "another layout, a fused kernel or another backend may be faster at these shapes",
    "casts": "keep one dtype through the block: look for .float(), norms in fp32 and autocast boundaries",
    "layout-copies": "avoid .contiguous() and permutes between layouts; keep one memory format",
    "fp32-products": "run these products in the dtype of the others: look for modules outside of autocast",
    "order-dependent": "isobit audit shows which results depend on it; isobit.enable computes in one order",
}


def find_all(
    profile: Profile,
    traces: Sequence[Trace],
    books: dict[int, Books],
    steps: dict[int, tuple[Step, ...]],
) -> tuple[Finding, ...]:
    """Return the findings of all ranks, the costliest first, then what costs no time."""
    found = list(of_collectives(profile))
    for rank, trace in zip(profile.ranks, traces, strict=True):
        where = (books[rank.rank], steps[rank.rank])
        found += of_accounts(profile, rank, *where)
        found += of_bricks(rank, trace)
    found.sort(key=lambda one: (one.severity != "warning", -one.ns, one.rank, one.rule))
    return tuple(one_per_rule(found))


def one_per_rule(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the costliest finding of each rule, which says on how many other ranks the rule has one.

    Slow bricks are told apart by what they are.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in found:
        detail = one.detail if one.rule in ("low-share-of-bound", "order-dependent") else ""
        groups.setdefault((one.rule, detail), []).append(one)
    for first, *others in groups.values():
        ranks = {one.rank for one in others} - {first.rank}
        also = f" (also on {len(ranks)} other ranks)" if ranks else ""
        yield replace(first, detail=first.detail + also)


def finding(
    rule: str,
    rank: int,
    ns: int,
    total: int,
    detail: str,
    evidence: Sequence[Slice] = (),
    severity: str = "warning",
    cost: str = "measured",
) -> Finding:
    """Return a finding with the remedy of its rule."""
    share = ns / total if total else 0.0
    return Finding(rule, severity, rank, ns, share, detail, tuple(evidence), REMEDIES[rule], cost)


def of_accounts(
    profile: Profile, rank: RankProfile, books: Books, steps: Sequence[Step]
) -> Iterator[Finding]:
    """Yield findings about where the time of a rank's steps went."""
    whole = rank.whole
    number = len(rank.steps)

    def judge(rule: str, names: Sequence[str], limit: float, words: str) -> Iterator[Finding]:
        spent = {one.step: sum(one.parts.get(name, 0) for name in names) for one in rank.steps}
        ns = sum(spent.values())
        if share_of(rank, spent) >= limit:
            detail = f"{words}: {ns / number / 1e6:,.3f} ms per step"
            yield finding(rule, rank.rank, ns, whole.total, detail, longest(books, steps, names))

    yield from judge("data-loader", (causes.LOADING,), LOADER, "the step waits for the data loader")
    if rank.device != "CPU":
        yield from judge(
            "host-bound", HOST, HOST_BOUND, "the device is idle while the host prepares launches"
        )
        yield from judge(
            "host-waits", (causes.WAITS,), WAITS, "the device is idle after the host waited for it"
        )
        yield from judge(
            "allocator",
            (causes.ALLOCATING,),
            ALLOCATOR,
            "the device is idle while memory is allocated",
        )
        yield from judge(
            "not-started", (causes.QUEUED,), NOT_STARTED, "work was launched and did not start"
        )
    yield from judge("compiling", (causes.COMPILING,), COMPILING, "the step compiles")
    if not profile.collectives and profile.world > len(profile.ranks):
        words = "communication that nothing hides; how much of it is waiting for other ranks cannot be told"
        yield from judge("communication-unknown", (causes.EXPOSED,), UNKNOWN, words)


def share_of(rank: RankProfile, spent: Mapping[str, int]) -> float:
    """Return the share of a rank's steps that these nanoseconds by step are for certain, whatever the machine did.

    What a step has more than its thread had no core for is the program's. On a CPU operators do not block, so that
    time in which the thread neither ran nor was ready to, and that nothing else can contain, is the program's too.
    """
    certain = 0
    for one in rank.steps:
        ns, time = spent[one.step], rank.core_times.get(one.step)
        if time is None:
            certain += ns
            continue
        alone = one.total - one.parts.get(causes.EXPOSED, 0)
        elsewhere = alone - one.parts.get(causes.COMPUTE, 0) - ns
        blocked = alone - time.lost - time.ran - elsewhere if rank.device == "CPU" else 0
        certain += max(0, ns - time.lost, min(ns, blocked))
    return certain / rank.whole.total if rank.whole.total else 0.0


def of_collectives(profile: Profile) -> Iterator[Finding]:
    """Yield findings about waiting for a rank, and about moving data."""
    apart = [one for one in profile.collectives if one.apart]
    total = sum(rank.whole.total for rank in profile.ranks)
    waiting = sum(one.waiting for one in apart)
    rank, ns = most_waited_for(apart)
    usual = usual_share(profile, apart, rank)
    if usual >= WAITING and (usual >= CLEAR or chance(apart, rank) < BY_CHANCE):
        parts = profile.causes.get(rank, {})
        words = ", ".join(
            f"{cause} {late / 1e6:,.3f}" for cause, late in list(parts.items())[:3] if late > 0
        )
        saved = profile.savings.get(rank)
        detail = f"the others wait, {ns / waiting:.0%} of it for rank {rank}, which is late by (ms): {words}"
        if saved is not None:
            detail += f"; as the other ranks it would save {saved / 1e6:,.3f} ms"
        late = sorted((one for one in apart if one.last == rank), key=lambda one: -one.lateness.ns)
        evidence = [slice_of(one) for one in late[:MOST_SLICES]]
        yield finding(
            "slow-rank", rank, ns, total, detail, evidence, cost="measured, saving by replay"
        )
    # What compute hides is no cost; waiting is counted above.
    exposed = sum(rank.whole.parts.get(causes.EXPOSED, 0) for rank in profile.ranks)
    moving = min(moving_of(profile.collectives), exposed - waiting)
    if not total or moving < MOVING * total:
        return
    first = profile.ranks[0].rank
    if certain_share(profile, apart) >= MOVING:
        detail = "data move after all ranks have arrived, and nothing hides it"
        yield finding("exposed-communication", first, moving, total, detail)
    else:
        waited = sum(t.senders_waited for rank in profile.ranks for t in rank.core_times.values())
        detail = (
            f"data move for {moving / total:.0%} of the steps, but the threads that send had no core for "
            f"{waited / 1e6:,.3f} ms in all: what sending costs cannot be told on this machine"
        )
        said = finding("communication-not-judged", first, 0, total, detail, (), "info", "none")
        yield replace(said, share=moving / total)


def moving_of(collectives: Sequence[Collective]) -> int:
    """Return the nanoseconds that data need to move: each collective takes as long as the fastest one like it.

    What others take longer has another reason than their size: a host that did not get to it, or traffic of others.
    The fastest is one that overlaps no other; what overlaps another moves as much data.
    """
    alike: dict[tuple[str, str, int], list[Collective]] = {}
    for one in collectives:
        alike.setdefault((one.name, one.detail, len(one.moves)), []).append(one)
    return sum(
        min((one.moving for one in ones if one.apart), default=0) * len(ones)
        for ones in alike.values()
    )


def certain_share(profile: Profile, collectives: Sequence[Collective]) -> float:
    """Return the share of the steps in which data move for certain, if the ranks had had cores for all their threads.

    On a CPU threads of the ranks move the data, so that collectives are slow if these threads have no core. Two things
    are certain: what is longer than all of them together had no core for; and what a thread needs to send, which is
    half of the time that it ran, as programs that share a core slow each other down. The host of a virtual machine may
    take the core away while a thread runs, so that of some steps with the same collectives the shortest time counts.
    """
    if any(rank.device != "CPU" or not rank.core_times for rank in profile.ranks):
        return 1.0
    steps: dict[str, list[Collective]] = {
        one.step: [] for rank in profile.ranks for one in rank.steps
    }
    for collective in collectives:
        if collective.step in steps:
            steps[collective.step].append(collective)
    groups: dict[tuple[tuple[str, str], ...], list[tuple[int, int]]] = {}
    for step, found in steps.items():
        kind = tuple((one.name, one.detail) for one in found)
        groups.setdefault(kind, []).append(certain_moving(profile, step, found))
    moving = 0
    for bounds in groups.values():
        beyond, sent = (min(times) for times in zip(*bounds, strict=True))
        moving += len(bounds) * (max(beyond, sent) if len(bounds) >= ALIKE else beyond)
    own = sum(own_time(rank, step) for rank in profile.ranks for step in steps)
    return moving / (own + moving) if moving else 0.0


def certain_moving(
    profile: Profile, step: str, collectives: Sequence[Collective]
) -> tuple[int, int]:
    """Return lower bounds of the nanoseconds that data moved in a step on all ranks.

    The first is by what lack of cores leaves, the second by the time that the busiest sending thread ran; it may have
    run while its rank waited for the last one.
    """
    times = {rank.rank: rank.core_times.get(step) for rank in profile.ranks}
    known = {rank: time for rank, time in times.items() if time is not None}
    if len(known) < len(times):
        return 0, 0
    moves = {rank: sum(one.moves.get(rank, 0) for one in collectives) for rank in known}
    waits = {rank: sum(one.waits.get(rank, 0) for one in collectives) for rank in known}
    lack = sum(time.senders_waited + time.stolen for time in known.values())
    needed = max(time.senders_ran - waits[rank] for rank, time in known.items()) // SHARED
    return (
        sum(max(0, ns - lack) for ns in moves.values()),
        sum(max(0, min(ns, needed)) for ns in moves.values()),
    )


def most_waited_for(collectives: Sequence[Collective]) -> tuple[int, int]:
    """Return the rank that the others waited for longest, and how long."""
    waited: Counter[int] = Counter()
    for one in collectives:
        waited[one.last] += one.waiting
    return waited.most_common(1)[0] if waited else (0, 0)


def usual_share(profile: Profile, collectives: Sequence[Collective], rank: int) -> float:
    """Return the share of a step that one rank costs the others, as the median over steps.

    Any rank is late now and then, because something else ran on its host; a slow one is late in most steps. Where the
    recording has how long the ranks had a core, only what the machine cannot explain counts.
    """
    totals: Counter[str] = Counter()
    for process in profile.ranks:
        for step in process.steps:
            totals[step.step] += step.total
    if all(process.core_times for process in profile.ranks):
        shares = [own_share(profile, rank, step) for step in totals]
    else:
        late: Counter[str] = Counter()
        for one in collectives:
            late[one.step] += one.waiting if one.last == rank else 0
        shares = [late[step] / total for step, total in totals.items() if total]
    return median_low(shares) if shares else 0.0


def own_share(profile: Profile, rank: int, step: str) -> float:
    """Return the share of a step that a rank takes longer than the others for certain, whatever the machine did.

    Of a rank's time in a step, what only collectives fill and what it had no core for is not its own. In the rest it
    ran, or was blocked: it slept, read a file, or waited for a device. Programs that share a core's units or caches
    slow each other down, by a factor of two as a rule; so on a CPU only half of the time in which the suspect ran
    counts, and all of the others'. That it ran longer is certain on the busiest machine. What it was blocked for is
    what lack of a core leaves of the step, whose borders are not quite those of the counters: it counts against the
    whole step.
    """
    own: dict[int, int] = {}
    ran = whole = 0
    for process in profile.ranks:
        account = next((one for one in process.steps if one.step == step), None)
        time = process.core_times.get(step)
        if time is None or account is None:
            return 0.0
        own[process.rank] = own_time(process, step)
        if process.rank == rank:
            whole = account.total
            ran = time.ran if process.device == "CPU" else 0
    others = [ns for other, ns in own.items() if other != rank]
    if not others:
        return 0.0
    usual = median_high(others)
    least = own[rank] - ran + ran // SHARED
    return max((ran // SHARED - usual) / max(1, ran, usual), (least - usual) / max(1, whole, usual))


def own_time(process: RankProfile, step: str) -> int:
    """Return the nanoseconds of a step without what only collectives fill, and without lack of a core.

    On a CPU it is at least the time that the main thread ran: while the host of a virtual machine has a core, threads
    that are ready to run wait for it too, so that lack of a core may be counted twice.
    """
    account = next((one for one in process.steps if one.step == step), None)
    time = process.core_times.get(step)
    if account is None:
        return 0
    own = account.total - account.parts.get(causes.EXPOSED, 0)
    if time is None:
        return own
    return max(time.ran if process.device == "CPU" else 0, own - time.lost)


def chance(collectives: Sequence[Collective], rank: int) -> float:
    """Return an upper bound (Chernoff's) of the probability that some rank is last as often, if all were equally fast.

    With two ranks and four collectives nothing can be told from who is last: one in eight runs has the same rank last
    in all of them. Then only a wait that is long by itself is a finding.
    """
    trials = [one for one in collectives if one.waiting]
    ranks = len(trials[0].waits) if trials else 0
    often = sum(one.last == rank for one in trials) / len(trials) if trials else 0.0
    if not trials or often * ranks <= 1:
        return 1.0
    apart = often * log(often * ranks)
    if often < 1:
        apart += (1 - often) * log((1 - often) * ranks / (ranks - 1))
    return min(1.0, ranks * exp(-len(trials) * apart))


def slice_of(one: Collective) -> Slice:
    """Return a collective as evidence: how long the last rank was late."""
    name = f"{one.name} number {one.number} of {one.step or 'no step'}: {one.lateness.cause}"
    return Slice(rank=one.last, start=one.at, ns=one.lateness.ns, name=name)


def longest(books: Books, steps: Sequence[Step], names: Sequence[str]) -> list[Slice]:
    """Return the longest pieces of these causes."""
    pieces = [
        (end - start, start, cause)
        for step in steps
        for start, end, cause in books.timeline.pieces(step.start, step.end)
        if cause in names
    ]
    pieces.sort(reverse=True)
    rank = books.trace.rank
    return [
        Slice(rank=rank, start=start, ns=ns, name=cause)
        for ns, start, cause in pieces[:MOST_SLICES]
    ]


def of_bricks(rank: RankProfile, trace: Trace) -> Iterator[Finding]:
    """Yield findings about what the device computes and copies."""
    total = rank.device_time
    if not total or rank.device == "CPU":
        return
    kernels = [brick for brick in rank.bricks if brick.kind == "kernel"]
    slow = [
        b
        for b in kernels
        if b.of_bound is not None
        and b.of_bound < OF_BOUND
        and b.ns >= LOW * total
        and b.ns >= SHORT_CALL * b.calls
    ]
    for brick in slow:
        detail = f"{describe(brick)} runs at {brick.of_bound:.0%} of its bound by {brick.bound_by}"
        yield finding(
            "low-share-of-bound", rank.rank, brick.ns - brick.bound, total, detail, cost="at most"
        )
    copies = [b for b in kernels if b.operator == "aten::copy_"]
    yield from together(
        "casts", rank, [b for b in copies if " " in b.dtypes], CASTS, "copies change the dtype"
    )
    same = [b for b in copies if " " not in b.dtypes and b.dtypes]
    yield from together(
        "layout-copies", rank, same, LAYOUTS, "copies keep dtype and device, and change the layout"
    )
    products = [b for b in kernels if b.operator in PRODUCTS]
    halves = sum(b.ns for b in products if b.dtypes in ("Half", "BFloat16"))
    wide = [b for b in products if b.dtypes == "float"]
    if halves > sum(b.ns for b in wide):
        yield from together(
            "fp32-products", rank, wide, PRODUCTS_IN_FP32, "products in fp32 in a 16-bit model"
        )
    pageable = [b for b in rank.bricks if b.kind == "transfer" and "Pageable" in b.operator]
    ns = sum(b.ns for b in pageable)
    if ns >= PAGEABLE * rank.whole.total:
        number, size = sum(b.slices for b in pageable), sum(b.bytes for b in pageable)
        detail = f"{number / len(rank.steps):,.0f} copies per step from or to pageable memory, {size:,} bytes in all"
        yield finding("pageable-copies", rank.rank, ns, rank.whole.total, detail)
    yield from of_orders(rank, trace)


def together(
    rule: str, rank: RankProfile, bricks: Sequence[Brick], limit: float, words: str
) -> Iterator[Finding]:
    """Yield one finding about several bricks, if they take long enough together."""
    ns = sum(brick.ns for brick in bricks)
    if bricks and ns >= limit * rank.device_time:
        detail = f"{words}: {sum(b.calls for b in bricks):,} calls, most in {describe(bricks[0])}"
        yield finding(rule, rank.rank, ns, rank.device_time, detail, cost="at most")


def of_orders(rank: RankProfile, trace: Trace) -> Iterator[Finding]:
    """Yield which kernels add in an order that depends on something; this costs no time."""
    found: Counter[str] = Counter()
    for event in trace.device:
        order = order_of(event.name)
        if event.kind == "kernel" and order.on in DEPENDENT:
            found[order.words] += event.duration
    total = sum(event.duration for event in trace.device)
    for words, ns in found.most_common():
        if ns >= ORDER * total:
            detail = f"kernels whose names say how they add: {words}"
            said = finding(
                "order-dependent", rank.rank, 0, total, detail, severity="info", cost="none"
            )
            yield replace(said, share=ns / total)


def describe(brick: Brick) -> str:
    """Return operator, shapes and module of a brick."""
    where = f" in {brick.module}" if brick.module else ""
    return f"{brick.operator} {brick.shapes}{where}".strip()
