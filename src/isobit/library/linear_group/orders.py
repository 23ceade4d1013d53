"""Order certificate of linear_group: dX over the rows of several weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools

import torch
from torch import Tensor

from isobit.foundation.records import Proof
from isobit.library.certificates import Question, feature_order, prove_orders
from isobit.library.linear_group.claims import Group, Grouped
from isobit.ops import dispatch
from isobit.ops.linear.group import interleave
from isobit.reveal.targets.tensor_target import TensorTarget

SHAPES = ((128, 64, 64), (512, 256, 256))  # rows of three weights: queries, keys and values
GROUPS = ((1, torch.float32), (2, torch.float32), (4, torch.bfloat16))


def prove_order(subject: Grouped) -> Proof:
    """Certify that dX over the rows of three weights, group by group, has the order of one feature axis."""

    def questions() -> Iterator[Question]:
        for dims in SHAPES:
            for groups, dtype in GROUPS:
                target = functools.partial(group_target, subject.group, dims, groups, dtype=dtype)
                order = feature_order(sum(dims), dispatch.engine_of(dtype))
                what = f"{dims} in {groups} groups"
                yield Question(what, target, [{"m": m} for m in (1, 33)], order)

    covers = (
        f"dX over the rows of weights of {list(SHAPES)} in 1, 2 (fp32) and 4 (bf16) groups, at 1 and "
        "33 rows"
    )
    return prove_orders(questions(), covers)


def group_target(
    group: Group, dims: Sequence[int], groups: int, m: int, dtype: torch.dtype
) -> TensorTarget:
    """Return dX: terms are in the order of the axis, and are copied to the weights before each call."""
    total, width = sum(dims), 8
    axis = interleave([torch.arange(n) + sum(dims[:i]) for i, n in enumerate(dims)], 0, groups)
    terms = torch.zeros(width, total, dtype=dtype)
    weights = [torch.zeros(n, width, dtype=dtype) for n in dims]
    x = torch.zeros(m, width, dtype=dtype, requires_grad=True)
    grads = [torch.ones(m, n, dtype=dtype) for n in dims]
    with torch.enable_grad():
        outputs = group(x, weights, None, groups=groups)

    def run() -> Tensor:
        dealt = torch.empty_like(terms.t())
        dealt[axis] = terms.t()
        for i, weight in enumerate(weights):
            weight.data.copy_(dealt[sum(dims[:i]) : sum(dims[: i + 1])])
        return torch.autograd.grad(outputs, x, grads, retain_graph=True)[0]

    name = f"dX of {dims} in {groups} groups"
    return TensorTarget(name, terms, lambda: run()[-1], everywhere=run)
