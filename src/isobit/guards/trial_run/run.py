"""`preflight`: run the first steps of a training program in this process, and report what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.errors import ArgumentError
from isobit.guards.trial_run.checks import CHECKS
from isobit.guards.trial_run.counts import counts_are_as_configured, steps_suffice
from isobit.guards.trial_run.declaration import Declaration, check_declaration, read_declaration
from isobit.guards.trial_run.hyperparameters import (
    check_hyperparameters,
    check_warm_up,
    expected_limit,
    expected_values,
    name_defaults,
)
from isobit.guards.trial_run.observer import Observer, StepsDone
from isobit.guards.trial_run.report import (
    Found,
    NotJudged,
    PreflightFinding,
    PreflightReport,
    merge_steps,
)

LIVE = "losses, gradients and weights"
CONFIG = "configuration reached the optimizer"
DECLARED = "parameters are as declared"
LATER = "later steps"
COUNTS = "counts are as configured"
STEPS = "configured steps suffice"
OF_AN_OPTIMIZER = ("norm-above-limit", "not-zeroed")


def preflight(
    program: Callable[[], object],
    *,
    steps: int = 3,
    config: Mapping[str, Any] | None = None,
    declare: Mapping[str, Any] | None = None,
) -> PreflightReport:
    """Run a training program for a few optimizer steps and report what is wrong.

    Hooks on all modules and optimizers are added for this time. After the last step the program is ended by a
    BaseException, so that its `finally` blocks run.

    Args:
        program: A function that trains. It is called once.
        steps: Steps of the first optimizer that steps.
        config: Hyperparameters that the optimizer must have, and `max_grad_norm` for the gradients that each optimizer
            reads, by the names of transformers, DeepSpeed or torchtitan. Batch sizes and steps are compared too.
        declare: What only the author knows: `frozen` patterns of names, `tied` groups of names, `hyperparameters`,
            `global_batch_size`. No other key is taken.

    Returns:
        The findings, and which checks were made.

    Raises:
        ArgumentError: If the program takes no optimizer step, or a declaration is not as above.

    Example:
        >>> from isobit.guards import preflight
        >>> def train():
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ...     for step in range(100):
        ...         model(torch.randn(2, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> report = preflight(train, config={"lr": 0.1, "beta2": 0.95})
        >>> [finding.rule for finding in report.findings]
        ['not-zeroed', 'hyperparameter']
        >>> print(report.findings[1].message)
        beta2 is 0.95 in the configuration and 0.999 (AdamW's default) in 1 of 1 parameter groups
    """
    if steps < 1:
        raise ArgumentError(
            expected="at least one step", received=f"steps={steps}", remedy="pass steps=3"
        )
    wanted = Expectations.of(config, declare)
    seen = wanted.observer(steps)
    seen.install()
    try:
        program()
    except StepsDone:
        pass
    finally:
        seen.remove()
    if not seen.watches:
        raise ArgumentError(
            expected="a program that takes an optimizer step",
            received="none: nothing was checked",
            remedy="let it reach optimizer.step() of a torch.optim.Optimizer",
        )
    report = conclude(seen, wanted)
    refuse_unseen(report)
    return report


def refuse_unseen(report: PreflightReport) -> None:
    """Raise ArgumentError if nothing was found, and no model was seen to find anything in."""
    if not report.models and not report.findings:
        raise ArgumentError(
            expected="a program whose steps train a torch.nn.Module",
            received=f"{report.steps} steps, and no call of a model with parameters: nothing was checked",
            remedy="call the model itself, model(x), before each step; a compiled or scripted function, or tensors "
            "without a module, are not seen",
        )


@dataclass(frozen=True)
class Expectations:
    """The configuration and the declaration of a run."""

    config: Mapping[str, Any]
    declared: Declaration | None

    @classmethod
    def of(
        cls, config: Mapping[str, Any] | None, declare: Mapping[str, Any] | None
    ) -> Expectations:
        """Read both; what is declared counts more than the configuration."""
        declared = None if declare is None else read_declaration(declare)
        return cls({**(config or {}), **(declared.hyperparameters if declared else {})}, declared)

    def observer(self, steps: int) -> Observer:
        """Return an observer for one program."""
        return Observer(steps, expected_limit(self.config), self.config)

    def checks(self) -> dict[str, Callable[[Observer], Iterator[Found]]]:
        """Return every check, by name."""
        size = self.declared.global_batch_size if self.declared else None
        return {
            **CHECKS,
            DECLARED: lambda seen: self.check_declared(seen),
            COUNTS: lambda seen: counts_are_as_configured(seen.counts(), self.config, size),
            STEPS: lambda seen: steps_suffice(seen.counts(), self.config, seen.peak),
        }

    def check_declared(self, seen: Observer) -> Iterator[Found]:
        """Check what is declared of parameters."""
        if self.declared is None or not (self.declared.frozen or self.declared.tied):
            raise NotJudged("no declaration of frozen or tied parameters was given")
        yield from check_declaration(seen, self.declared)


def findings_of(seen: Observer) -> list[PreflightFinding]:
    """Return what the watches of all optimizers found; with several, the optimizer is named."""
    found: dict[PreflightFinding, None] = {}
    for watch in seen.watches.values():
        for event in watch.findings:
            words = event.message
            if len(seen.watches) > 1 and event.name in OF_AN_OPTIMIZER:
                words = f"{type(watch.optimizer).__name__}: {words}"
            found[PreflightFinding(event.name, event.severity, words, event.step, event.module)] = (
                None
            )
    return list(found)


def conclude(
    seen: Observer,
    wanted: Expectations,
    leave_out: tuple[str, ...] = (),
    checks: tuple[str, ...] | None = None,
) -> PreflightReport:
    """Make the checks that follow the steps, and collect what the watches found.

    Args:
        seen: The program.
        wanted: The configuration and the declaration.
        leave_out: Checks that are not made.
        checks: The only checks that are made; None for all.
    """
    found = findings_of(seen)
    judged, skipped = (
        [LIVE if seen.max_norm is None else f"{LIVE}, norm up to {seen.max_norm:g}"],
        {},
    )
    for name, check in wanted.checks().items():
        if name in leave_out or (checks is not None and name not in checks):
            continue
        try:
            for each in check(seen):  # what was found before a reason not to judge counts
                found.append(PreflightFinding(*each))
            judged.append(name)
        except NotJudged as reason:
            skipped[name] = str(reason)
    expected = expected_values(wanted.config)
    if expected:
        wrong = check_hyperparameters(expected, seen.optimizers, wanted.config)
        found += [PreflightFinding("hyperparameter", "error", message) for message in wrong]
        found += [
            PreflightFinding("no-warm-up", "error", message)
            for message in check_warm_up(seen.rates, wanted.config, expected.get("lr"))
        ]
        judged.append(f"{CONFIG} ({', '.join(expected)})")
    else:
        skipped[CONFIG] = "no configuration with hyperparameters was given"
    notes = [each for each in found if each.severity == "info"]
    notes += [
        PreflightFinding("default-hyperparameters", "info", message)
        for message in name_defaults(expected, seen.optimizers)
    ]
    found = [each for each in found if each.severity != "info"]
    models = [model for model, _ in seen.roots.values()]
    count = len({id(p) for model in models for p in model.parameters()})
    steps = next(iter(seen.watches.values())).steps
    if not seen.is_over:
        skipped[LATER] = f"the program ended by itself after {steps} of {seen.steps} steps"
    return PreflightReport(
        steps,
        len(models),
        count,
        tuple(merge_steps(found)),
        tuple(judged),
        skipped,
        seen.census.as_record(),
        notes=tuple(notes),
    )
