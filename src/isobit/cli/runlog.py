"""`isobit runlog`: judge the logs of training runs. Does not load torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.contracts.language.load import load_contract
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError
from isobit.foundation.files import write_text
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import Provenance
from isobit.guards.config_file import read_config
from isobit.guards.run_log.curves import NAMES, Curve, RunLog
from isobit.guards.run_log.page import Mark, Section, draw_run, write_run_page
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import Limits, LogFinding, Verdict, judge_log, schedule_in
from isobit.guards.run_log.same import Sameness, compare_logs
from isobit.guards.trial_run.report import many


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "runlog",
        description="Read the log of a run (JSON lines, CSV, transformers' trainer_state.json, events of "
        "isobit.guards.watch or of TensorBoard, a run of MLflow, what a trainer printed) and report numbers that are "
        "not finite, losses that hide such numbers, a loss whose exponential mean over 100 steps rises by more than "
        "5 % over 500 steps and by more than its noise (FALSIFY-ALBOR-001), gradient norms above the limit "
        "(FALSIFY-ALBOR-002), spikes, plateaus, missing steps, and learning rates other than the configuration's. With "
        "--same, compare two logs step by step instead. No tracker's package is needed. Exit 0: nothing found; 1: "
        "findings; 2: could not read, or could not judge what was asked for: the norms with --max-norm, the rates with "
        "--config.",
        epilog="examples: isobit runlog out/trainer_state.json --html run.html; isobit runlog a.jsonl b.jsonl --same",
    )
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="a file, a folder of TensorBoard's event files, or mlruns or mlflow.db; each is judged by itself",
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="ID",
        help="which run of MLflow, by id or name, if there are several",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with learning_rate, lr_scheduler_type (constant, linear, cosine), warmup_steps, max_steps: "
        "what the learning rates must be (MLflow: by default the run's parameters)",
    )
    parser.add_argument(
        "--warmup",
        type=whole,
        default=Limits.warmup,
        metavar="STEPS",
        help="steps that are not judged for a rising loss (default: %(default)s)",
    )
    parser.add_argument(
        "--max-norm",
        type=positive,
        help=f"limit of the gradient norm after clipping (default: {Limits.max_norm:g})",
    )
    parser.add_argument(
        "--columns",
        type=columns_of,
        action="append",
        default=[],
        metavar="CURVE=NAME,…",
        help="columns that have other names than the usual ones: loss, grad_norm, lr or step, as "
        "loss=train/nll,grad_norm=gn; repeatable; grad_norm= states that there is none",
    )
    parser.add_argument(
        "--same",
        type=tolerance_of,
        nargs="?",
        const=0.0,
        metavar="TOLERANCE",
        help="compare two logs instead: the first step at which loss, norm or rate differ, by more than this share of "
        "the larger value (default: 0); written after the logs",
    )
    parser.add_argument(
        "--norms",
        choices=("auto", "clipped", "unclipped"),
        default="auto",
        help="whether norms were logged after or before clipping (auto: before, in a trainer_state.json)",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the curves with the findings marked; of one log, or of two with --same",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def whole(text: str) -> int:
    """Parse a number of steps."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, received {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, received {text!r}")
    return value


def columns_of(text: str) -> dict[str, str]:
    """Parse names of columns by curve; a name may have commas if what follows one is no curve."""
    known = (*NAMES, "step")
    found: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        curve, sign, name = part.partition("=")
        if sign and curve.strip() in known:
            last = curve.strip()
            found[last] = name.strip()
        elif last and found[last]:
            found[last] += f",{part}"
        else:
            raise argparse.ArgumentTypeError(
                f"expected CURVE=NAME with a curve of {', '.join(known)}, received {part!r}"
            )
    return found


