"""Which operators only move bits, and which results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.moving import MOVES, RESHAPES, SORTS
from isobit.auditing.replay.call import operator_name

_NAMES = """
clone copy copy_ _to_copy detach detach_ alias lift_fresh zeros
zeros_like ones ones_like full full_like empty empty_like empty_strided new_zeros
new_ones new_full new_empty new_empty_strided arange fill fill_ zero_ masked_fill
masked_fill_ where embedding tril triu nonzero scalar_tensor eye slice_scatter
select_scatter scatter scatter_ index_copy index_copy_ _local_scalar_dense set_ resize_ histc
constant_pad_nd slice_backward select_backward
"""
# Operators that draw whole numbers.
DRAWS = {
    f"aten::{name}" for name in ("multinomial", "randperm", "randint", "randint_like", "random_")
}
# Operators that only move bits or make tensors from sizes: none of them can add in another order.
EXACT = MOVES | RESHAPES | {f"aten::{name}" for name in _NAMES.split()}


def is_exact(func: Any) -> bool:
    """Return whether an operator only moves bits, so that it has no order."""
    if func.is_view:
        return True
    return operator_name(func) in EXACT and "reduce" not in func._schema.overload_name


def computes(func: Any, flat: list[Any]) -> bool:
    """Return whether an operator reads numbers that are rounded, draws some, or sorts (equal keys have no order).

    Torch's own other operators on whole numbers are exact.
    """
    if operator_name(func) in SORTS or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    given = [v for v in flat if isinstance(v, Tensor)]
    rounded = any(v.is_floating_point() or v.is_complex() for v in given)
    return rounded or not operator_name(func).startswith("aten::")


def is_compared(func: Any, result: Tensor) -> bool:
    """Return whether a result is judged: numbers that are rounded, and choices that depend on them."""
    if result.is_floating_point() or result.is_complex():
        return result.numel() > 0
    return operator_name(func) in SORTS | DRAWS or not operator_name(func).startswith("aten::")
