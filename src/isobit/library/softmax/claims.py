"""Claims of softmax-kernel-v1: exact shifts, rows of one, rows without an answer; planted wrong softmaxes."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.subjects import Subject
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.softmax import portable
from isobit.ops.softmax.op import softmax


def portable_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the portable executor's result: the same order in plain torch operations."""
    return portable.softmax(x)


def shifts(subject: Subject, case: Case, tally: Tally) -> None:
    """A shift that is exact changes no bit: only differences to the largest element matter."""
    # On a grid, so that x + c is exact.
    x = (case.arguments["x"].float().clamp(-64, 64) * 256).round() / 256
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
    """A row with a NaN or +inf, or of -inf alone, is the canonical NaN; other rows do not change."""
    x = case.arguments["x"].clone()
    wrong = torch.arange(len(x)) % 2 == 0
    for place, value in ((0, torch.nan), (-1, torch.inf), (slice(None), -torch.inf)):
        spoilt = x.clone()
        spoilt[wrong, place] = value
        found = subject(spoilt)
        nan = torch.full_like(found[wrong], torch.nan)
        tally.same(found[wrong], nan, f"rows spoilt by {value}")
        tally.same(found[~wrong], subject(x)[~wrong], f"rows next to rows spoilt by {value}")
    tally.count(case.rows)


# ---- planted --------------------------------------------------------------------------------------------


def without_shift(x: Tensor, dim: int = -1) -> Tensor:
    """Do not subtract the maximum, so that terms overflow."""
    terms = torch.exp(x.float())
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def over_the_batch(x: Tensor, dim: int = -1) -> Tensor:
    """Subtract the maximum of the whole batch."""
    terms = exp_nonpositive(x.float() - x.float().amax()) if x.numel() else x.float()
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def without_the_last(x: Tensor, dim: int = -1) -> Tensor:
    """Leave the last element out of the denominator."""
    terms = torch.exp(x.float() - x.float().amax(-1, keepdim=True)) if x.numel() else x.float()
    return (terms / (terms[..., :-1].sum(-1, keepdim=True) + 2.0**-100)).to(x.dtype)


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """Sum in another order where there are few rows."""
    return softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else softmax(x)


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """Replace a row without an answer by zeros, a common patch in masked attention."""
    return softmax(x).nan_to_num(0.0)


def a_hair_less(x: Tensor, dim: int = -1) -> Tensor:
    """Add an epsilon to the denominator, as norms do."""
    return softmax(x) * (1 - 2.0**-20)


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """Fall by 2 % between -1 and -0.99, where results should rise."""
    y = softmax(x)
    return torch.where((x > -1.0) & (x < -0.99), y * 0.98, y)