def tolerance_of(text: str) -> float:
    """Parse a tolerance: a number from 0 up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"expected a tolerance from 0 up to 1, such as 1e-4, received {text!r} (write --same after the logs)"
        )
    return value


def run(options: argparse.Namespace) -> int:
    """Judge every log, or compare two, and print what was found."""
    columns = {curve: name for each in options.columns for curve, name in each.items()}
    wanted = 2 if options.same is not None else 1
    if options.same is not None and len(options.logs) != 2:
        raise ArgumentError(
            expected="two logs with --same",
            received=f"{len(options.logs)} logs",
            remedy="name two: isobit runlog A B --same",
        )
    if options.svg is not None and len(options.logs) > wanted:
        raise ArgumentError(
            expected="one log with --svg",
            received=f"{len(options.logs)} logs",
            remedy="draw them one at a time, or write --html",
        )
    config = None if options.config is None else read_config(options.config)
    logs = [read_log(path, options.run, columns) for path in options.logs]
    origin = provenance_of(options, [log.digest() for log in logs])
    if options.same is not None:
        return compare(options, logs[0], logs[1], origin)
    max_norm = Limits.max_norm if options.max_norm is None else options.max_norm
    limits = Limits(options.warmup, max_norm, options.norms, config)
    judged = [
        Judged(log, with_causes(judge_log(log, limits)), asked_for(options, log)) for log in logs
    ]
    if options.svg is not None:
        write_text(options.svg, picture(judged[0], origin, config))
    if options.html is not None:
        sections = [section_of(each, origin, config) for each in judged]
        title = f"Log of {judged[0].name}" if len(judged) == 1 else f"Logs of {len(judged)} runs"
        write_text(options.html, write_run_page(title, sections, origin))
    if options.json:
        say_json({"provenance": origin, "logs": [as_record(each) for each in judged]})
    else:
        console = make_console(140, soft_wrap=True)
        for each in judged:
            show(console, each)
    if not all(each.verdict.is_kept for each in judged):
        return 1
    return 2 if any(each.unanswered for each in judged) else 0


@dataclass(frozen=True)
class Judged:
    """A log, the verdict on it, and the rules that the user asked for by an option."""

    log: RunLog
    verdict: Verdict
    asked: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the file or folder."""
        return Path(self.log.path).name

    @property
    def unanswered(self) -> list[str]:
        """Rules that were asked for and could not be judged."""
        return [rule for rule in self.verdict.not_judged if rule in self.asked]


def asked_for(options: argparse.Namespace, log: RunLog) -> frozenset[str]:
    """Return the rules that a user counts on: those of given options, and of a norm that has an unknown name."""
    asked = set()
    if options.config is not None:
        asked.add("schedule")
    if options.norms != "unclipped" and (
        options.max_norm is not None or options.norms == "clipped" or log.norm_like
    ):
        asked.add("norm-limit")
    return frozenset(asked)


def compare(options: argparse.Namespace, a: RunLog, b: RunLog, origin: Provenance) -> int:
    """Compare two logs, and print what differs."""
    found = compare_logs(a, b, options.same)
    words = same_sentence(a, b, found, options.same)
    title, _, about = words.partition("; ")
    drawn = draw_run(
        title, about, a.curves, marks_of(found.findings), origin, b.curves, Path(b.path).name
    )
    if options.svg is not None:
        write_text(options.svg, drawn)
    if options.html is not None:
        findings = [asdict(each) for each in found.findings]
        tone = "good" if found.is_same else "bad"
        section = Section(f"{a.path} and {b.path}", tone, words, findings, {}, drawn)
        write_text(options.html, write_run_page("Two logs compared", [section], origin))
    if options.json:
        paths = {"a": a.path, "b": b.path, "tolerance": options.same, "same": found.is_same}
        say_json({"provenance": origin, **paths, **asdict(found)})
    else:
        console = make_console(140, soft_wrap=True)
        show_findings(console, found.findings)
        console.print(one_line(words))
    return 0 if found.is_same else 1


def same_sentence(a: RunLog, b: RunLog, found: Sameness, tolerance: float) -> str:
    """Return the verdict of a comparison with its denominators."""
    first = next((f for f in found.findings if f.rule == "differs-loss"), None)
    verdict = (
        "same"
        if found.is_same
        else f"DIFFER, losses first at step {first.step}"
        if first is not None
        else "DIFFER"
    )
    counts = ", ".join(f"{count:,} of {name}" for name, count in found.compared.items())
    allowed = f"up to {tolerance:g} of the larger value" if tolerance else "equal as logged"
    return (
        f"{Path(a.path).name} and {Path(b.path).name}: {verdict} (DIST-002); {counts} compared, {allowed}"
        + "".join(f"; {name} is in one log only" for name in found.one_sided)
        + "".join(
            f"; {count:,} steps of the {which} are outside of the other's"
            for which, count in zip(("first", "second"), found.beyond, strict=True)
            if count
        )
        + (f"; {found.nonfinite:,} equal values are not finite" if found.nonfinite else "")
    )


