"""Diagnose a run: gather evidence, find the cause among it, and answer three questions about it.

[Note: Which granularity, local or global, static or dynamic]
A run that fails leaves many findings, most of them consequences. The cause is looked for in this order: what is wrong
before the first step (static: a configuration, an optimizer without a parameter, state that is not zero), then what
came first in time, and of one step the most specific: a copy or a kernel before a block, a block before the loop. A
finding is local if it names some of the blocks, ranks or operators, and global if it names none or most of them.

[Note: A hang and an error]
The dumps of a hang have no step, so that the files do not say whether it came before an error of the numbers. Usually
the error came first: it stops one rank, and the others wait for it. So a hang is listed after errors that have a step,
with a remark that the order is not known, and after what a rank raised. Time-outs and lost connections are what a hang
ends with, and come after it. What spikes or rises stops no rank.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobit.diagnosing.run_folder import RunFiles
from isobit.errors import ArgumentError, IsobitError
from isobit.foundation.files import open_regular, read_bytes
from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line
from isobit.guards.configured_steps import Judgement, judge_plan, plan_of
from isobit.guards.run_log.curves import RunLog
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import NAMES, Limits, find, judge_log
from isobit.profiling.api import profile_traces
from isobit.profiling.trace import read_traces
from isobit.profiling.transfers import unordered
from isobit.simulator.autopsy.examine import examine

LARGEST = 1 << 28  # bytes of a file of events
WHYS = 5
LONGEST = 300  # characters of a message
END_OF_TEXT = 1 << 24  # bytes at the start and at the end of a printed text that are read
LONGEST_LINE = 2000  # characters of its lines
MOST_ERRORS = 16  # errors of one text
DEPTHS = ("transfer", "kernel", "block", "rank", "loop")  # the most specific first
PARAMETER = re.compile(r"\b[A-Za-z_]\w*(?:\.\w+)*\.(?:weight|bias)\b")
BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True)
class Rule:
    """What a finding says of the cause: how deep it is, whether a check before the run finds it, and who checks it."""

    granularity: str
    when: str  # static or dynamic
    contract: str = ""
    next: str = ""


CHECKS = "isobit preflight train.py --config train.yaml"
RULES: dict[str, Rule] = {
    # of isobit.guards.watch
    "nonfinite-loss": Rule("loop", "dynamic", "C-TRAINSTABLE-001"),
    "nonfinite-gradient": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "nonfinite-weight": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "block-nonfinite": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "block-zero-gradient": Rule("block", "static", "C-GRADFLOW-001", CHECKS),
    "block-scale": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "blocks-grow": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "norm-above-limit": Rule("loop", "dynamic", "C-EMBED-GRAD-001", CHECKS),
    "zero-gradient": Rule("block", "static", "C-GRADFLOW-001", CHECKS),
    "no-gradient": Rule("block", "static", "C-GRADFLOW-001", CHECKS),
    "not-moved": Rule("block", "static", "C-GRADFLOW-001", CHECKS),
    "not-in-optimizer": Rule("loop", "static", "C-GRADFLOW-001", CHECKS),
    "not-in-model": Rule("loop", "static", "C-GRADFLOW-001", CHECKS),
    "nothing-trainable": Rule("loop", "static", "C-GRADFLOW-001", CHECKS),
    "not-zeroed": Rule("loop", "static", "C-TRAINSTABLE-001", CHECKS),
    "eval-mode": Rule("loop", "static", "", CHECKS),
    "hyperparameter": Rule("loop", "static", "C-HYPERPARAMS-001", CHECKS),
    "rate-zero": Rule("loop", "static", "C-HYPERPARAMS-001", CHECKS),
    "state-not-zero": Rule("block", "static", "C-GPUINIT-001", CHECKS),
    "state-not-resumed": Rule("loop", "static", "C-GPUINIT-001", CHECKS),
    "state-nonfinite": Rule("block", "dynamic", "C-TRAINSTABLE-001"),
    "state-negative": Rule("block", "dynamic", "C-GEMMARGS-001"),
    "replicas-differ": Rule("rank", "dynamic", "", "isobit simulate train.py --ranks 2"),
    "not-reduced": Rule("rank", "dynamic", "", "isobit simulate train.py --ranks 2"),
    "wrapper-bypassed": Rule("rank", "static", "", "isobit simulate train.py --ranks 2"),
    "workers-alike": Rule("loop", "static", "", CHECKS),
    "base-weights-changed": Rule("block", "dynamic"),
    # of isobit runlog
    "nonfinite": Rule("loop", "dynamic", "C-TRAINSTABLE-001"),
    "hidden-nonfinite": Rule("loop", "dynamic", "C-TRAINSTABLE-001"),
    "rising-loss": Rule("loop", "dynamic", "C-TRAINSTABLE-001"),
    "norm-limit": Rule("loop", "dynamic", "C-EMBED-GRAD-001", CHECKS),
    "spikes": Rule("loop", "dynamic"),
    "plateau": Rule("loop", "dynamic"),
    "schedule": Rule("loop", "static", "C-HYPERPARAMS-001", CHECKS),
    # of isobit profile
    "unordered-copy": Rule("transfer", "dynamic", "C-STREAMSYNC-001"),
    "pageable-copies": Rule("transfer", "dynamic", "C-GPUTRAIN-002"),
    "exposed-communication": Rule("transfer", "dynamic"),
    "communication-unknown": Rule("transfer", "dynamic"),
    "slow-rank": Rule("rank", "dynamic"),
    "low-share-of-bound": Rule("kernel", "dynamic"),
    "casts": Rule("kernel", "dynamic"),
    "layout-copies": Rule("kernel", "dynamic"),
    "fp32-products": Rule("kernel", "dynamic"),
    # of isobit autopsy
    "hang": Rule("rank", "dynamic", "", "isobit simulate train.py --ranks N"),
    # of a printed text
    "traceback": Rule("loop", "dynamic"),
}
RAISED = Rule("rank", "dynamic")  # a traceback of a rank
OTHERS = Rule("loop", "dynamic")
CONFIGURED = Rule("loop", "static", "C-TRAINCFG-001", "isobit preflight train.yaml --sequences N")
# What does not move may be what a gradient that overflowed left behind.
FOLLOWS = ("not-moved", "state-nonfinite", "nonfinite-weight")
# A loss or a logged norm that grows or ends is what the others lead to, also where it was logged first.
SYMPTOMS = (
    "nonfinite-loss", "nonfinite", "hidden-nonfinite", "rising-loss", "spikes", "plateau", "norm-limit",
    "traceback",
)  # fmt: skip
ALARMS = ("spike-", "shift-", "divergence-")  # of a loss or norm, which are symptoms too
# What a rank raises because another one has stopped.
AFTERMATH = re.compile(
    r"time[d ]*-?out|Watchdog|Dist(Backend|Store|Network)Error|ChildFailedError|KeyboardInterrupt|SignalException|"
    r"BrokenPipe|Connection",
    re.I,
)
OF_RANK = re.compile(r"^\s*\[(?:rank|default)(\d{1,6})\]:? ?")
ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::\s|$)")
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Evidence:
    """One finding of one tool.

    Attributes:
        source: The file, or the folder of dumps.
        tool: The command that shows it again.
        rule: Such as "nonfinite-gradient".
        message: What was found.
        step: The first step; None if it has none.
        place: The module, parameter, operator or ranks that it names; "" for the whole run.
    """

    source: str
    tool: str
    rule: str
    message: str
    step: int | None = None
    place: str = ""

    @property
    def meaning(self) -> Rule:
        """What the rule says of the cause."""
        if self.rule.startswith("config-"):
            return CONFIGURED
        if self.rule == "traceback" and self.place:
            return RAISED
        return RULES.get(self.rule, OTHERS)


@dataclass(frozen=True)
class Diagnosis:
    """The cause of what went wrong in a run, as far as its files show it.

    Attributes:
        folder: The run's folder.
        evidence: All findings.
        cause: The one that the others follow from; None if there are none.
        whys: From the symptom to the cause.
        granularity: transfer, kernel, block, rank or loop.
        extent: local or global.
        when: static or dynamic.
        contract: The claim that fails on this cause, or "".
        next: The command to run next.
        judged: What was read, by kind.
        unreadable: What could not be read or judged, with the reason.
        not_judged: Learning rates that no configuration judges, with the reason, by log.
    """

    folder: str
    evidence: tuple[Evidence, ...]
    cause: Evidence | None
    whys: tuple[Evidence, ...] = ()
    granularity: str = ""
    extent: str = ""
    when: str = ""
    contract: str = ""
    next: str = ""
    judged: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)


def diagnose(
    files: RunFiles, configurations: Mapping[Path, Mapping[str, Any]] | None = None
) -> Diagnosis:
    """Gather the evidence of a run's files and find the cause.

    Args:
        files: What the run left.
        configurations: Its configurations, as they were read.
    """
    found: list[Evidence] = []
    judged: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    not_judged: dict[str, str] = {}

    def gather(kind: str, path: Path, evidence: Iterator[Evidence]) -> None:
        try:
            found.extend(evidence)
            judged[kind] = judged.get(kind, 0) + 1
        except (IsobitError, OSError, ValueError, RecursionError) as error:
            unreadable[str(path)] = shortened(str(error))

    blocks: set[str] = set()
    rates = {path: values for path, values in (configurations or {}).items() if has_rates(values)}
    for path in files.events:
        tool = f"isobit runlog {shlex.quote(str(path))}"
        try:
            log = read_log(path)
        except ArgumentError:  # a watch that was given no loss; its findings are read below
            tool = f"isobit diagnose {shlex.quote(str(files.folder))} --json"
            unreadable[str(path)] = (
                "it has no loss, so that only the findings of watch in it are judged"
            )
        except (IsobitError, OSError, ValueError, RecursionError) as error:
            unreadable[str(path)] = shortened(str(error))
        else:
            gather("logs", path, of_log(log, rates, not_judged))
        gather("events of watch", path, of_events(path, blocks, tool))
    for path in files.logs:
        gather("logs", path, of_read_log(path, rates, not_judged))
    for path in files.texts:
        errors = tuple(of_text(path))
        if errors:
            gather("texts", path, iter(errors))
        try:
            log = read_log(path)
        except (IsobitError, OSError, ValueError, RecursionError):
            continue  # most texts are no logs
        gather("logs", path, of_log(log, rates, not_judged))
    if files.traces:
        gather("traces", files.traces[0], of_traces(files.traces))
    for path in files.dumps:
        gather("folders of dumps", path, of_dumps(path))
    for path, values in (configurations or {}).items():
        try:
            judgement = judge_plan(plan_of(dict(values), {}, is_strict=False))
        except (IsobitError, ValueError) as error:
            unreadable[str(path)] = shortened(str(error))
            continue
        # One without a count that a rule needs, as a model's own config.json, says nothing of the run.
        if judgement.judged or judgement.findings:
            gather("configurations", path, of_configuration(path, judgement))
    diagnosis = conclude(str(files.folder), found, blocks, judged, unreadable)
    return replace(diagnosis, not_judged=not_judged)


def has_rates(configuration: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a learning rate or its schedule."""
    return any(find(configuration, NAMES[name]) is not None for name in ("peak", "kind"))


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a text on one line, cut between two words if it is long."""
    text = one_line(text)
    if len(text) <= most:
        return text
    head = text[: most - 2]
    space = head.rfind(" ")
    return f"{head[:space] if space > most // 2 else head} …"


def conclude(
    folder: str,
    found: list[Evidence],
    blocks: set[str],
    judged: dict[str, int],
    unreadable: dict[str, str],
) -> Diagnosis:
    """Choose the cause, and put the others between it and the symptom."""
    ordered = put_hangs_last(sorted(dict.fromkeys(found), key=earliness))
    if not ordered:
        return Diagnosis(folder, (), None, judged=judged, unreadable=unreadable)
    cause = ordered[0]
    chain = [cause]
    for evidence in ordered[1:]:
        if evidence.rule not in {one.rule for one in chain}:
            chain.append(evidence)
    hang = next((one for one in chain[WHYS:] if one.rule == "hang"), None)
    chain = [*chain[: WHYS - 1], hang] if hang else chain[:WHYS]
    return Diagnosis(
        folder=folder,
        evidence=tuple(ordered),
        cause=cause,
        whys=tuple(reversed(chain)),
        granularity=cause.meaning.granularity,
        extent=extent_of(cause, ordered, blocks),
        when=cause.meaning.when,
        contract=cause.meaning.contract,
        next=cause.meaning.next or cause.tool,
        judged=judged,
        unreadable=unreadable,
    )


def put_hangs_last(ordered: list[Evidence]) -> list[Evidence]:
    """Put hangs after the errors that may have stopped a rank; see [Note: A hang and an error]."""
    hangs = [one for one in ordered if one.rule == "hang"]
    others = [one for one in ordered if one.rule != "hang"]
    timed = [one for one in others if one.step is not None and may_stop_a_rank(one)]
    if timed:
        remark = (
            f"; it may follow from {timed[0].rule}: it has no step, so that the order is not known"
        )
        hangs = [replace(one, message=one.message + remark) for one in hangs]
        others = [
            replace(one, message=one.message + remark) if one.rule == "traceback" else one
            for one in others
        ]
    place = max((at for at, one in enumerate(others, 1) if may_stop_a_rank(one)), default=0)
    if not place:
        return ordered
    return [*others[:place], *hangs, *others[place:]]


def may_stop_a_rank(evidence: Evidence) -> bool:
    """Return whether a finding is an error that a rank may have stopped at, so that others wait for it."""
    if evidence.rule == "traceback":
        return not AFTERMATH.search(evidence.message)
    if evidence.step is None or evidence.meaning.when == "static":
        return False
    return not is_symptom(evidence.rule) or "nonfinite" in evidence.rule


def is_symptom(rule: str) -> bool:
    """Return whether a finding is what others lead to."""
    return rule in SYMPTOMS or rule.startswith(ALARMS)


def earliness(evidence: Evidence) -> tuple[int, float, bool, bool, int, str, str]:
    """Return a key that sorts causes before what follows from them."""
    meaning = evidence.meaning
    step = float("inf") if evidence.step is None else float(evidence.step)
    # Time that is lost explains no wrong number: a hang comes before what is slow. `put_hangs_last` has the rest.
    rank = 2 if is_symptom(evidence.rule) else int(meaning.when != "static")
    if evidence.rule in FOLLOWS:
        rank = 1
    return (
        rank,
        -1.0 if evidence.rule in ("hang", "unordered-copy") else step,
        evidence.rule in FOLLOWS,
        evidence.rule == "traceback" and AFTERMATH.search(evidence.message) is not None,
        DEPTHS.index(meaning.granularity),
        evidence.rule,
        evidence.place,
    )


def extent_of(cause: Evidence, found: list[Evidence], blocks: set[str]) -> str:
    """Say whether the cause names some of the run's blocks, ranks or operators, or none or most of them."""
    if not cause.place:
        return "global"
    if cause.meaning.granularity == "block":
        named = {
            block_of(one.place)
            for one in found
            if one.rule == cause.rule and one.step == cause.step and one.place
        }
        if len(blocks) > 1 and 2 * len(named & blocks) > len(blocks):
            return "global"
    return "local"


