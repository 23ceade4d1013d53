"""`LossMeter`: the mean loss over micro-batches and ranks, summed exactly.

Terms are summed as integers (ops/exact_sum), so the value does not depend on how they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.exact_sum.op import exact_state, round_state
from isobit.ops.exact_sum.portable import DIGITS, LOWEST, to_digits
from isobit.order.exact_sum import round_fp32
from isobit.parallel.collectives.levels import Group, RankGroup

# A state's digits are below 2^32, except the last, which has room to spare: an int64 sum of digits
# over this many ranks does not overflow.
MOST_RANKS = 1 << 31


class LossMeter:
    """The loss of a step: the exact sum of its terms over micro-batches and ranks, and their count.

    Example:
        >>> import torch
        >>> from isobit.parallel import LossMeter
        >>> meter = LossMeter()
        >>> meter.add(torch.tensor([0.5, 0.25, 0.0]), active=2)  # the third token is padding
        >>> meter.add(torch.tensor([3.0]))
        >>> meter.value().item()
        1.25
    """

    def __init__(self) -> None:
        """Start with no terms."""
        self.reset()

    def reset(self) -> None:
        """Start again with no terms."""
        self._whole = 0  # the sum of the finite terms in units of 2^LOWEST
        self._specials = [0, 0, 0]  # how many terms are NaN, +inf, -inf
        self._count = 0

    def add(self, terms: Tensor, active: int | Tensor | None = None) -> None:
        """Add the terms of one micro-batch.

        Args:
            terms: One loss per token, 0 for tokens that are not active; of any shape.
            active: The number of active tokens; None counts all terms.

        Raises:
            ArgumentError: The count is negative.
        """
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

    def value(self, group: Group = None, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return sum / count over all ranks of the group, rounded once. All its ranks call this.

        Args:
            group: The data-parallel group, or its `Levels`; None is the default group.
            dtype: fp64 or fp32.

        Raises:
            ArgumentError: No rank has an active token, or the dtype is another.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                expected="torch.float32 or torch.float64",
                received=f"{dtype}",
                remedy="convert the value afterwards",
            )
        state, count = self._over_ranks(group)
        whole, specials = read_state(state)
        if any(specials):
            return round_state(torch.tensor(state), dtype)
        return torch.tensor(divide(whole, count, dtype), dtype=dtype)

    def cross_entropy(self, group: Group = None) -> Tensor:
        """Return the bits of `isobit.linear_cross_entropy` over the whole batch.

        The sum is rounded to fp32 and then divided, so it may differ from `value` in the last bit.

        Raises:
            ArgumentError: No rank has an active token.
        """
        state, count = self._over_ranks(group)
        whole, (nans, plus, minus) = read_state(state)
        # The operator sums log-probabilities, that is the negated terms.
        negated = torch.tensor([*to_digits(-whole), nans, minus, plus])
        return round_state(negated) / -count

    def _over_ranks(self, group: Group) -> tuple[list[int], int]:
        own = [*to_digits(self._whole), *self._specials, self._count]
        *state, count = add_states(own, RankGroup.of(group))
        if not count:
            raise ArgumentError(
                expected="an active token, on some rank",
                received="none",
                remedy="leave out batches without active tokens",
            )
        return state, count


def read_state(state: Sequence[int]) -> tuple[int, list[int]]:
    """Return a state's sum in units of 2^LOWEST, and how many terms are NaN, +inf and -inf."""
    return sum(digit << 32 * i for i, digit in enumerate(state[:DIGITS])), list(state[DIGITS:])


def add_states(numbers: list[int], ranks: RankGroup) -> list[int]:
    """Sum the states and counts of all ranks.

    Raises:
        UnsupportedError: There are so many ranks that an int64 could overflow.
    """
    if len(ranks.ranks) > MOST_RANKS:
        raise UnsupportedError(
            expected=f"at most {MOST_RANKS} ranks, whose digits fit an int64",
            received=f"{len(ranks.ranks)}",
            remedy="add the states of smaller groups, carry, and add those",
        )
    return ranks.add_integers(numbers)


def divide(whole: int, count: int, dtype: torch.dtype) -> float:
    """Return whole · 2^LOWEST / count, rounded once to fp32 or fp64."""
    below = count << -LOWEST
    if dtype == torch.float64:
        return whole / below  # Python rounds the quotient of integers once
    size = abs(whole)
    shift = max(below.bit_length() - size.bit_length() + 54, 0)
    quotient, rest = divmod(size << shift, below)
    spare = max(quotient.bit_length() - 52, 0)
    # Round to odd: 52 bits, the last one set if any bit was lost. fp64 represents them exactly, and
    # rounding that to fp32 is the same as rounding the exact quotient.
    odd = quotient >> spare | bool(rest or quotient & ((1 << spare) - 1))
    return round_fp32(math.copysign(math.ldexp(odd, spare - shift), whole))
