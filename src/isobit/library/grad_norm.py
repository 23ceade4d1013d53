"""Claims of grad-norm-kernel-v1: one norm however gradients are cut, and clipping by it; planted wrong norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.optim import MARGIN, clip_grad_norm_, get_total_norm
from isobit.order.exact_sum import round_fp32

Norm = Callable[[Sequence[Tensor]], Tensor]


def norms(subject: Norm, rows: Tensor, cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
    """Return the norm of each row, cut into tensors."""
    return torch.stack([subject(cut(row)) for row in rows]) if len(rows) else torch.zeros(0)


def cut_anywhere(subject: Norm, case: Case, tally: Tally) -> None:
    """A row whole, cut in two, in thirds, reversed or interleaved has one norm."""
    x = case.arguments["x"]
    tally.count(case.rows)
    whole = norms(subject, x, lambda row: [row])
    place = int(torch.randint(0, x.shape[1] + 1, (), generator=case.generator(51)))
    cuts: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
        f"cut at {place}": lambda row: [row[:place], row[place:]],
        "in thirds": lambda row: row.tensor_split(3),
        "reversed": lambda row: [row.flip(0)],
        "every second": lambda row: [row[1::2], row[::2]],
    }
    for name, cut in cuts.items():
        tally.same(norms(subject, x, cut), whole, name)


def is_the_root(subject: Norm, case: Case, tally: Tally) -> None:
    """The norm is the exact sum of squares rounded to fp64, its root rounded to fp32."""
    x = case.arguments["x"]
    tally.count(case.rows)

    def exact(tensors: Sequence[Tensor]) -> Tensor:
        values = [v for t in tensors for v in t.double().tolist()]
        if not all(map(math.isfinite, values)):
            return torch.tensor(math.nan if any(map(math.isnan, values)) else math.inf)
        squares = sum((Fraction(v) ** 2 for v in values), Fraction(0))
        return torch.tensor(round_fp32(math.sqrt(float(squares))))

    found, wanted = (norms(norm, x, lambda row: [row]) for norm in (subject, exact))
    tally.same(found, wanted, "against fractions")


def clips_by(subject: Norm, case: Case, tally: Tally) -> None:
    """Each gradient times min(1, limit / (norm + 1e-6)), rounded once; the norm is returned."""
    x = case.arguments["x"]
    tally.count(case.rows)
    for limit in (1.0, 2.0**60):
        parameter = torch.nn.Parameter(torch.zeros_like(x))
        parameter.grad = x.clone()
        norm = subject([x])
        tally.same(clip_grad_norm_([parameter], limit), norm, "the norm returned")
        scale = (limit / (norm + MARGIN)).clamp(max=1.0)
        wanted = one_nan((x.float() * scale).to(x.dtype))
        tally.same(one_nan(parameter.grad), wanted, f"clipped to {limit}")


def one_nan(x: Tensor) -> Tensor:
    """Return x with one NaN: the payload that torch's products keep does not matter."""
    return torch.where(x.isnan(), torch.nan, x)


# ---- planted --------------------------------------------------------------------------------------------


def sum_of_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Add the norms of the shards."""
    return sum((get_total_norm([t]) for t in tensors), torch.zeros(()))


def norm_of_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Round each shard's norm before they are combined exactly."""
    return get_total_norm([torch.stack([get_total_norm([t]) for t in tensors])])


def largest_shard(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest norm of a shard."""
    return torch.stack([get_total_norm([t]) for t in tensors]).amax()


def in_fp32(tensors: Sequence[Tensor]) -> Tensor:
    """Square in fp32, which rounds, overflows and underflows."""
    return torch.cat([t.flatten() for t in tensors]).float().square().sum().sqrt()


def without_the_last(tensors: Sequence[Tensor]) -> Tensor:
    """Leave out the last element of each tensor."""
    return get_total_norm([t[..., :-1] for t in tensors])
