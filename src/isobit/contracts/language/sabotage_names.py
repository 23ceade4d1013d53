"""Names of the built-in wrong subjects, and which are planted for each transform and relation."""

from __future__ import annotations

from typing import Any

from isobit.contracts.language.contract import Claim

LIBRARY_NAMES = (
    "order by batch",
    "last row off by one ulp",
    "leak from the row before",
    "other kernel for other storage",
    "sum shared among threads",
    "other kernel for more axes",
    "one ulp off",
    "stale cache",
    "stale weights",
    "constant output",
    "identity",
    "wrong divisor",
    "narrow accumulator",
    "axes swapped",
    "off by one at the tail",
    "negated",
    "three times too large",
    "accepts everything",
    "never launched",
    "made for one size",
    "loaded at each call",
    "one more product elsewhere",
    "order by batch with gradients",
    "constant output with gradients",
)
TRAINING = "with gradients"  # ends the names of subjects that are wrong only with gradients enabled

BY_TRANSFORM = {
    "batch": ("order by batch", "last row off by one ulp", "order by batch with gradients"),
    "position": ("last row off by one ulp", "leak from the row before"),
    "neighbours": ("leak from the row before",),
    "padding": ("last row off by one ulp", "leak from the row before"),
    "chunking": ("last row off by one ulp",),
    "packing": ("other kernel for more axes",),
    "cache": ("stale cache", "stale weights"),
    "layout": ("other kernel for other storage",),
    "threads": ("sum shared among threads",),
}
BY_RELATION = {
    "accurate": (
        "constant output",
        "wrong divisor",
        "narrow accumulator",
        "axes swapped",
        "off by one at the tail",
        "constant output with gradients",
    ),
    "gradient": ("constant output", "wrong divisor", "narrow accumulator", "axes swapped"),
    "parity": ("one ulp off", "constant output", "identity", "constant output with gradients"),
    "sums_to": ("constant output", "wrong divisor", "identity"),
    "monotone": ("negated",),
    "roundtrip": ("one ulp off", "constant output"),
    "refuses": ("accepts everything",),
    "certified": ("one more product elsewhere",),
    "launches": ("never launched", "made for one size", "loaded at each call"),
}


def default_sabotage(relation: str, params: Any) -> tuple[str, ...]:
    """Return what is planted for a claim that names no sabotage."""
    if relation == "invariant":
        return tuple(
            dict.fromkeys(s for name in params["under"] for s in for_transform(name, params))
        )
    if relation == "bound":
        return ("negated",) * ("low" in params) + ("three times too large",) * ("high" in params)
    return fitting(BY_RELATION.get(relation, ()), params)


def for_transform(transform: str, params: Any) -> tuple[str, ...]:
    """Return what is planted for one transform of a claim."""
    return fitting(BY_TRANSFORM.get(transform, ()), params)


def fitting(names: tuple[str, ...], params: Any) -> tuple[str, ...]:
    """Return those names that a claim on an output, or on a gradient, can catch."""
    is_output = params.get("of", "output") == "output"
    return tuple(name for name in names if is_output or not name.endswith(TRAINING))


def planted_names(claim: Claim) -> tuple[str, ...]:
    """Return the names under which L2 records each wrong subject of a claim."""
    if claim.relation != "invariant" or claim.sabotage:
        names = claim.sabotage or default_sabotage(claim.relation, claim.params)
    else:
        under = claim.params["under"]
        nothing = ("nothing is planted",)
        names = tuple(
            f"{n}, under {t}" for t in under for n in for_transform(t, claim.params) or nothing
        )
    return (*names, *(f"control {name}" for name in claim.control))


def has_default(relation: str) -> bool:
    """Return whether something is planted for a claim that names no sabotage."""
    return relation in ("invariant", "bound") or relation in BY_RELATION
