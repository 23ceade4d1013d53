"""The judgement of a training configuration, as the report of a preflight without steps. Does not load torch."""

from __future__ import annotations

from typing import Any

from isobit.foundation.plain_text import one_line
from isobit.guards.configured_steps import MINOR, Judgement, Plan
from isobit.guards.trial_run.page import many


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
