"""What grad-norm-kernel-v1 claims: one norm however gradients are cut, and clipping by it; and planted wrong norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.optim import MARGIN, clip_grad_norm_, get_total_norm
from isobit.order.exact_sum import round_fp32

Norm = Callable[[Sequence[Tensor]], Tensor]


def stock(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """torch's own: the norm of the norms."""
    return torch.nn.utils.get_total_norm(tensors).float()


def norms(subject: Norm, rows: Tensor, cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
    """Of each row, cut into tensors."""
    return torch.stack([subject(cut(row)) for row in rows]) if len(rows) else torch.zeros(0)


def cut_anywhere(subject: Norm, case: Case, tally: Tally) -> None:
    """A row whole, in two at any place, in ones and the rest, in another order: one norm."""
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
    """Against fractions: the sum of squares rounded to fp64, its root, rounded to fp32."""
    x = case.arguments["x"]
    tally.count(case.rows)

    def exact(tensors: Sequence[Tensor]) -> Tensor:
        values = [v for t in tensors for v in t.double().tolist()]
        if not all(map(math.isfinite, values)):
            return torch.tensor(math.nan if any(map(math.isnan, values)) else math.inf)
        return torch.tensor(
            round_fp32(math.sqrt(float(sum((Fraction(v) ** 2 for v in values), Fraction(0)))))
        )

    tally.same(
        norms(subject, x, lambda row: [row]),
        norms(exact, x, lambda row: [row]),
        "against fractions",
    )


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
        tally.same(
            one_nan(parameter.grad), one_nan((x.float() * scale).to(x.dtype)), f"clipped to {limit}"
        )


def one_nan(x: Tensor) -> Tensor:
    """torch's products keep some payload of a NaN, which nothing depends on."""
    return torch.where(x.isnan(), torch.nan, x)


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Gradients that have no digits."""
    x = torch.ones(3)
    yield "a sparse gradient", ([x, x.to_sparse()],), {}
    yield "fp64", ([x.double()],), {}
    yield "integers", ([x.int()],), {}


# ---- planted --------------------------------------------------------------------------------------------


def sum_of_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Each shard's norm, added."""
    return sum((get_total_norm([t]) for t in tensors), torch.zeros(()))


def norm_of_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Each shard's norm rounded before they are combined, exactly even so."""
    return get_total_norm([torch.stack([get_total_norm([t]) for t in tensors])])


def largest_shard(tensors: Sequence[Tensor]) -> Tensor:
    """Every shard clips by its own norm."""
    return torch.stack([get_total_norm([t]) for t in tensors]).amax()


def in_fp32(tensors: Sequence[Tensor]) -> Tensor:
    """Squares in fp32: they round, overflow and vanish."""
    return torch.cat([t.flatten() for t in tensors]).float().square().sum().sqrt()


def without_the_last(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor's last element is not seen."""
    return get_total_norm([t[..., :-1] for t in tensors])
