"""Claims of post-training-v1: `derive(base, a, b)`, a model that is merged, pruned and quantised, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.post_training.merging import merge, mergekit
from isobit.library.post_training.pruning import prune, wanda_magnitude
from isobit.library.post_training.quantising import (
    per_element,
    quantize,
    torch_dynamic,
    without_zero_point,
)

Derived = tuple[Tensor, Tensor, Tensor]  # merged, pruned, and what the codes stand for


def derive(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Merge by task arithmetic, drop half of the weights, quantise to four bits."""
    return staged(base, a, b)


def staged(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    merging: Callable[..., Tensor] = merge,
    pruning: Callable[..., Tensor] = prune,
    quantising: Callable[..., Any] = quantize,
    method: str = "task_arithmetic",
) -> Derived:
    """Run the three stages."""
    merged = merging(base, a, b, method=method)
    pruned = pruning(merged, 0.5)
    codes, scale, zero = quantising(pruned)
    values = (codes.double() - per_element(pruned, zero)) * per_element(pruned, scale)
    return merged, pruned, values


def given(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return a base and two models near it, of whole groups."""
    base, a, b = (one.flatten(1) for one in case.arguments.values())
    return base, base + a / 4, base + b / 4


def zeros_survive(subject: Callable[..., Derived], case: Case, tally: Tally) -> None:
    """Half of the weights of each row are zero after the last stage; what is kept has the bits of the merge."""
    models = given(case)
    tally.count(case.rows)
    merged, pruned, values = subject(*models)
    half = merged.shape[1] // 2
    tally.true((pruned == 0).sum(-1) == half, "zeros after pruning", (pruned == 0).sum(-1))
    tally.true((values == 0)[pruned == 0], "zeros after quantising", values[pruned == 0])
    tally.same(pruned, torch.where(pruned == 0, pruned, merged), "kept weights")


def free_of_others(subject: Callable[..., Derived], case: Case, tally: Tally) -> None:
    """Threads, and tensors that are derived before, change no bit of any stage."""
    models = given(case)
    tally.count(case.rows)
    with thread_count(1):
        wanted = subject(*models)
    subject(*(one.flip(0) for one in models))
    with thread_count(2):
        found = subject(*models)
    for one, other, name in zip(found, wanted, ("merged", "pruned", "quantised"), strict=True):
        tally.same(one, other, name)


def stock_derive(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Use mergekit's DARE, a threshold, and one scale for the tensor."""
    stages: dict[str, Any] = {"merging": mergekit, "method": "dare_linear"}
    return staged(base, a, b, **stages, pruning=wanda_magnitude, quantising=torch_dynamic)


def no_code_for_zero(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Quantise without a zero point: what was pruned is no longer zero."""
    return staged(base, a, b, quantising=without_zero_point)


def merged_last(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Prune the models, and merge them then: masks differ, and their union is kept."""
    merged, _, _ = staged(base, a, b)
    pruned = merge(prune(base, 0.5), prune(a, 0.5), prune(b, 0.5), method="task_arithmetic")
    return merged, pruned, pruned.double()


CALLS = [0]


def mask_of_the_call(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Drop by a generator that every tensor advances."""
    CALLS[0] += 1
    return staged(base, a.roll(CALLS[0], 1), b)
