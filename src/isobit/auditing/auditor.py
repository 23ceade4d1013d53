"""Audit one axis: record the variant, watch the run, rank what was found, and check that the list is complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from isobit import bits
from isobit.auditing.axes.axes import SEED, Variation, same_start
from isobit.auditing.axes.outcomes import Outcomes
from isobit.auditing.axes.row_watching import RowWatcher
from isobit.auditing.compiled_code import NOT_WATCHED, compiled_module, run_eagerly
from isobit.auditing.judging.blame import Blame, as_records, rank
from isobit.auditing.judging.effects import Quantity, check_effect, measure, outputs_of
from isobit.auditing.judging.findings import GuiltyCall
from isobit.auditing.judging.remedies import remedy_for
from isobit.auditing.labels.labels import MIXED
from isobit.auditing.orders.order_pictures import add_orders
from isobit.auditing.records import AxisReport, Effect, Guilty, Unjudged
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.replay import Keeper, Kept, Key, Player, Recorder, Substituter, is_exact
from isobit.auditing.replay.watching import SameWatcher, Watcher

Progress = Callable[[str, int, int], None]
QUICK = 0.2  # seconds of a run that is timed three times
Rows = Mapping[str, list[Tensor]]


@dataclass(frozen=True)
class AuditOptions:
    """What an audit is asked for."""

    effect: str | None = None
    blame: str = "auto"
    progress: Progress | None = None
    backward: bool = False
    orders: int = 0


class AxisAudit:
    """The audit of one axis."""

    def __init__(self, model: nn.Module, variation: Variation, options: AuditOptions) -> None:
        self.model, self.variation, self.options = model, variation, options
        self.outcomes = Outcomes(model, variation, options.effect, merged=variation.accumulates)
        self.seconds: dict[str, float] = {}

    def report(self) -> AxisReport:
        """Run the audit."""
        plain, again = self.time_plain_run()
        check_effect(self.options.effect, plain)
        with self.timed("find"):
            recorders, theirs = self.record()
            watcher, substituted = self.watch(recorders)
        self.seconds["find"] -= watcher.explaining
        self.seconds["explain"] = watcher.explaining
        o = self.outcomes
        kept: tuple[Kept, Kept] | None = None
        if self.variation.by_chance and watcher.findings:
            with self.timed("find"):
                plain, substituted, theirs, kept = self.play_back(watcher)
            again = ""
        start, last, target = o.of_run(plain), o.of_run(substituted), o.of_variant(theirs)
        with self.timed("rank"):
            blame = self.rank(watcher, start, last, kept)
        guilty = self.guilty(watcher.findings, blame)
        if self.options.orders:
            guilty = add_orders(
                guilty, watcher.findings, self.variation, self.options.orders, self.say
            )
        complete, why = self.close(again, last, target, watcher, recorders)
        v = self.variation
        return AxisReport(
            v.axis,
            v.sentence,
            v.sides,
            operators=watcher.numbering.calls,
            exact=watcher.exact,
            judged=watcher.judged - len(watcher.totals.open),
            guilty=guilty,
            unjudged=(
                *watcher.unjudged,
                *(Unjudged(one.place, v.axis, MIXED) for one in watcher.totals.open),
            ),
            carriers=watcher.carriers,
            effect=both(o.quantity(start), o.quantity(target)),
            remaining=both(o.quantity(last), o.quantity(target)),
            step=both(o.step(start), o.step(target)),
            complete=complete,
            why_not=why,
            not_compared=tuple(sorted(o.totals)),
            groups=tuple(blame.groups) if blame else (),
            grouped_by=blame.grouped_by if blame else "one",
            forwards=blame.forwards if blame else 0,
            seconds=self.seconds,
        )

    def time_plain_run(self) -> tuple[dict[str, Tensor], str]:
        """Run the model as it is, for its results and its time; return also why what is watched is not that run."""
        self.say("a plain run", 0, 1)
        times: list[float] = []
        while not times or (len(times) < 3 and times[0] < QUICK):
            began = time.perf_counter()
            plain = self.outputs(self.variation.run)
            times.append(time.perf_counter() - began)
        self.seconds["forward"] = sorted(times)[len(times) // 2]
        watched = self.outputs(self.variation.run, Substituter({}, ()))  # substitutes nothing
        unequal = differing(watched, plain)
        if unequal:
            changes = differing(plain, self.outputs(self.variation.run))
            if changes:
                return plain, f"the run gives other bits the second time: {some(changes)}"
            return plain, f"{some(unequal)}: {NOT_WATCHED}"
        compiled = compiled_module(self.model)
        return plain, f"{compiled}: {NOT_WATCHED}" if compiled else ""

    def timed(self, name: str) -> Timer:
        """Return a context that adds its time to `seconds`."""
        return Timer(self.seconds, name)

    def say(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        if self.options.progress is not None:
            self.options.progress(f"{self.variation.axis}: {stage}", done, total)

    def outputs(
        self, run: Callable[[], Any], mode: Any = None, seed: int = SEED
    ) -> dict[str, Tensor]:
        """Run under a mode and return the tensors of the output."""
        with same_start(seed):
            if mode is None:
                return outputs_of(run())
            with run_eagerly(), mode:
                return outputs_of(run())

    def record(self) -> tuple[list[Recorder], list[dict[str, Tensor]]]:
        """Run every call of the variant and record it."""
        recorders, outputs = [], []
        for at, call in enumerate(self.variation.calls):
            self.say(self.variation.sides[1], at, len(self.variation.calls))
            recorders.append(Recorder(Places(self.model)))
            around = self.variation.around
            with around() if around is not None else nullcontext():
                mode = recorders[-1] if around is None else None
                outputs.append(self.outputs(call.run, mode, self.variation.seed))
        return recorders, outputs

    def watch(self, recorders: Sequence[Recorder]) -> tuple[Watcher, dict[str, Tensor]]:
        """Run the audited run and judge every call."""
        v = self.variation
        ledger = v.ledger()
        watcher: Watcher
        if v.watcher is not None:
            watcher = v.watcher(Places(self.model))
        elif v.around is None:
            variants = [(c.rows, r.entries) for c, r in zip(v.calls, recorders, strict=True)]
            fixed = {size for p in self.model.parameters() for size in p.shape}
            watcher = RowWatcher(Places(self.model), ledger, variants, v.axis, v.mixes, fixed)
            watcher.read = set[Key]().union(*(r.read for r in recorders))
        else:
            watcher = SameWatcher(Places(self.model), v.axis, v.around)
        self.say(v.sides[0], 0, 1)
        outputs = self.outputs(v.run, watcher)
        watcher.reads.note(outputs.values())
        watcher.reads.settle()
        kept = {name: watcher.parts.get(tensor) for name, tensor in outputs.items()}
        self.outcomes.parts = {name: parts for name, parts in kept.items() if parts is not None}
        self.outcomes.marks = {name: ledger.get(tensor) for name, tensor in outputs.items()}
        for name, tensor in outputs.items():
            if watcher.totals.is_open(tensor):
                self.outcomes.marks[name] = MIXED
        return watcher, outputs

    def play_back(
        self, watcher: Watcher
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]], tuple[Kept, Kept]]:
        """Keep a first and a second run; return the first, the first with the second's guilty results, the second."""
        calls = set(watcher.replays)
        first, second = Keeper(calls), Keeper(calls)
        plain = self.outputs(self.variation.run, first)
        theirs = self.outputs(self.variation.run, second, self.variation.seed)
        played = self.outputs(self.variation.run, Player(second.kept))
        return plain, played, [theirs], (first.kept, second.kept)

    def rank(
        self, watcher: Watcher, start: Rows, last: Rows, kept: tuple[Kept, Kept] | None = None
    ) -> Blame | None:
        """Substitute the guilty calls one after another; `last` is the run with all of them substituted."""
        done, total = 0, len(watcher.findings)
        first, final = self.outcomes.quantity(start), self.outcomes.quantity(last)
        if first is None or final is None or not watcher.findings:
            return None

        def run(calls: set[int]) -> Quantity:
            nonlocal done
            mode: Any = Substituter(watcher.replays, calls, watcher.summed)
            if kept is not None:
                mode = Player(
                    {call: kept[call in calls].get(call, ("", [])) for call in watcher.replays}
                )
            rows = self.outcomes.of_run(self.outputs(self.variation.run, mode))
            done += 1
            self.say("substituting", done, total)
            found = self.outcomes.quantity(rows)
            assert found is not None
            return found

        return rank(watcher.findings, self.options.blame, first, final, run)

    def close(
        self,
        unlike: str,
        last: Rows,
        target: Rows,
        watcher: Watcher,
        recorders: Sequence[Recorder],
    ) -> tuple[bool, str]:
        """Return whether the substituted run is the variant, bit for bit, and why not."""
        if unlike:
            return False, unlike
        differ = self.outcomes.equal(last, target)
        if differ is None:
            return (
                False,
                "the model returns no tensor, nor a dictionary, tuple or dataclass with one",
            )
        if not differ:
            return True, ""
        unknown = [name for name in differ if self.outcomes.why_unknown(name)]
        if unknown:
            reason = self.outcomes.why_unknown(unknown[0])
            return False, f"{some(unknown)} cannot be compared: {reason}"
        return (
            False,
            f"{some(differ)} still differ{'s' if len(differ) == 1 else ''}: {why_not(watcher, recorders)}",
        )

    def guilty(self, findings: Sequence[GuiltyCall], blame: Blame | None) -> tuple[Guilty, ...]:
        """Return the records of the guilty calls, the largest share first."""
        remedies = [remedy_for(f.place.operator, f.kind) for f in findings]
        return as_records(findings, self.variation.axis, blame, remedies)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of outputs that differ in any bit, or that only one has."""
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not bits.equal(one[name], other[name])
    ]


class Timer:
    """Add the time of a context to an entry."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.began
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + spent


