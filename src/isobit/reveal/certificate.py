"""Certificates: the orders of many configurations of one target, compared, and where they first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from isobit.errors import ArgumentError, EngineError, RevealError, in_one_line
from isobit.order.addition import Branch, Step, digest, find_difference, steps_of
from isobit.order.evaluate import add_fp32
from isobit.reveal.target import FP32, Progress, Target, Terms
from isobit.reveal.tree import Transcripts, Tree, reveal

# The check that revealing works on this machine: sums of known order, and sums that are not trees.
#
# `certify` runs it before every certificate.

PLANTED_TERMS = 33


class PlainSum:
    """A target that sums Python numbers by a given function."""

    kind, scale, output_bits, scope, unlike, storage = "sum", FP32, 24, "", 0, ""

    def __init__(self, name: str, n: int, function: Callable[[Sequence[float]], float]) -> None:
        """Take the name, the number of terms, and the function that sums them."""
        self.name, self.n, self.function = name, n, function

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """Return the sum of each probe."""
        found = []
        for probe in batch:
            values = [0.0] * self.n
            for index in probe.over:
                values[index] = probe.fill
            for index, value in zip(probe.indices, probe.values, strict=True):
                values[index] = value
            found.append(self.function(values))
        return found

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> list[float]:
        """Return the sum; there is only one place."""
        return [self.function(values)]

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> list[list[float]]:
        """Return the sum of each vector."""
        return [[self.function(list(values))] for values in batch]


def plant_tree(branch: Branch, n: int) -> PlainSum:
    """Return a target that adds in fp32 in this order."""
    steps = steps_of(branch)
    return PlainSum("planted tree", n, lambda values: add_by_steps(steps, values))


def add_by_steps(steps: Sequence[Step], values: Sequence[float]) -> float:
    """Add two at a time in fp32, step by step."""
    sums: list[float] = []
    for left, right in steps:
        a = values[~left] if left < 0 else sums[left]
        sums.append(add_fp32(a, values[~right] if right < 0 else sums[right]))
    return sums[-1] if sums else values[0]


def plant_compensated(n: int) -> PlainSum:
    """Return Kahan's sum in fp32: its probes look like those of a chain, its values differ."""
    return PlainSum("planted compensated sum", n, add_compensated)


def add_compensated(values: Sequence[float]) -> float:
    """Subtract the error of each addition from the next term."""
    total, error = values[0], 0.0
    for value in values[1:]:
        corrected = add_fp32(value, -error)
        grown = add_fp32(total, corrected)
        error = add_fp32(add_fp32(grown, -total), -corrected)
        total = grown
    return total


def plant_corrected(n: int) -> PlainSum:
    """Return Sum2 of Ogita, Rump and Oishi in fp32: its probes look like one exact addition of all terms."""
    return PlainSum("planted compensated sum with a correction at the end", n, add_corrected)


def add_corrected(values: Sequence[float]) -> float:
    """Sum the errors of a chain separately, and add them at the end."""
    total = errors = 0.0
    for value in values:
        grown = add_fp32(total, value)
        there = add_fp32(grown, -total)
        errors = add_fp32(
            errors, add_fp32(add_fp32(total, -add_fp32(grown, -there)), add_fp32(value, -there))
        )
        total = grown
    return add_fp32(total, errors)


def draw_branch(random: Random, n: int) -> Branch:
    """Draw a binary tree over n terms."""
    parts: list[Branch] = list(range(n))
    while len(parts) > 1:
        left = parts.pop(random.randrange(len(parts)))
        right = parts.pop(random.randrange(len(parts)))
        parts.append((left, right))
    return parts[0]


def check_revealing() -> None:
    """Check that a known order is found exactly, and that compensated sums are rejected.

    Raises:
        EngineError: Revealing does not work on this machine.
    """
    branch = draw_branch(Random(PLANTED_TERMS), PLANTED_TERMS)
    tree = reveal(plant_tree(branch, PLANTED_TERMS))
    if tree.order_digest != digest(branch) or not tree.replayed:
        raise EngineError(
            expected=f"the planted order {digest(branch)[:8]}",
            received=f"{tree.order_digest[:8]}, replayed {tree.replayed} times",
            remedy="revealing does not work on this machine; trust no certificate, and report this",
        )
    for planted in (plant_compensated(PLANTED_TERMS), plant_corrected(PLANTED_TERMS)):
        try:
            reveal(planted)
        except RevealError:
            continue
        raise EngineError(
            expected="a planted compensated sum to be rejected",
            received=f"an order for {planted.name}",
            remedy="replaying does not work on this machine; trust no certificate, and report this",
        )


