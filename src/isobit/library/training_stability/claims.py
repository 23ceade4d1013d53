"""Claims of training-stability-v1: a training program, run under the guards that users have, breaks no rule.

A predicate takes a subject, which trains on drawn tokens as a `Plan` says. It runs it under `isobit.guards.preflight`
or under a watch, or reads its log by the rules of `isobit runlog`. Findings of other
rules do not count in a claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.guards import preflight
from isobit.guards.run_log.curves import Rows
from isobit.guards.run_log.rules import Limits, judge_log
from isobit.library.claims import on_one_thread
from isobit.library.training_stability.program import Plan, Program, plan_of

Subject = Callable[..., Program]
STABLE_STEPS = 100  # FALSIFY-STABLE-001
DEEP, EXPLODING = 24, 30.0  # layers and gain: gradients of about 1e35 (FALSIFY-EMBEDGRAD-001)
CLOSE = 1e-5  # relative: a first moment after one step is a product of two numbers


def program_of(subject: Subject, plan: Plan, case: Case) -> Callable[[], Program]:
    """Return the subject's program for a plan of this case, to be called."""
    options = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "tokens"}
    return partial(subject, case.arguments["x"], **options)


def drawn_plan(case: Case, steps: int, **more: Any) -> Plan:
    """Return a plan whose tokens and weights are drawn."""
    return plan_of(case.arguments["x"], steps, seed=case.recipe.seed, **more)


def judge_run(
    subject: Subject, plan: Plan, case: Case, tally: Tally, rules: tuple[str, ...]
) -> None:
    """Run a program under preflight; count a comparison per step and parameter, and findings of the rules."""
    report = preflight(program_of(subject, plan, case), steps=plan.steps, config=plan.config)
    tally.count(len(plan.tokens))
    tally.compared += report.steps * report.parameters
    if report.steps != plan.steps:
        tally.fail(f"{report.steps} of {plan.steps} steps were taken")
    for finding in report.findings:
        if finding.rule.startswith(rules):
            where = f" at step {finding.step}" if finding.step is not None else ""
            tally.fail(f"{finding.rule}{where}: {finding.module} {finding.message}")


@on_one_thread
def stays_finite(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-STABLE-001: for 100 steps from random weights every loss, gradient and weight is finite."""
    plan = drawn_plan(case, STABLE_STEPS, layers=1, shares=1)
    judge_run(subject, plan, case, tally, ("nonfinite",))


@on_one_thread
def reads_clipped_gradients(subject: Subject, case: Case, tally: Tally) -> None:
    """Every optimizer, also one of another path, reads gradients within the limit, finite and not zero."""
    plan = drawn_plan(case, 5, layers=DEEP, gain=EXPLODING, offloaded=True)
    rules = ("norm-above-limit", "nonfinite", "zero-gradient", "no-gradient")
    judge_run(subject, plan, case, tally, rules)


@on_one_thread
def reaches_every_optimizer(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-HYPERPARAMS-001: every hyperparameter of the configuration is in every optimizer."""
    plan = drawn_plan(case, 2, offloaded=True)
    judge_run(subject, plan, case, tally, ("hyperparameter",))


@on_one_thread
def gradients_flow(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-GRADFLOW-001: after one step every trainable parameter has had a gradient other than zero."""
    plan = drawn_plan(case, 1)
    rules = ("no-gradient", "zero-gradient", "not-in-optimizer", "nothing-trainable")
    judge_run(subject, plan, case, tally, rules)


@on_one_thread
def state_starts_at_zero(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-GPUINIT-001: after the first step the moments are those of its gradient alone."""
    plan, seen = drawn_plan(case, 2, offloaded=True), set[int]()

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                first, second = (
                    (1 - beta) * power
                    for beta, power in zip(
                        group["betas"], (parameter.grad, parameter.grad**2), strict=True
                    )
                )
                tally.true(close(state["exp_avg"], first), "exp_avg", state["exp_avg"])
                tally.true(close(state["exp_avg_sq"], second), "exp_avg_sq", state["exp_avg_sq"])

    handle = register_optimizer_step_post_hook(after)
    try:
        judge_run(subject, plan, case, tally, ("state-not-zero",))
    finally:
        handle.remove()
    if len(seen) != 2:
        tally.fail(f"{len(seen)} of 2 optimizers took a step")


def close(found: Tensor, wanted: Tensor) -> Tensor:
    """Return where two tensors are equal up to rounding."""
    return (found - wanted).abs() <= CLOSE * wanted.abs() + 1e-30


@on_one_thread
def state_is_resumed(subject: Subject, case: Case, tally: Tally) -> None:
    """A resumed run has the optimizer state of its checkpoint, and ends with the bits of a run in one piece."""
    plan = drawn_plan(case, 6, offloaded=True, resume_at=3)
    resumed = program_of(subject, plan, case)()
    whole = Program(replace(plan, resume_at=None)).train()
    tally.count(len(plan.tokens))
    tally.compared += len(resumed.watches)
    if len(resumed.watches) != len(resumed.optimizers):
        tally.fail(f"{len(resumed.watches)} of {len(resumed.optimizers)} optimizers were watched")
    for finding in (finding for each in resumed.watches for finding in each.findings):
        if finding.name == "state-not-resumed":
            tally.fail(str(finding))
    for (name, ours), theirs in zip(
        resumed.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        tally.same(ours.detach(), theirs.detach(), name)


def judge_curves(
    subject: Subject, plan: Plan, case: Case, tally: Tally, rule: str, limits: Limits
) -> Program:
    """Train, and read the program's log as `isobit runlog` does; count the findings of one rule."""
    program = program_of(subject, plan, case)()
    rows = Rows()
    for entry in program.log:
        rows.add(entry)
    verdict = judge_log(rows.as_log(Path("log"), "jsonl"), limits)
    tally.count(len(plan.tokens))
    tally.compared += len(program.log)
    if reason := verdict.not_judged.get(rule):
        tally.fail(f"{rule} was not judged: {reason}")
    for finding in verdict.findings:
        if finding.rule == rule:
            tally.fail(f"{rule} at step {finding.step}: {finding.message}")
    return program


@on_one_thread
def rates_follow_the_configuration(subject: Subject, case: Case, tally: Tally) -> None:
    """Every step has the learning rate of the schedule, all steps are taken, and the peak is reached."""
    plan = drawn_plan(case, 60)
    program = judge_curves(subject, plan, case, tally, "schedule", Limits(config=plan.config))
    tally.compared += 2
    if len(program.log) != plan.steps:
        tally.fail(f"{len(program.log)} of {plan.steps} steps were taken")
    peak, most = plan.config["learning_rate"], max(e["learning_rate"] for e in program.log)
    if abs(most - peak) > CLOSE * peak:
        tally.fail(f"the highest learning rate is {most:g}, of {peak:g}")


@on_one_thread
def loss_falls(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-ALBOR-001: after warm-up, the exponential mean of the loss rises by at most 5 % over 500 steps."""
    plan = drawn_plan(case, 560, layers=0, shares=1)
    limits = Limits(warmup=plan.config["warmup_steps"])
    judge_curves(subject, plan, case, tally, "rising-loss", limits)


@on_one_thread
def norms_are_bounded(subject: Subject, case: Case, tally: Tally) -> None:
    """FALSIFY-ALBOR-002: the logged gradient norm after clipping stays below 10."""
    plan = drawn_plan(case, 20, layers=6, gain=6.0)
    judge_curves(subject, plan, case, tally, "norm-limit", Limits(norms="clipped"))