def both(one: Quantity | None, other: Quantity | None) -> Effect | None:
    """Measure two quantities, if both are known and of one size."""
    if one is None or other is None or one.numbers.shape != other.numbers.shape:
        return None
    return measure(one, other)


def some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def why_not(watcher: Watcher, recorders: Sequence[Recorder]) -> str:
    """Say why the substituted run is not the variant."""
    if any(f.kind == "random" for f in watcher.findings):
        return "an operator draws random numbers, which no substitution repeats"
    if watcher.unjudged:
        common, count = Counter(one.reason for one in watcher.unjudged).most_common(1)[0]
        total = len(watcher.unjudged)
        said = "one operator was" if total == 1 else f"{total} operators were"
        return f"{said} not judged{f', {count} of them' if total > 1 else ''} because: {common}"
    return "the program itself differs: " + "; ".join(structure(watcher, recorders)[:3])


def structure(watcher: Watcher, recorders: Sequence[Recorder]) -> list[str]:
    """Return where the variant calls other operators than the audited run."""
    ours = Counter(key[:3] for key in watcher.seen)
    found = []
    for recorder in (r for r in recorders if r.entries):
        entries = recorder.entries.items()
        their = Counter(key[:3] for key, e in entries if e.rounds and not is_exact(e.func))
        for key in sorted(ours.keys() | their.keys()):
            if ours[key] != their[key]:
                module, operator, _ = key
                found.append(
                    f"{operator} in {module or 'the model'} is called {ours[key]} times in the run "
                    f"and {their[key]} times in the variant"
                )
    return found or ["no operator is guilty, yet results differ"]
