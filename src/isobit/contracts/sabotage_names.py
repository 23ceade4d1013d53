"""Which planted wrong subjects the library has, and which it supplies for each transform and relation."""

from __future__ import annotations

from typing import Any

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
)

BY_TRANSFORM = {
    "batch": ("order by batch", "last row off by one ulp"),
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
    "accurate": ("constant output", "wrong divisor", "narrow accumulator", "axes swapped", "off by one at the tail"),
    "gradient": ("constant output", "wrong divisor", "narrow accumulator", "axes swapped"),
    "parity": ("one ulp off", "constant output", "identity"),
    "sums_to": ("constant output", "wrong divisor", "identity"),
    "monotone": ("negated",),
    "roundtrip": ("one ulp off", "constant output"),
    "refuses": ("accepts everything",),
    "launches": ("never launched", "made for one size"),
}


def default_sabotage(relation: str, params: Any) -> tuple[str, ...]:
    """What the library plants for a claim that names none of its own."""
    if relation == "invariant":
        return tuple(dict.fromkeys(s for name in params["under"] for s in BY_TRANSFORM.get(name, ())))
    if relation == "bound":
        return ("negated",) * ("low" in params) + ("three times too large",) * ("high" in params)
    return BY_RELATION.get(relation, ())


def has_default(relation: str) -> bool:
    """Whether the library plants something for a claim that names nothing."""
    return relation in ("invariant", "bound") or relation in BY_RELATION