def block_of(place: str) -> str:
    """Return the block of a module or parameter: layers.3 of layers.3.mlp.weight; else its first name."""
    match = BLOCK.match(place)
    return match[1] if match else place.split(".")[0]


def of_events(path: Path, blocks: set[str], tool: str) -> Iterator[Evidence]:
    """Yield the findings that watch wrote; `blocks` receives the blocks that metrics and findings name."""
    text = read_bytes(path, LARGEST).decode("utf-8", "replace")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if not isinstance(entry, dict):
            continue
        message = shortened(str(entry.get("message", "")))
        place = str(entry.get("module", ""))[:200]
        if place:
            blocks.add(block_of(place))
        if entry.get("kind") != "finding" or entry.get("severity") == "info":
            continue
        step = entry.get("step")
        yield Evidence(
            source=path.name,
            tool=tool,
            rule=str(entry.get("name", ""))[:80],
            message=message,
            step=step if type(step) is int else None,
            place=place or parameter_in(message),
        )


def parameter_in(message: str) -> str:
    """Return the first name of a parameter in a message, such as layers.3.mlp.weight; "" if there is none."""
    found = PARAMETER.search(message)
    return found[0] if found else ""


def of_read_log(
    path: Path, rates: Mapping[Path, Mapping[str, Any]], not_judged: dict[str, str]
) -> Iterator[Evidence]:
    """Read a log, and yield what `isobit runlog` finds in it."""
    yield from of_log(read_log(path), rates, not_judged)


