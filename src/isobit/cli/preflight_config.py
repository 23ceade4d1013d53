"""`isobit preflight config.yaml`: judge the counts of a training configuration without running anything."""

from __future__ import annotations

import argparse
from typing import Any

from isobit.cli.config_file import read_config
from isobit.cli.preflight_output import show_report
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.plain_text import one_line
from isobit.guards.configured_steps import MINOR, Judgement, Plan, judge_plan, plan_of
from isobit.guards.trial_run.page import many, write_preflight_page

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# count of a plan -> the option that gives it
OPTIONS = {
    "sequences": "sequences",
    "tokens": "tokens",
    "sequence_length": "sequence_length",
    "parameters": "parameters",
    "ranks": "ranks",
}


def run(options: argparse.Namespace) -> int:
    """Judge the configuration and print what is wrong. The exit code is 2 if steps could not be judged.

    Raises:
        ArgumentError: If the file is no configuration, has a count that is none, or none that can be judged.
    """
    for option in ("config", "declare"):
        if getattr(options, option) is not None:
            raise ArgumentError(
                expected="a script, with --config and --declare; or a configuration alone",
                received=f"the configuration {options.script}, with --{option}",
                remedy=f"name the script: isobit preflight train.py --config {options.script}",
            )
    config = read_config(options.script, "the configuration")
    plan = plan_of(config, given_counts(options), is_strict=True)
    judgement = judge_plan(plan)
    lacking = {name: why for name, why in judgement.not_judged.items() if name != "tokens"}
    if lacking and not judgement.findings:
        raise ArgumentError(
            expected="a configuration whose steps can be judged",
            received=f"{options.script.name}: "
            + "; ".join(f"{name} {why}" for name, why in lacking.items())
            + f"; known: {known_counts(plan) or 'nothing'}",
            remedy="give --sequences N, or --tokens N and --sequence-length N; the rest is read from the file",
        )
    report = as_report(plan, judgement)
    origin = provenance_of(options, [options.script.read_text(errors="replace")])
    if options.html:
        files.write_text(options.html, write_preflight_page(options.script.name, report, origin))
    if options.json:
        say_json({"provenance": origin, "clean": not report["findings"], **report})
    else:
        show_report(make_console(130, soft_wrap=True), options.script.name, report)
    return 1 if report["findings"] else 0


def given_counts(options: argparse.Namespace) -> dict[str, int]:
    """Return the counts that options give."""
    given = {count: getattr(options, option) for count, option in OPTIONS.items()}
    return {count: value for count, value in given.items() if value is not None}


def as_report(plan: Plan, judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as a report of a preflight without steps."""
    findings = [
        {
            "rule": f"config-{each.rule}",
            "severity": "warning" if each.rule in MINOR else "error",
            "message": f"expected {each.expected}; received {each.received}; {each.remedy}",
            "step": None,
            "module": "",
            "ranks": (),
            "steps": (),
        }
        for each in judgement.findings
    ]
    made, every = len(judgement.judged), len(judgement.judged) + len(judgement.not_judged)
    words = f"FOUND: {many(len(findings), 'finding')}" if findings else "nothing found"
    length = "" if judgement.steps is None else f"; the run takes {many(judgement.steps, 'step')}"
    missed = ", ".join(judgement.not_judged)
    return {
        "headline": f"{words} by {made} of {every} rules, with {known_counts(plan)}{length}"
        + (f"; not judged: {missed}" if missed else ""),
        "findings": findings,
        "judged": list(judgement.judged),
        "not_judged": dict(judgement.not_judged),
        "notes": [],
        "dtypes": {},
        "counts": {name: value for name, value in vars(plan).items() if value},
        "run_steps": judgement.steps,
    }


def known_counts(plan: Plan) -> str:
    """Return the counts of a plan in words."""
    names = {
        "sequences": "sequences",
        "per_step": "sequences per step",
        "epochs": "epochs",
        "max_steps": "steps at most",
        "warmup_steps": "steps of warm-up",
        "warmup_ratio": "of the steps as warm-up",
        "sequence_length": "tokens per sequence",
        "parameters": "parameters",
    }
    held = [(getattr(plan, name), words) for name, words in names.items()]
    return one_line(
        ", ".join(
            f"{value:g} {words}" if isinstance(value, float) else f"{value:,} {words}"
            for value, words in held
            if value
        )
    )