@dataclass(frozen=True)
class OrderClass:
    """Configurations that have the same order and the same arithmetic."""

    configurations: tuple[str, ...]
    tree: Tree
    # The first addition that differs from the first class: (there, here). None if only the arithmetic differs.
    parting: tuple[str, str] | None

    @property
    def label(self) -> str:
        """The configurations, with runs of whole numbers as `m=1–257`."""
        parts = [name.rpartition("=") for name in self.configurations]
        if len({key for key, _, _ in parts}) > 1 or not all(
            value.isdecimal() for _, _, value in parts
        ):
            return ", ".join(self.configurations)
        runs: list[list[int]] = []
        for number in (int(value) for _, _, value in parts):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        shown = (f"{a}–{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs)
        return f"{parts[0][0]}{parts[0][1]}{', '.join(shown)}"


@dataclass(frozen=True)
class OrderComparison:
    """The orders of many configurations, as `isobit.reveal.compare_orders` returns them.

    Attributes:
        classes: configurations grouped by order and arithmetic; the first class has the first configuration.
        refused: (configuration, reason) of those whose order could not be revealed.

    Example:
        >>> import isobit
        >>> from isobit.reveal import targets
        >>> found = isobit.reveal.compare_orders(targets.sum, [{"k": 8, "m": m} for m in (1, 2)])
        >>> found.count, found.refused
        (2, ())
    """

    classes: tuple[OrderClass, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def count(self) -> int:
        """The number of configurations."""
        return sum(len(c.configurations) for c in self.classes) + len(self.refused)

    @property
    def kept(self) -> bool:
        """Whether all configurations have one order, at every place, and each could be revealed."""
        return (
            len(self.classes) == 1
            and not self.refused
            and not any(c.tree.unlike for c in self.classes)
        )

    @property
    def digest(self) -> str | None:
        """The digest of the one order and arithmetic; None if there are several."""
        return self.classes[0].tree.digest if self.kept else None

    @property
    def claim(self) -> str:
        """What follows from the certificate, in words."""
        if not self.kept:
            return "no claim"
        tree = self.classes[0].tree
        what = f"{tree.scope}: " if tree.scope else ""
        if tree.arithmetic is None:
            return f"{what}one order; what its additions do was not probed"
        if not tree.replayed:
            return f"{what}one order and one arithmetic; not replayed"
        replayed = (
            f"replayed to the bit on {tree.replayed} vectors of {len(tree.replays.kinds)} kinds"
        )
        if self.count == 1:
            return f"{what}order and arithmetic predict its bits, {replayed}; one configuration is compared with none"
        return (
            f"{what}equal bits in every configuration for all finite inputs, if it does not branch on them; "
            f"{replayed}, so a branch that none of these meets is not covered"
        )

    def matches(self, order_digest: str) -> bool:
        """Return whether every configuration has the order with this digest."""
        return self.kept and self.classes[0].tree.order_digest == order_digest

    def __str__(self) -> str:
        """Describe the certificate in one line."""
        if self.kept:
            return f"{self.count} configurations, one order: {self.classes[0].tree}. {self.claim}"
        return f"{self.count} configurations, {len(self.classes)} orders, {len(self.refused)} not revealed"

    def summary(self) -> dict[str, Any]:
        """Return the certificate as a dictionary for JSON."""
        return {
            "kept": self.kept,
            "claim": self.claim,
            "digest": self.digest,
            "configurations": self.count,
            "classes": [_summarise(found) for found in self.classes],
            "refused": [{"configuration": name, "reason": reason} for name, reason in self.refused],
        }


def _summarise(found: OrderClass) -> dict[str, Any]:
    tree = found.tree
    return {
        "configurations": found.configurations,
        "digest": tree.digest,
        "order_digest": tree.order_digest,
        "order": str(tree),
        "arithmetic": None if tree.arithmetic is None else str(tree.arithmetic),
        "terms": tree.n,
        "depth": tree.depth,
        "probes": tree.probes,
        "replayed": tree.replayed,
        "replays": str(tree.replays),
        "replayed_kinds": tree.replays.kinds,
        "scope": tree.scope,
        "places_with_another_order": tree.unlike,
        "differs_from_first": found.parting,
    }


def compare_orders(
    target: Callable[..., Target],
    configurations: Iterable[Any],
    *,
    arithmetic: bool = True,
    progress: Progress | None = None,
) -> OrderComparison:
    """Reveal `target(configuration)` for each, and group those of equal order and arithmetic.

    A configuration that is a mapping is passed as keywords, and named by the keys that vary.
    """
    asked = list(configurations)
    if not asked:
        raise ArgumentError(
            expected="at least one configuration",
            received="none",
            remedy="pass at least one: a certificate of no configurations would certify nothing",
        )
    check_revealing()
    earlier = Transcripts()
    found: dict[str, tuple[Tree, list[str]]] = {}
    refused: list[tuple[str, str]] = []
    for configuration, name in zip(asked, _name_all(asked), strict=True):
        made = (
            target(**configuration) if isinstance(configuration, Mapping) else target(configuration)
        )
        try:
            tree = reveal(made, arithmetic=arithmetic, progress=progress, earlier=earlier)
        except RevealError as error:
            refused.append((name, in_one_line(error)))
            continue
        key = f"{tree.digest} {tree.unlike}"
        found.setdefault(key, (tree, []))[1].append(name)
    classes: list[OrderClass] = []
    for tree, names in found.values():
        parting = find_difference(classes[0].tree.branch, tree.branch) if classes else None
        classes.append(OrderClass(tuple(names), tree, parting))
    return OrderComparison(tuple(classes), tuple(refused))


def _name_all(asked: list[Any]) -> list[str]:
    if not all(isinstance(configuration, Mapping) for configuration in asked):
        return [str(configuration) for configuration in asked]
    keys = list(dict.fromkeys(key for configuration in asked for key in configuration))
    varying = [key for key in keys if len({str(c.get(key)) for c in asked}) > 1] or keys
    return [", ".join(f"{key}={c[key]}" for key in varying if key in c) for c in asked]