def of_log(
    log: RunLog, rates: Mapping[Path, Mapping[str, Any]], not_judged: dict[str, str]
) -> Iterator[Evidence]:
    """Yield what `isobit runlog` finds in a log.

    Args:
        log: The log.
        rates: Configurations with a learning rate; if there is one, the log's rates are held against it.
        not_judged: Receives why its learning rates are not judged, if it has some.
    """
    tool = f"isobit runlog {shlex.quote(log.path)}"
    config = next(iter(rates)) if len(rates) == 1 else None
    if config is not None:
        tool += f" --config {shlex.quote(str(config))}"
    verdict = judge_log(log, Limits(config=rates[config] if config is not None else None))
    if "schedule" in verdict.not_judged and log.curves.get("lr"):
        why = verdict.not_judged["schedule"]
        if len(rates) != 1:
            names = ", ".join(path.name for path in rates)
            why = (
                f"{len(rates)} configurations of the run have one ({names})"
                if rates
                else ("no configuration of the run has one")
            )
            why += f"; name it: {tool} --config FILE"
        not_judged[log.path] = one_line(f"the learning rates: {why}")
    for finding in verdict.findings:
        if finding.severity != "info" and not finding.rule.startswith("watch: "):
            yield Evidence(
                source=Path(log.path).name,
                tool=tool,
                rule=finding.rule,
                message=finding.message,
                step=finding.step,
            )


