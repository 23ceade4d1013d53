"""What an audit found, as plain records: no torch, so that reports can be drawn anywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from isobit.foundation.records import Provenance

AXES = (
    "batch",
    "padding",
    "packing",
    "decode",
    "chunks",
    "threads",
    "repeat",
    "compile",
    "tp",
    "dp",
)
DEFAULT_AXES = ("batch", "padding", "decode", "repeat")
WITHOUT_BACKWARD = ("decode", "chunks")  # cached calls
ORDER, ERROR, RANDOM = "order", "error", "random"


@dataclass(frozen=True)
class Place:
    """Where an operator was called.

    Attributes:
        operator: its name, such as `aten::mm`.
        module: the path of the innermost module that called it, "" for the model itself.
        source: file and line of the first caller outside torch.
        call: its number among all calls of the run.
        backward: whether it ran in the backward pass.
    """

    operator: str
    module: str = ""
    source: str = ""
    call: int = 0
    backward: bool = False

    @property
    def family(self) -> str:
        """The operator and its module with layer numbers replaced by *: what `--blame class` groups by."""
        path = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", self.module)
        return f"{self.operator} in {path or 'the model'}{' (backward)' if self.backward else ''}"

    @property
    def layer(self) -> str:
        """The module's path up to its first number, such as `model.layers.2`: what `--blame layer` groups by."""
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", self.module)
        return found.group(0) if found else self.module.split(".")[0] or "the model"

    def __str__(self) -> str:
        backward = ", backward" if self.backward else ""
        return f"{self.operator} in {self.module or 'the model'}{backward}"


@dataclass(frozen=True)
class Effect:
    """How far two results of one quantity differ.

    Attributes:
        quantity: what was compared: "log-probabilities", "loss", "gradients" or a tensor's name.
        differ: numbers that differ in any bit, of `numbers`.
        largest: the largest |difference|.
        k3: mean(e^d − 1 − d), for log-probabilities.
        flips: positions at which another token is the likeliest, of `positions`.
        outside: the share of e^d outside [0.8, 1.2], for log-probabilities.
    """

    quantity: str
    numbers: int
    differ: int
    largest: float
    k3: float | None = None
    flips: int | None = None
    positions: int = 0
    outside: float | None = None


@dataclass(frozen=True)
class Accuracy:
    """How far both results of an operator are from a wider reference.

    Attributes:
        reference: "fp64", or "none" where the operator has no wider executor.
        run: the largest error of the audited run's result, as a multiple of what rounding can explain.
        variant: the same for the variant's result. An error of a sum in any order is at most 1.
        isobit: the same for isobit's operator, where there is one.
        approximation: True if an error is larger than rounding explains, but not than an approximation of exp, tanh or
            a root would explain.
    """

    reference: str
    run: float | None = None
    variant: float | None = None
    isobit: float | None = None
    approximation: bool = False


@dataclass(frozen=True)
class FirstDifference:
    """The first element that differs: its index and both values with their bits."""

    index: tuple[int, ...]
    run: float
    variant: float
    run_bits: str
    variant_bits: str


@dataclass(frozen=True)
class Guilty:
    """An operator that gives other bits for the same inputs when only the axis changes.

    Attributes:
        place: where it was called.
        axis: which axis changes its result.
        elements: how many elements differ, of `of`.
        ulps: the largest distance in units in the last place, or None where a NaN is involved.
        largest: the largest |difference|.
        kind: "order" (both results are as accurate as rounding allows), "error" (one of them is not),
            or "random" (it draws random numbers).
        accuracy: the errors behind `kind`.
        first: the first element that differs.
        shapes: shapes of the inputs in the audited run and in the variant, as text.
        share: the part of the axis's whole effect that this operator makes; shares of an axis add up to 1.
        effect: what substituting this operator's result changes.
        orders: a `reveal.certificate.OrderComparison` of the operator at both shapes, where it sums and was revealed.
        why_no_order: why there is none.
        remedy: what to use instead.
        price: time of isobit's operator over time of this one at this shape, where there is one.
        unread: True if nothing in the run reads the results that differ, such as the logsumexp of an attention without
            a backward pass.
    """

    place: Place
    axis: str
    elements: int
    of: int
    ulps: int | None
    largest: float
    kind: str
    accuracy: Accuracy
    first: FirstDifference | None = None
    shapes: tuple[str, str] = ("", "")
    share: float | None = None
    effect: Effect | None = None
    orders: Any = None
    why_no_order: str = ""
    remedy: str = ""
    price: float | None = None
    unread: bool = False

    @property
    def is_error(self) -> bool:
        """True if a result that something reads is less accurate than rounding explains."""
        return self.kind == ERROR and not self.unread


