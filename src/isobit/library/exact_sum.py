"""Claims of exact-sum-kernel-v1: the exact sum, rounded once, in any order; planted wrong sums."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import strided
from isobit.foundation.machine import thread_count
from isobit.library import stock
from isobit.library.claims import Subject
from isobit.ops.exact_sum import portable
from isobit.ops.exact_sum.op import exact_state, exact_sum, round_state
from isobit.order.exact_sum import exact_sum as defined_fp64
from isobit.order.exact_sum import exact_sum_fp32, round_fp32


def sums(subject: Subject, rows: Tensor) -> Tensor:
    """Return the sum of each row by itself."""
    return torch.stack([subject(row) for row in rows]) if len(rows) else torch.zeros(0)


def rounded_once(subject: Subject, case: Case, tally: Tally) -> None:
    """Each row's sum is the definition's; so is one closer to a tie than fp64 can represent."""
    x = case.arguments["x"]
    tally.count(case.rows)
    wanted = torch.tensor([exact_sum_fp32(row) for row in x.double().tolist()])
    tally.same(sums(subject, x), wanted, "against the definition")
    if case.dtype != torch.float16:
        near = torch.tensor([1.0, 2.0**-24, 2.0**-90]).to(case.dtype)
        for sign in (1, -1):
            tally.same(subject(sign * near), torch.tensor(sign * (1 + 2.0**-23)), "next to a tie")


def free_of_order(subject: Subject, case: Case, tally: Tally) -> None:
    """Reversing, shuffling, zeros in front and other storage change no bit."""
    x = case.arguments["x"]
    tally.count(case.rows)
    whole = sums(subject, x)
    order = torch.randperm(x.shape[1], generator=case.generator(31))
    moved = {
        "reversed": x.flip(1),
        "shuffled": x[:, order],
        "stored apart": strided(x),
        "among zeros": torch.cat([torch.zeros_like(x), x], 1),
    }
    for name, rows in moved.items():
        tally.same(sums(subject, rows), whole, name)


def merged(subject: Subject, case: Case, tally: Tally) -> None:
    """The states of the pieces of a sum, added, round to the sum: ranks and micro-batches do this."""
    x = case.arguments["x"]
    tally.count(case.rows)
    places = (0, x.shape[1] // 3, x.shape[1] // 2, x.shape[1])

    def of_pieces(row: Tensor) -> Tensor:
        cuts = pairwise(places)
        return round_state(sum((exact_state([row[a:b]]) for a, b in cuts), exact_state([])))

    tally.same(sums(subject, x), sums(of_pieces, x), "the pieces' digits added")


def on_threads(subject: Subject, case: Case, tally: Tally) -> None:
    """The sum of all rows has the same bits on one thread and on two."""
    x = case.arguments["x"]
    tally.count(case.rows)
    for count in (1, 2):
        with thread_count(count):
            wanted = torch.tensor(exact_sum_fp32(x.double().flatten().tolist()))
            tally.same(subject(x), wanted, f"{count} threads")


def gradient_is_upstream(subject: Subject, case: Case, tally: Tally) -> None:
    """Every element has the gradient of the sum, rounded to its dtype."""
    x = case.arguments["x"].detach().requires_grad_()
    tally.count(case.rows)
    for upstream in (1.0, -0.3, 2.0**-20):
        with torch.enable_grad():
            total = subject(x)
        (grad,) = (
            torch.autograd.grad(total, x, torch.full_like(total, upstream))
            if total.requires_grad
            else (0 * x,)
        )
        tally.same(grad, torch.full_like(x, upstream), f"of an upstream {upstream}")


def portable_sum(x: Tensor) -> Tensor:
    """Return the portable executor's sum."""
    return portable.exact_sum(x)


def executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """Both executors have the same bits, row by row."""
    x = case.arguments["x"]
    tally.count(case.rows)
    tally.same(sums(subject, x), sums(portable_sum, x), "against the other executor")


# ---- planted --------------------------------------------------------------------------------------------


def in_fp64(x: Tensor) -> Tensor:
    """Sum in fp64: wide, but not exact."""
    return x.double().sum().float()


def rounded_twice(x: Tensor) -> Tensor:
    """Round the exact sum to fp64, and then to fp32."""
    return torch.tensor(round_fp32(defined_fp64(x.detach().double().flatten().tolist())))


def halves_rounded(x: Tensor) -> Tensor:
    """Round each half before the halves are added."""
    flat = x.flatten()
    half = flat.numel() // 2
    return exact_sum(flat[:half]) + exact_sum(flat[half:])


def skipping_the_small(x: Tensor) -> Tensor:
    """Drop what is far below the largest, as a kernel with two levels would."""
    size = x.detach().abs().nan_to_num(torch.inf)
    most = torch.where(size < torch.inf, size, 0.0).amax() if x.numel() else 0.0
    return exact_sum(torch.where(size < most * 2.0**-20, 0.0, x))


def with_one_infinity(x: Tensor) -> Tensor:
    """Return +inf for infinities of both signs."""
    return torch.where((x == torch.inf).any(), torch.inf, exact_sum(x))


def mean_gradient(x: Tensor) -> Tensor:
    """Have the gradient of a mean."""
    return (exact_sum(x) - x.mean()).detach() + x.float().mean()


def by_storage(x: Tensor) -> Tensor:
    """Sum exactly only contiguous memory."""
    return exact_sum(x) if x.is_contiguous() and x.storage_offset() == 0 else stock.exact_sum(x)


def by_threads(x: Tensor) -> Tensor:
    """Sum exactly on one thread only."""
    return exact_sum(x) if torch.get_num_threads() == 1 else stock.exact_sum(x)
