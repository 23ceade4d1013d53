"""Certificates: the orders of many configurations of one target, revealed, compared, and the place where they part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from isobit.errors import ArgumentError, EngineError, RevealError, in_one_line
from isobit.order.addition import digest, find_difference
from isobit.reveal.planted import draw_branch, plant_compensated, plant_corrected, plant_tree
from isobit.reveal.target import Progress, Target
from isobit.reveal.tree import Tree, reveal

PLANTED_TERMS = 33


@dataclass(frozen=True)
class OrderClass:
    """Configurations that have one order and one arithmetic."""

    configurations: tuple[str, ...]
    tree: Tree
    parting: (
        tuple[str, str] | None
    )  # where it parts from the first class: (there, here); None if only in arithmetic

    @property
    def label(self) -> str:
        """The configurations, runs of whole numbers as `m=1–257`."""
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
        said = ", ".join(
            f"{a}–{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs
        )
        return f"{parts[0][0]}{parts[0][1]}{said}"


@dataclass(frozen=True)
class Certificate:
    """What revealing every configuration showed; `kept` if they are one."""

    classes: tuple[OrderClass, ...]
    refused: tuple[tuple[str, str], ...]  # (configuration, why its order could not be shown)

    @property
    def count(self) -> int:
        """How many configurations were asked about."""
        return sum(len(c.configurations) for c in self.classes) + len(self.refused)

    @property
    def kept(self) -> bool:
        """One order for all, at every place, and none refused."""
        return (
            len(self.classes) == 1
            and not self.refused
            and not any(c.tree.unlike for c in self.classes)
        )

    @property
    def digest(self) -> str | None:
        """Of the one order and arithmetic; None where there are several."""
        return self.classes[0].tree.digest if self.kept else None

    @property
    def claim(self) -> str:
        """What follows, and no more."""
        if not self.kept:
            return "no claim"
        tree = self.classes[0].tree
        what = f"{tree.scope}: " if tree.scope else ""
        if tree.arithmetic is None:
            return f"{what}one order; what its additions do was not seen"
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
        """Whether every configuration has this order."""
        return self.kept and self.classes[0].tree.order_digest == order_digest

    def __str__(self) -> str:
        if self.kept:
            return f"{self.count} configurations, one order: {self.classes[0].tree}. {self.claim}"
        return f"{self.count} configurations, {len(self.classes)} orders, {len(self.refused)} not shown"

    def summary(self) -> dict[str, Any]:
        """For machines."""
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
        "places_that_add_otherwise": tree.unlike,
        "parts_from_first": found.parting,
    }


def certify(
    target: Callable[..., Target],
    configurations: Iterable[Any],
    *,
    arithmetic: bool = True,
    progress: Progress | None = None,
) -> Certificate:
    """Reveals `target(configuration)` for each, and puts those of one order and arithmetic into one class.

    A configuration that is a mapping is passed as keywords, and named by those that vary.
    """
    asked = list(configurations)
    if not asked:
        raise ArgumentError(
            expected="at least one configuration",
            received="none",
            remedy="a certificate of nothing would certify nothing: name the configurations",
        )
    check_revealing()
    found: dict[str, tuple[Tree, list[str]]] = {}
    refused: list[tuple[str, str]] = []
    for configuration, name in zip(asked, _name_all(asked), strict=True):
        made = (
            target(**configuration) if isinstance(configuration, Mapping) else target(configuration)
        )
        try:
            tree = reveal(made, arithmetic=arithmetic, progress=progress)
        except RevealError as error:
            refused.append((name, in_one_line(error)))
            continue
        key = f"{tree.digest} {tree.unlike}"
        found.setdefault(key, (tree, []))[1].append(name)
    classes: list[OrderClass] = []
    for tree, names in found.values():
        parting = find_difference(classes[0].tree.branch, tree.branch) if classes else None
        classes.append(OrderClass(tuple(names), tree, parting))
    return Certificate(tuple(classes), tuple(refused))


def _name_all(asked: list[Any]) -> list[str]:
    if not all(isinstance(configuration, Mapping) for configuration in asked):
        return [str(configuration) for configuration in asked]
    keys = list(dict.fromkeys(key for configuration in asked for key in configuration))
    varying = [key for key in keys if len({str(c.get(key)) for c in asked}) > 1] or keys
    return [", ".join(f"{key}={c[key]}" for key in varying if key in c) for c in asked]


def check_revealing() -> None:
    """A planted order must come back exactly, and planted sums that are no trees must be refused.

    Kahan's sum has the probes of a chain, Sum2 those of one exact addition of all terms.
    """
    branch = draw_branch(Random(PLANTED_TERMS), PLANTED_TERMS)
    tree = reveal(plant_tree(branch, PLANTED_TERMS))
    if tree.order_digest != digest(branch) or not tree.replayed:
        raise EngineError(
            expected=f"the planted order {digest(branch)[:8]}",
            received=f"{tree.order_digest[:8]}, replayed {tree.replayed} times",
            remedy="revealing itself is broken on this machine; trust no certificate, and report this",
        )
    for planted in (plant_compensated(PLANTED_TERMS), plant_corrected(PLANTED_TERMS)):
        try:
            reveal(planted)
        except RevealError:
            continue
        raise EngineError(
            expected="a planted compensated sum to be refused",
            received=f"an order for {planted.name}",
            remedy="replaying is broken on this machine; trust no certificate, and report this",
        )