@dataclass(frozen=True)
class Unjudged:
    """An operator without a verdict, and why."""

    place: Place
    axis: str
    reason: str


@dataclass(frozen=True)
class Group:
    """Guilty operators whose effect was measured together."""

    name: str
    members: int
    share: float | None
    effect: Effect | None


@dataclass(frozen=True)
class AxisReport:
    """What an audit found on one axis.

    Attributes:
        axis: its name.
        variation: what changes, as a sentence: "sample 0 of 8 runs alone".
        sides: short names of the audited run and of the variant, such as ("batch of 8", "alone").
        operators: calls of operators in the audited run.
        exact: those that only move bits, compute integers, or have no row of the sample.
        judged: those whose result was compared.
        guilty: the largest share of the effect first.
        unjudged: those without a verdict.
        carriers: judged operators that are not guilty, but whose results differ because their inputs do.
        effect: how far the variant's results differ from the audited run's.
        remaining: the same after every guilty operator's result was substituted.
        step: how far weights differ after one step of AdamW, where gradients were audited.
        complete: True if nothing remains: the substituted run is the variant, bit for bit.
        why_not: if not complete, why.
        not_compared: outputs that are one number over all samples, such as a loss, of which none is a sample's.
        groups: effects by group, if guilty operators were measured together.
        grouped_by: "one", "class", "layer" or "bisect".
        forwards: runs of the model that measuring the effect took.
        seconds: time of one plain run ("forward"), of finding ("find") and of measuring the effect ("rank").
    """

    axis: str
    variation: str
    sides: tuple[str, str]
    operators: int = 0
    exact: int = 0
    judged: int = 0
    guilty: tuple[Guilty, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    carriers: int = 0
    effect: Effect | None = None
    remaining: Effect | None = None
    step: Effect | None = None
    complete: bool = False
    why_not: str = ""
    not_compared: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    grouped_by: str = "one"
    forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> float | None:
        """Time of finding over time of one plain run."""
        plain = self.seconds.get("forward")
        return self.seconds["find"] / plain if plain and "find" in self.seconds else None


@dataclass(frozen=True)
class Skipped:
    """An axis that could not be audited, and why."""

    axis: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """A whole audit.

    Attributes:
        model: the model's name.
        inputs: what it was run on, as text: "8 samples of 24 tokens".
        axes: one report per axis.
        skipped: axes that could not be audited, and why.
        backward: whether gradients were audited.
        provenance: software, machine, command and time.
        left_out: axes of the default that were not asked for by name and do not apply, and why.
    """

    model: str
    inputs: str
    axes: tuple[AxisReport, ...]
    skipped: tuple[Skipped, ...] = ()
    backward: bool = False
    provenance: Provenance | None = None
    left_out: tuple[Skipped, ...] = ()

    @property
    def guilty(self) -> tuple[Guilty, ...]:
        """Guilty operators of all axes, the largest share of its axis's effect first, unread results last."""
        found = [one for axis in self.axes for one in axis.guilty]
        return tuple(sorted(found, key=lambda one: (one.unread, -abs(one.share or 0.0))))

    @property
    def unjudged(self) -> tuple[Unjudged, ...]:
        """Operators without a verdict, on all axes."""
        return tuple(one for axis in self.axes for one in axis.unjudged)

    @property
    def complete(self) -> bool:
        """True if on every axis the substituted run is the variant, bit for bit."""
        return bool(self.axes) and all(axis.complete for axis in self.axes)

    @property
    def effect(self) -> dict[str, Effect | None]:
        """How far the results differ, by axis."""
        return {axis.axis: axis.effect for axis in self.axes}

    @property
    def kept(self) -> bool:
        """True if operators were judged on every axis, none is guilty, and the list is complete."""
        return (
            self.complete
            and not self.skipped
            and not self.guilty
            and all(axis.judged for axis in self.axes)
        )

    @property
    def exit_code(self) -> int:
        """0 if kept, 1 if an operator is guilty, 2 if not enough was judged to say."""
        return 0 if self.kept else 1 if self.guilty else 2
