"""Diagnose a run: gather evidence, find the cause among it, and answer three questions about it.

[Note: Which granularity, local or global, static or dynamic]
A run that fails leaves many findings, most of them consequences. The cause is looked for in this order: what is wrong
before the first step (static: a configuration, an optimizer without a parameter, state that is not zero), then what
came first in time, and of one step the most specific: a copy or a kernel before a block, a block before the loop. A
finding is local if it names some of the blocks, ranks or operators, and global if it names none or most of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.diagnosing.run_folder import RunFiles
from isobit.errors import IsobitError
from isobit.foundation.files import read_bytes
from isobit.foundation.plain_text import one_line
from isobit.guards.configured_steps import Judgement, judge_plan, plan_of
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import judge_log
from isobit.profiling.api import profile_traces
from isobit.profiling.trace import read_traces
from isobit.profiling.transfers import unordered
from isobit.simulator.autopsy.examine import examine

LARGEST = 1 << 28  # bytes of a file of events
WHYS = 5
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
}
OTHERS = Rule("loop", "dynamic")
CONFIGURED = Rule("loop", "static", "C-TRAINCFG-001", "isobit preflight train.yaml --sequences N")
# What does not move may be what a gradient that overflowed left behind.
FOLLOWS = ("not-moved", "state-nonfinite", "nonfinite-weight")
# A loss or a logged norm that grows or ends is what the others lead to, also where it was logged first.
SYMPTOMS = (
    "nonfinite-loss", "nonfinite", "hidden-nonfinite", "rising-loss", "spikes", "plateau", "norm-limit",
)  # fmt: skip


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

    def gather(kind: str, path: Path, evidence: Iterator[Evidence]) -> None:
        try:
            found.extend(evidence)
            judged[kind] = judged.get(kind, 0) + 1
        except (IsobitError, OSError, ValueError, RecursionError) as error:
            unreadable[str(path)] = one_line(str(error))[:300]

    blocks: set[str] = set()
    for path in files.events:
        gather("events of watch", path, of_events(path, blocks))
        gather("logs", path, of_log(path))
    for path in files.logs:
        gather("logs", path, of_log(path))
    if files.traces:
        gather("traces", files.traces[0], of_traces(files.traces))
    for path in files.dumps:
        gather("folders of dumps", path, of_dumps(path))
    for path, values in (configurations or {}).items():
        try:
            judgement = judge_plan(plan_of(dict(values), {}, is_strict=False))
        except (IsobitError, ValueError) as error:
            unreadable[str(path)] = one_line(str(error))[:300]
            continue
        # One without a count that a rule needs, as a model's own config.json, says nothing of the run.
        if judgement.judged or judgement.findings:
            gather("configurations", path, of_configuration(path, judgement))
    return conclude(str(files.folder), found, blocks, judged, unreadable)


def conclude(
    folder: str,
    found: list[Evidence],
    blocks: set[str],
    judged: dict[str, int],
    unreadable: dict[str, str],
) -> Diagnosis:
    """Choose the cause, and put the others between it and the symptom."""
    ordered = sorted(dict.fromkeys(found), key=earliness)
    if not ordered:
        return Diagnosis(folder, (), None, judged=judged, unreadable=unreadable)
    cause = ordered[0]
    chain = [cause]
    for evidence in ordered[1:]:
        if evidence.rule not in {one.rule for one in chain}:
            chain.append(evidence)
    return Diagnosis(
        folder=folder,
        evidence=tuple(ordered),
        cause=cause,
        whys=tuple(reversed(chain[:WHYS])),
        granularity=cause.meaning.granularity,
        extent=extent_of(cause, ordered, blocks),
        when=cause.meaning.when,
        contract=cause.meaning.contract,
        next=cause.meaning.next or cause.tool,
        judged=judged,
        unreadable=unreadable,
    )


def earliness(evidence: Evidence) -> tuple[int, float, bool, int, str, str]:
    """Return a key that sorts causes before what follows from them."""
    meaning = evidence.meaning
    step = float("inf") if evidence.step is None else float(evidence.step)
    # Time that is lost explains no wrong number, and a wrong number no lost time: a hang comes before both.
    rank = 2 if evidence.rule in SYMPTOMS else int(meaning.when != "static")
    if evidence.rule in FOLLOWS:
        rank = 1
    return (
        rank,
        -1.0 if evidence.rule in ("hang", "unordered-copy") else step,
        evidence.rule in FOLLOWS,
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


def of_events(path: Path, blocks: set[str]) -> Iterator[Evidence]:
    """Yield the findings that watch wrote; `blocks` receives the blocks that metrics and findings name."""
    text = read_bytes(path, LARGEST).decode("utf-8", "replace")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if not isinstance(entry, dict):
            continue
        message = one_line(str(entry.get("message", "")))[:300]
        place = str(entry.get("module", ""))[:200]
        if place:
            blocks.add(block_of(place))
        if entry.get("kind") != "finding" or entry.get("severity") == "info":
            continue
        step = entry.get("step")
        yield Evidence(
            source=path.name,
            tool=f"isobit runlog {path}",
            rule=str(entry.get("name", ""))[:80],
            message=message,
            step=step if type(step) is int else None,
            place=place or parameter_in(message),
        )


def parameter_in(message: str) -> str:
    """Return the first name of a parameter in a message, such as layers.3.mlp.weight; "" if there is none."""
    found = PARAMETER.search(message)
    return found[0] if found else ""


def of_log(path: Path) -> Iterator[Evidence]:
    """Yield what `isobit runlog` finds in a log."""
    for finding in judge_log(read_log(path)).findings:
        if finding.severity != "info" and not finding.rule.startswith("watch: "):
            yield Evidence(
                source=path.name,
                tool=f"isobit runlog {path}",
                rule=finding.rule,
                message=finding.message,
                step=finding.step,
            )


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
    error = examine(folder).finding
    if error is not None:
        ranks = ", ".join(map(str, error.ranks[:8]))
        message = f"{error.kind}: expected {error.expected}; received {error.received}"
        tool = f"isobit autopsy {folder}"
        yield Evidence(str(folder), tool, "hang", one_line(message), None, f"ranks {ranks}")


def of_configuration(path: Path, judgement: Judgement) -> Iterator[Evidence]:
    """Yield what is wrong with the counts of a configuration."""
    for finding in judgement.findings:
        message = f"expected {finding.expected}; received {finding.received}"
        tool = f"isobit preflight {path}"
        yield Evidence(path.name, tool, f"config-{finding.rule}", one_line(message))
