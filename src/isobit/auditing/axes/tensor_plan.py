"""Which linear layers of a model tensor-parallel ranks split, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

COLUMN, ROW = "column", "row"
# Names of layers that models without a plan split: those that read the whole input, and the one that reads theirs.
PAIRS = (
    ({"q_proj", "k_proj", "v_proj"}, {"o_proj", "out_proj"}),
    ({"gate_proj", "up_proj"}, {"down_proj"}),
    ({"query", "key", "value", "q", "k", "v"}, {"o", "out"}),
    ({"gate", "up"}, {"down"}),
    ({"w1", "w3"}, {"w2"}),
    ({"fc1", "c_fc"}, {"fc2", "c_proj"}),
)


@dataclass(frozen=True)
class Split:
    """How one linear layer is split.

    Attributes:
        path: its module's path.
        by: "column", each rank has some outputs; or "row", each rank has some inputs.
        gathers: whether ranks exchange the outputs of a column split, so that each has all.
    """

    path: str
    by: str
    gathers: bool = False


@dataclass
class Plan:
    """The splits of a model by path, and the patterns that cannot be replayed with their reasons."""

    splits: dict[str, Split] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def plan_of(model: nn.Module) -> Plan:
    """Return a model's own tensor-parallel plan, and where it adds over no ranks, one recognised by names."""
    plan = from_styles(model, styles_of(model))
    if not any(split.by == ROW for split in plan.splits.values()):
        plan.splits = {**from_names(model).splits, **plan.splits}
    return plan


def styles_of(model: Any) -> dict[str, str]:
    """Return the patterns and styles of transformers' plan, with the paths of this model's modules."""
    found = getattr(model, "_tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        found = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    known = found.items() if isinstance(found, Mapping) else ()
    return {str(pattern): style for pattern, style in known if isinstance(style, str)}


def from_styles(model: nn.Module, styles: Mapping[str, str]) -> Plan:
    """Apply transformers' patterns, such as `model.layers.*.mlp.up_proj: colwise`."""
    plan = Plan()
    forms = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$"), pattern, style)
        for pattern, style in styles.items()
    ]
    for path, module in model.named_modules():
        for form, _, style in forms:
            if isinstance(module, nn.Linear) and form.match(path) and side_of(style):
                gathers = side_of(style) == COLUMN and style != "colwise"
                plan.splits[path] = Split(path, side_of(style), gathers)
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    for form, pattern, style in forms:
        applies = any(form.match(name) for name in names)
        if applies and splits_sums(style) and not any(form.match(p) for p in plan.splits):
            plan.unknown[pattern] = f"tensor-parallel style {style} is not replayed"
    return plan


def side_of(style: str) -> str:
    """Return the side that a style of a linear layer splits, "" if it is another kind of style."""
    if style.startswith("colwise"):
        return COLUMN
    return ROW if style.startswith("rowwise") else ""


def splits_sums(style: str) -> bool:
    """Return whether a style splits products: those of experts and of fused weights do."""
    return any(word in style for word in ("colwise", "rowwise", "gemm", "experts")) and (
        not style.startswith("embedding")
    )


def from_names(model: nn.Module) -> Plan:
    """Recognise queries, keys, values and output, or up and down, by name in one parent module."""
    plan = Plan()
    for parent, module in model.named_modules():
        children = {n: c for n, c in module.named_children() if isinstance(c, nn.Linear)}
        for columns, rows in PAIRS:
            if children.keys() & columns and children.keys() & rows:
                for name in children.keys() & (columns | rows):
                    path = f"{parent}.{name}" if parent else name
                    plan.splits[path] = Split(path, COLUMN if name in columns else ROW)
    return plan
