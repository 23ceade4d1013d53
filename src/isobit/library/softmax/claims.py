"""What softmax-kernel-v1 claims beyond the library: exact shifts, refusals, and planted wrong softmaxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.softmax import portable
from isobit.ops.softmax.op import softmax

Subject = Callable[..., Tensor]


def stock(x: Tensor, dim: int = -1) -> Tensor:
    """torch's own."""
    return torch.softmax(x, dim)


def portable_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The other executor: the same order in plain torch operations."""
    return portable.softmax(x)


def shifts(subject: Subject, case: Case, tally: Tally) -> None:
    """A shift that is exact changes no bit: only differences to the largest matter."""
    x = (
        case.arguments["x"].float().clamp(-64, 64) * 256
    ).round() / 256  # on a grid, so that x + c is exact
    tally.count(case.rows)
    whole = subject(x)
    for shift in (1.0, -3.0, 64.0, -1000.0):
        tally.same(subject(x + shift), whole, f"shifted by {shift}")


def one_is_one(subject: Subject, case: Case, tally: Tally) -> None:
    """A row of one finite element is exactly 1."""
    tally.count(case.rows)
    found = subject(case.arguments["x"][:, :1])
    tally.same(found, torch.ones_like(found), "a row of one")


def has_no_answer(subject: Subject, case: Case, tally: Tally) -> None:
    """A row with a NaN or +inf, or of -inf alone, is one and the same NaN; its neighbours are not."""
    x = case.arguments["x"].clone()
    wrong = torch.arange(len(x)) % 2 == 0
    for place, value in ((0, torch.nan), (-1, torch.inf), (slice(None), -torch.inf)):
        spoilt = x.clone()
        spoilt[wrong, place] = value
        found = subject(spoilt)
        tally.same(
            found[wrong], torch.full_like(found[wrong], torch.nan), f"rows spoilt by {value}"
        )
        tally.same(found[~wrong], subject(x)[~wrong], f"rows beside rows spoilt by {value}")
    tally.count(case.rows)


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that no kernel takes."""
    x = torch.ones(2, 3)
    yield "an axis that is not there", (x, 2), {}
    yield "an axis that is no integer", (x, 1.0), {}
    yield "a scalar", (torch.tensor(1.0),), {}
    yield "integers", (x.int(),), {}
    yield "a sparse input", (x.to_sparse(),), {}
    yield "complex numbers", (x.to(torch.complex64),), {}


# ---- planted --------------------------------------------------------------------------------------------


def without_shift(x: Tensor, dim: int = -1) -> Tensor:
    """The maximum is not subtracted: overflows."""
    terms = torch.exp(x.float())
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def over_the_batch(x: Tensor, dim: int = -1) -> Tensor:
    """The maximum of the whole batch is subtracted."""
    terms = exp_nonpositive(x.float() - x.float().amax()) if x.numel() else x.float()
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def without_the_last(x: Tensor, dim: int = -1) -> Tensor:
    """The denominator misses the last element."""
    terms = torch.exp(x.float() - x.float().amax(-1, keepdim=True)) if x.numel() else x.float()
    return (terms / (terms[..., :-1].sum(-1, keepdim=True) + 2.0**-100)).to(x.dtype)


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """The right sum in another order where there are few rows."""
    return softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else softmax(x)


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """A row without an answer becomes zeros, as masked attention is often patched."""
    return softmax(x).nan_to_num(0.0)


def a_hair_less(x: Tensor, dim: int = -1) -> Tensor:
    """A denominator with an epsilon, as norms have."""
    return softmax(x) * (1 - 2.0**-20)


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """An exponential with a step the wrong way."""
    y = softmax(x)
    return torch.where((x > -1.0) & (x < -0.99), y * 0.98, y)