def of_text(path: Path) -> Iterator[Evidence]:
    """Yield the errors of Python that a text such as stderr.log has, with the rank if their line names one."""
    tool = f"grep -n -A 30 Traceback {shlex.quote(str(path))}"
    found: dict[tuple[str, str], None] = {}
    for line in ends_of(path).splitlines():
        line = line[:LONGEST_LINE]
        match = OF_RANK.match(line)
        rank = f"rank {int(match[1])}" if match else ""
        line = line[match.end() :] if match else line
        if ERROR.match(line):
            found[rank, shortened(line)] = None
            if len(found) == MOST_ERRORS:
                break
    if not found and TRACEBACK in ends_of(path):
        found["", "a traceback whose last line is missing"] = None
    for rank, message in found:
        yield Evidence(path.name, tool, "traceback", message, None, rank)


def ends_of(path: Path) -> str:
    """Return the start and the end of a text, which is all of it unless it is very long."""
    with open_regular(path) as file:
        start = file.read(END_OF_TEXT) or b""
        file.seek(max(file.seek(0, 2) - END_OF_TEXT, len(start)))
        end = file.read(END_OF_TEXT) or b""
    return (start + end).decode("utf-8", "replace")


def of_traces(paths: tuple[Path, ...]) -> Iterator[Evidence]:
    """Yield what `isobit profile` finds, and copies that nothing orders after a kernel of another stream."""
    traces = read_traces(paths)
    tool = f"isobit profile {paths[0].parent}"
    for trace in traces:
        for copy, kernel in unordered(trace, "DtoH"):
            if kernel.end > copy.start:  # it ran at the same time: certainly not ordered
                message = f"{copy.name} reads while {kernel.name[:60]} of another stream runs"
                yield Evidence(trace.name, tool, "unordered-copy", message, None, copy.name)
    for finding in profile_traces(traces).findings:
        if finding.severity == "warning":
            place = f"rank {finding.rank}" if finding.rule == "slow-rank" else ""
            yield Evidence(f"{len(traces)} traces", tool, finding.rule, finding.detail, None, place)


def of_dumps(folder: Path) -> Iterator[Evidence]:
    """Yield what `isobit autopsy` finds in the dumps of a hang."""
    autopsy = examine(folder)
    error = autopsy.finding
    if autopsy.not_judged:
        raise ArgumentError(
            expected="dumps that show a hang, or those of all ranks",
            received=autopsy.not_judged,
            remedy="collect the dumps that are missing",
        )
    if error is not None:
        message = f"{error.kind}: expected {error.expected}; received {error.received}"
        tool = f"isobit autopsy {shlex.quote(str(folder))}"
        place = name_ranks(error.ranks)
        yield Evidence(str(folder), tool, "hang", one_line(message), None, place)


def of_configuration(path: Path, judgement: Judgement) -> Iterator[Evidence]:
    """Yield what is wrong with the counts of a configuration."""
    for finding in judgement.findings:
        message = f"expected {finding.expected}; received {finding.received}"
        tool = f"isobit preflight {path}"
        yield Evidence(path.name, tool, f"config-{finding.rule}", one_line(message))