def with_causes(verdict: Verdict) -> Verdict:
    """Add the likely causes that the contract training-stability-v1 has for its claims."""
    if not any(finding.claim for finding in verdict.findings):
        return verdict
    contract = load_contract(library() / "training_stability" / "contract.yaml")
    known = {claim.id: claim.if_fails for claim in contract.claims}
    found = [
        replace(finding, causes=known[finding.claim]) if finding.claim else finding
        for finding in verdict.findings
    ]
    return replace(verdict, findings=tuple(found))


def marks_of(findings: Sequence[LogFinding]) -> list[Mark]:
    """Return the findings as marks of a picture."""
    return [
        (f.step, f"{f.rule}: {f.message}", f.severity != "info", f.steps or (f.step,))
        for f in findings
    ]


def picture(judged: Judged, origin: Any, config: Any = None) -> str:
    """Return the picture of a log, with the learning rates of the configuration if the log has others."""
    log, verdict = judged.log, judged.verdict
    title, _, about = sentence(judged).partition("; ")
    wanted = {}
    if any(finding.rule == "schedule" for finding in verdict.findings):
        schedule = schedule_in(config if config is not None else log.config or {}, log.max_steps)
        wanted["lr"] = Curve((step, schedule.rate(step)) for step, _ in log.curves["lr"])
    return draw_run(title, about, log.curves, marks_of(verdict.findings), origin, wanted)


def section_of(judged: Judged, origin: Any, config: Any) -> Section:
    """Return a log as a section of a page."""
    verdict = judged.verdict
    return Section(
        judged.log.path,
        "bad" if not verdict.is_kept else "warn" if judged.unanswered else "good",
        sentence(judged),
        [asdict(finding) for finding in verdict.findings],
        verdict.not_judged,
        picture(judged, origin, config),
    )


def as_record(judged: Judged) -> dict[str, Any]:
    """Return a log and its verdict for JSON; the curves stay in the log."""
    log, verdict = judged.log, judged.verdict
    return {
        "path": log.path,
        "form": log.form,
        "rows": log.rows,
        "skipped": log.skipped,
        "unreadable": log.unreadable,
        "cut": log.cut,
        "unused": dict(log.unused),
        "worded": log.worded,
        "replaced": log.replaced,
        "resumed": log.resumed,
        "resumes": log.resumes,
        "entries": {name: len(points) for name, points in log.curves.items()},
        "kept": verdict.is_kept,
        "unanswered": judged.unanswered,
        **asdict(verdict),
    }


def show_findings(console: Console, findings: Sequence[LogFinding]) -> None:
    """Print a table of findings, with the numbers that they have in a picture."""
    if not findings:
        return
    table = Table("no.", "step", "rule", "severity", "found", "likely causes")
    for number, finding in enumerate(findings, 1):
        table.add_row(
            str(number),
            str(finding.step),
            one_line(finding.rule),
            finding.severity,
            one_line(finding.message),
            one_line(finding.causes),
        )
    console.print(table)


def show(console: Console, judged: Judged) -> None:
    """Print the findings with their likely causes, what was not judged, and the sentence."""
    show_findings(console, judged.verdict.findings)
    for rule, reason in judged.verdict.not_judged.items():
        could = "could not judge" if rule in judged.unanswered else "not judged"
        console.print(one_line(f"{could}: {rule}: {reason}"))
    console.print(one_line(sentence(judged)))


def sentence(judged: Judged) -> str:
    """Return the verdict with its denominators."""
    log, verdict = judged.log, judged.verdict
    unanswered = ", ".join(judged.unanswered)
    word = (
        "BROKEN" if not verdict.is_kept else f"NOT JUDGED ({unanswered})" if unanswered else "kept"
    )
    left = ", ".join(verdict.not_judged)
    losses = log.curves["loss"]
    entries = ", ".join(f"{len(points):,} of {name}" for name, points in log.curves.items())
    counts = sum(finding.severity != "info" for finding in verdict.findings)
    every = len(verdict.judged) + len(verdict.not_judged)
    return (
        f"{judged.name} ({log.form}): {word}: {many(counts, 'finding')}; "
        f"{len(verdict.judged)} of {every} rules judged{f' (not {left})' if left else ''} over {entries}, "
        f"steps {losses[0][0]}–{losses[-1][0]}"
        + (f"; {log.skipped:,} of {log.rows:,} entries have none of these" if log.skipped else "")
        + "".join(f"; {count:,} of {name} not used" for name, count in log.unused.items())
        + (f"; {log.worded:,} numbers are null or words, and not finite" if log.worded else "")
        + (
            f"; {log.replaced:,} entries were logged again, and the later ones count"
            if log.replaced
            else ""
        )
    )
