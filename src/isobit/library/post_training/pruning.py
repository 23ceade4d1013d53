"""Claims of pruning-kernel-v1: `prune(weight, sparsity)`, a reference, and planted wrong ones."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.claims import Subject

SHARES = ("0.5", "0.25", "0.9")


def prune(weight: Tensor, sparsity: float) -> Tensor:
    """Set the smallest magnitudes of each row to zero, the first of equal ones first."""
    count = floor(Fraction(str(sparsity)) * weight.shape[-1])
    order = weight.abs().double().argsort(dim=-1, stable=True)
    return weight.scatter(-1, order[..., :count], 0.0)


def exact_count(subject: Subject, case: Case, tally: Tally) -> None:
    """The tensor, or each of its rows, has the stated share of zeros, rounded down or up."""
    x = without_zeros(case)
    tally.count(case.rows)
    for share in SHARES:
        zero = subject(x.clone(), float(share)) == 0
        wanted, width = Fraction(share), x.shape[-1]
        of_rows = zero.sum(-1)
        by_row = (of_rows >= floor(wanted * width)) & (of_rows <= ceil(wanted * width))
        total = int(zero.sum())
        whole = floor(wanted * x.numel()) <= total <= ceil(wanted * x.numel())
        tally.true(by_row | whole, f"zeros of each row at {share}", of_rows)


def kept_bits(subject: Subject, case: Case, tally: Tally) -> None:
    """What is not zero has the bits that it had."""
    x = without_zeros(case)
    tally.count(case.rows)
    for share in SHARES:
        found = subject(x.clone(), float(share))
        tally.same(found, torch.where(found == 0, found, x), f"kept weights at {share}")
        tally.true((found != 0).any().reshape(1), f"something is kept at {share}")


def smallest_go(subject: Subject, case: Case, tally: Tally) -> None:
    """In the tensor or in each row, no weight that was dropped is larger than one that was kept."""
    x = without_zeros(case)
    tally.count(case.rows)
    for share in SHARES:
        zero = subject(x.clone(), float(share)) == 0
        size = x.abs().double()
        dropped = torch.where(zero, size, -1.0)
        kept = torch.where(zero, torch.inf, size)
        by_row = dropped.amax(-1) <= kept.amin(-1)
        whole = bool(dropped.max() <= kept.min())
        tally.true(by_row | whole, f"magnitudes at {share}", dropped.amax(-1))


def ends(subject: Subject, case: Case, tally: Tally) -> None:
    """Nothing is dropped at 0; a second pruning at the same share changes nothing."""
    x = without_zeros(case)
    tally.count(case.rows)
    tally.same(subject(x.clone(), 0.0), x, "a share of 0")
    once = subject(x.clone(), 0.5)
    tally.same(subject(once.clone(), 0.5), once, "pruned again")


def free_of_layout(subject: Subject, case: Case, tally: Tally) -> None:
    """Threads and strides change no bit; neither does the same call again."""
    x = without_zeros(case)
    tally.count(case.rows)
    with thread_count(1):
        wanted = subject(x.clone(), 0.5)
    with thread_count(2):
        tally.same(subject(x.clone(), 0.5), wanted, "two threads")
    tally.same(subject(x.mT.contiguous().mT, 0.5), wanted, "stored by columns")


def without_zeros(case: Case) -> Tensor:
    """Return the drawn weights; zeros among them, which would count as pruned, are replaced."""
    x = next(iter(case.arguments.values()))
    return torch.where(x == 0, torch.ones_like(x), x)


# ---- planted


def nothing(weight: Tensor, sparsity: float) -> Tensor:
    """Match no module, silently: a target by a string where a list is expected."""
    return weight.clone()


def one_too_many(weight: Tensor, sparsity: float) -> Tensor:
    """Drop what is at most the threshold, the threshold itself too."""
    count = min(int(sparsity * weight.shape[-1]), weight.shape[-1] - 1)
    least = weight.abs().double().sort(dim=-1).values[..., count : count + 1]
    return torch.where(weight.abs().double() <= least, 0.0, weight).to(weight.dtype)


def largest_go(weight: Tensor, sparsity: float) -> Tensor:
    """Drop the largest."""
    count = floor(Fraction(str(sparsity)) * weight.shape[-1])
    order = weight.abs().double().argsort(dim=-1, descending=True, stable=True)
    return weight.scatter(-1, order[..., :count], 0.0)


def by_value(weight: Tensor, sparsity: float) -> Tensor:
    """Sort values, not magnitudes."""
    count = floor(Fraction(str(sparsity)) * weight.shape[-1])
    return weight.scatter(-1, weight.double().argsort(dim=-1, stable=True)[..., :count], 0.0)


def masked_softly(weight: Tensor, sparsity: float) -> Tensor:
    """Multiply what is kept by one and a bit, as a rescaled mask does."""
    return prune(weight, sparsity) * 1.0078125


def at_random(weight: Tensor, sparsity: float) -> Tensor:
    """Drop each weight with the stated chance."""
    kept = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) >= sparsity
    return torch.where(kept, weight, 0.0).to(weight.dtype)


def by_storage(weight: Tensor, sparsity: float) -> Tensor:
    """Drop the next one of equal magnitudes if memory is not contiguous."""
    if weight.is_contiguous():
        return prune(weight, sparsity)
    return prune(weight.flip(-1), sparsity).flip(-1) if weight.shape[-1] % 2 == 0 else weight


def keeps_all_at_half(weight: Tensor, sparsity: float) -> Tensor:
    """Prune again what is left: half of a half."""
    if bool((weight == 0).any()):
        return prune(torch.where(weight == 0, torch.inf, weight).to(weight.dtype), sparsity / 2)
    return prune(weight, sparsity)


def drops_at_zero(weight: Tensor, sparsity: float) -> Tensor:
    """Drop at least one."""
    return prune(weight, max(sparsity, 1.5 / weight.shape[-1]))


def by_threads(weight: Tensor, sparsity: float) -> Tensor:
    """Drop another one on two threads."""
    found = prune(weight, sparsity)
    return found if torch.get_num_threads() == 1 else found.roll(1, -1)


# ---- stock controls


def wanda_magnitude(weight: Tensor, sparsity: float) -> Tensor:
    """Prune as `prune_magnitude` of the Wanda repository does: by a threshold, which it drops with all its equals."""
    size = weight.abs()
    threshold = torch.sort(size.flatten()).values[int(size.numel() * sparsity)]
    return torch.where(size <= threshold, 0.0, weight).to(weight.dtype)


def sparsegpt(weight: Tensor, sparsity: float) -> Tensor:
    """Prune as SparseGPT does: what a dropped weight contributed is moved into the weights after it."""
    n = weight.shape[-1]
    x = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h = x.T @ x / len(x) + 0.01 * torch.eye(n, dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    found = weight.double().clone()
    score = found.square() / factor.diagonal().square()
    dropped = score <= score.flatten().sort().values[int(score.numel() * sparsity)]
    for at in range(n):
        kept = torch.where(dropped[:, at], 0.0, found[:, at])
        error = (found[:, at] - kept) / factor[at, at]
        found[:, at + 1 :] -= error[:, None] * factor[at, at + 1 :]
        found[:, at] = kept
    return found.to(weight.dtype)
