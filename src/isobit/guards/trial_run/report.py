"""The findings of a preflight, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreflightFinding:
    """A check that a program does not pass.

    Attributes:
        rule: The rule, as in docs/how-to/before-you-rent-the-gpus.md.
        severity: "warning" or "error"; "info" of what is no finding.
        message: What was found.
        step: The first step, if it is known.
        module: The module or parameter concerned.
        ranks: The ranks concerned, if there are several.
        steps: All steps in which it was found.

    Example:
        >>> from isobit.guards import PreflightFinding
        >>> PreflightFinding("same-batch", "warning", "the inputs of 3 steps have the same bits").rule
        'same-batch'
    """

    rule: str
    severity: str
    message: str
    step: int | None = None
    module: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight found.

    Attributes:
        steps: Optimizer steps that were observed.
        models: Models that the program called.
        parameters: Their parameters.
        findings: What is wrong.
        judged: Checks that were made.
        not_judged: Checks that were not, with the reason.
        dtypes: Calls of modules without submodules, by class and dtype of the output.
        ranks: Simulated ranks; 1 for a program that ran by itself.
        notes: What is not wrong by itself, such as hyperparameters that nobody has named.

    Example:
        >>> from isobit.guards import PreflightReport
        >>> PreflightReport(3, 1, 2, (), ("batches differ",)).is_clean
        True
    """

    steps: int
    models: int
    parameters: int
    findings: tuple[PreflightFinding, ...]
    judged: tuple[str, ...]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ranks: int = 1
    notes: tuple[PreflightFinding, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings
