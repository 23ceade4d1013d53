"""The loss and the gradient norm over micro-batches and ranks: sums in integers, so one value for every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.exact_sum.op import exact_state, round_state
from isobit.ops.exact_sum.portable import DIGITS, LOWEST, to_digits
from isobit.ops.unfinished import refuse_unfinished
from isobit.optim import norm_of, scale_by_norm
from isobit.order.exact_sum import round_fp32
from isobit.parallel.collectives.group import Members
from isobit.parallel.tensor.pieces import counted_here, find_shards, is_dtensor

# A state's digits are below 2^32, but for the last, which has room to spare: so many fit an int64.
MOST_RANKS = 1 << 31


class LossMeter:
    """The loss of a step: exact sum of its terms over micro-batches, then ranks, and their count."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing added yet."""
        self._whole, self._specials, self._count = 0, [0, 0, 0], 0

    def add(self, terms: Tensor, active: int | Tensor | None = None) -> None:
        """One micro-batch: a term per token, 0 for what is not active; without `active`, all are."""
        count = terms.numel() if active is None else int(active)
        if count < 0:
            raise ArgumentError(
                expected="a count of zero or more",
                received=f"{count}",
                remedy="pass the number of active tokens",
            )
        whole, specials = read_state(exact_state([terms.detach().cpu()]).tolist())
        self._whole += whole
        self._specials = [a + b for a, b in zip(self._specials, specials, strict=True)]
        self._count += count

    def value(
        self, group: dist.ProcessGroup | None = None, *, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Sum / count over the group (None is the world), rounded once, to fp64 or fp32; all its ranks call this."""
        if dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                expected="torch.float32 or torch.float64",
                received=f"{dtype}",
                remedy="convert the value afterwards",
            )
        state, count = self._merged(group)
        whole, specials = read_state(state)
        if any(specials):
            return round_state(torch.tensor(state), dtype)
        return torch.tensor(divide(whole, count, dtype), dtype=dtype)

    def cross_entropy(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """The bits of isobit.linear_cross_entropy over the whole batch: the sum rounded to fp32, then divided."""
        state, count = self._merged(group)
        whole, (nans, plus, minus) = read_state(state)
        negated = torch.tensor([*to_digits(-whole), nans, minus, plus])  # it adds log-probabilities
        return round_state(negated) / -count

    def _merged(self, group: dist.ProcessGroup | None) -> tuple[list[int], int]:
        *state, count = add_states(
            [*to_digits(self._whole), *self._specials, self._count], Members.of(group)
        )
        if not count:
            raise ArgumentError(
                expected="an active token, on some rank",
                received="none",
                remedy="leave out batches without active tokens",
            )
        return state, count


def mean_loss(
    terms: Tensor, active: int | Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean of one micro-batch a rank, fp64: of the sum over all ranks, rounded once."""
    meter = LossMeter()
    meter.add(terms, active)
    return meter.value(group)


def read_state(state: Sequence[int]) -> tuple[int, list[int]]:
    """The whole number of 2^LOWEST that the digits hold, and how many NaN, +inf and -inf."""
    return sum(digit << 32 * i for i, digit in enumerate(state[:DIGITS])), list(state[DIGITS:])


def add_states(numbers: list[int], members: Members) -> list[int]:
    """States, and counts, of all ranks."""
    if len(members.ranks) > MOST_RANKS:
        raise UnsupportedError(
            expected=f"at most {MOST_RANKS} ranks, whose digits fit an int64",
            received=f"{len(members.ranks)}",
            remedy="add the states of smaller groups, carry, and add those",
        )
    return members.add_integers(numbers)


def divide(whole: int, count: int, dtype: torch.dtype) -> float:
    """whole · 2^LOWEST / count, rounded once."""
    below = count << -LOWEST
    if dtype == torch.float64:
        return whole / below  # Python rounds the quotient of integers once
    size = abs(whole)
    shift = max(below.bit_length() - size.bit_length() + 54, 0)
    quotient, rest = divmod(size << shift, below)
    spare = max(quotient.bit_length() - 52, 0)
    # 52 bits, the last odd if any was lost: fp64 holds them, and fp32 then rounds as if it saw all.
    odd = quotient >> spare | bool(rest or quotient & ((1 << spare) - 1))
    return round_fp32(math.copysign(math.ldexp(odd, spare - shift), whole))


@torch.no_grad()
def get_total_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor], *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The 2-norm of the gradients of a model that is spread over the group, fp32: isobit.optim.get_total_norm's bits.

    Every element is counted once: DTensor gradients by their placements, tensor-parallel shards by each rank, and
    what every rank holds whole by the first. The group (None is the world) is of all ranks that hold a piece.
    """
    members = Members.of(group)
    known = find_shards(parameters) if isinstance(parameters, nn.Module) else {}
    refusal: Exception | None = None
    numbers = [*exact_state([]).tolist(), 1]
    try:
        numbers = [
            *exact_state(counted_here(list_of(parameters), members, known), squared=True).tolist(),
            0,
        ]
    except Exception as error:  # told to the others, who would wait for this rank
        refusal = error
    *state, refused = add_states(numbers, members)
    if refusal is not None:
        raise refusal
    if refused:
        raise UnsupportedError(
            expected="gradients that every rank can count",
            received=f"{refused} of {len(members.ranks)} ranks that could not",
            remedy="see their errors",
        )
    return norm_of(torch.tensor(state))


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """isobit.optim.clip_grad_norm_ for a model that is spread over the group; returns the norm before, fp32."""
    given = list_of(parameters)
    refuse_unfinished("clip_grad_norm_", given)
    norm = get_total_norm(parameters if isinstance(parameters, nn.Module) else given, group=group)
    if error_if_nonfinite and not norm.isfinite():
        raise UnsupportedError(
            expected="gradients of finite norm",
            received=f"a norm of {norm.item()}",
            remedy="find the gradient that is not finite, or pass error_if_nonfinite=False",
        )
    grads = [p.grad for p in given if p.grad is not None]
    scale_by_norm([g.to_local() if is_dtensor(g) else g for g in grads], norm, max_norm)  # type: ignore[attr-defined]
    return norm


def list_of(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """A model's, one, or several."""
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
