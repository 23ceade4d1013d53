"""Statistics of activations: the Hessian of GPTQ, the column norms of Wanda, the ranges of observers.

[Note: What the bits depend on]
GPTQ, Wanda and SparseGPT decide integers and masks by sums over calibration samples; one ulp of a sum can turn them.
A Hessian is added up sample by sample in the order of the samples' numbers, by the tree over these numbers, so that its
bits depend on the samples and their numbers, not on batches, threads or ranks. Column norms are exact sums of squares,
rounded once, and ranges are minima and maxima: their bits depend on the set of samples alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.linear import partial
from isobit.order.samples import Samples

# Factors of a Hessian in one order of operations, so that LAPACK's blocking and threads do not decide integers.


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with UᵀU = H⁻¹, as GPTQ uses it.

    H = RRᵀ with R upper triangular (Cholesky from the last row up), and U = R⁻¹. Each element is computed by
    multiplications, divisions and subtractions one after the other; nothing is added up by a library, so that the bits
    do not depend on threads. It takes 2 · columns steps of [columns, columns] in fp64.

    Args:
        hessian: [columns, columns], symmetric; add the dampening first.

    Returns:
        U in fp64.

    Raises:
        ArgumentError: If the matrix is not positive definite.

    Example:
        >>> u = isobit.calibration.inverse_factor(torch.tensor([[4.0, 0.0], [0.0, 16.0]]))
        >>> u.tolist()
        [[0.5, 0.0], [0.0, 0.25]]
    """
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ArgumentError(
            expected="a square matrix",
            received=str(list(hessian.shape)),
            remedy="pass the Hessian of one layer",
        )
    rest = hessian.detach().double().clone()
    n = len(rest)
    factor = torch.zeros_like(rest)
    for j in reversed(range(n)):
        pivot = float(rest[j, j])
        if not pivot > 0:
            raise ArgumentError(
                expected="a positive definite matrix",
                received=f"pivot {pivot:.3g} in column {j}",
                remedy="add more dampening to the diagonal",
            )
        column = rest[: j + 1, j] / rest[j, j].sqrt()
        factor[: j + 1, j] = column
        rest[:j, :j] -= column[:j, None] * column[None, :j]
    found = torch.eye(n, dtype=torch.float64)
    for j in reversed(range(n)):
        found[j, j:] /= factor[j, j]
        found[:j, j:] -= factor[:j, j, None] * found[None, j, j:]
    return found


def check_input(x: Tensor, columns: int) -> Tensor:
    """Return activations as [tokens, columns]; raise for other shapes and dtypes."""
    if x.ndim < 2 or x.shape[-1] != columns or not x.is_floating_point():
        raise ArgumentError(
            expected=f"floating-point activations [..., {columns}]",
            received=f"{x.dtype} {list(x.shape)}",
            remedy="pass the input of the linear layer",
        )
    return x.detach().reshape(-1, columns)


class Hessian:
    """2/n · Σ xᵀx over n samples, in fp32.

    Args:
        columns: The inputs of the linear layer.

    Example:
        >>> x = torch.randn(4, 8, 16)
        >>> whole, halves = isobit.calibration.Hessian(16), isobit.calibration.Hessian(16)
        >>> whole.add(x)
        >>> halves.add(x[:1]), halves.add(x[1:])
        (None, None)
        >>> torch.equal(whole.value(), halves.value())
        True
    """

    def __init__(self, columns: int) -> None:
        """Start without samples."""
        self.columns = columns
        self.next = 0  # number of the sample that is added next
        self.nodes: dict[
            tuple[int, int], Tensor
        ] = {}  # (level, index of the block of 2^level samples)

    def add(
        self, x: Tensor, *, lengths: Sequence[int] | None = None, first: int | None = None
    ) -> None:
        """Add samples.

        Args:
            x: [samples, tokens, columns]; or [tokens, columns], one sample, or several if lengths are given.
            lengths: Tokens of each sample, for [tokens, columns].
            first: The number of the first of these samples among all; by default they follow those added before.
        """
        rows = check_input(x, self.columns)
        if lengths is None:
            lengths = [x.shape[-2]] * (len(rows) // x.shape[-2] if x.shape[-2] else 0)
        if sum(lengths) != len(rows):
            raise ArgumentError(
                expected=f"lengths that add up to {len(rows)} rows",
                received=f"{sum(lengths)}",
                remedy="leave padding out of x, or pass the length of every sample",
            )
        self.next = self.next if first is None else first
        for sample in torch.split(rows, list(lengths)):
            share = partial.weight_grad(sample, sample, Samples.packed([len(sample)]))
            self._push(0, self.next, partial.merge([share], dtype=torch.float32))
            self.next += 1

    def _push(self, level: int, index: int, value: Tensor) -> None:
        """Put a block of 2^level samples into the tree, and add it to its sibling if that is there."""
        if (level, index) in self.nodes:
            raise ArgumentError(
                expected="every sample once",
                received=f"sample {index << level} twice",
                remedy="number samples over all ranks: first=",
            )
        sibling = self.nodes.pop((level, index ^ 1), None)
        if sibling is None:
            self.nodes[level, index] = value
        else:
            left, right = (value, sibling) if index % 2 == 0 else (sibling, value)
            self._push(level + 1, index // 2, left + right)

    def merge(self, others: Iterable[Hessian]) -> Hessian:
        """Return the statistics of all ranks together; each sample must be on one of them."""
        found = Hessian(self.columns)
        for one in (self, *others):
            for (level, index), value in sorted(one.nodes.items(), key=lambda node: node[0]):
                found._push(level, index, value)
            found.next = max(found.next, one.next)
        return found

    def value(self) -> Tensor:
        """Return the Hessian, [columns, columns]; raise as `total` does."""
        return self.total() * (2 / self.count())

    def count(self) -> int:
        """Return how many samples were added."""
        return sum(1 << level for level, _ in self.nodes)

    def total(self) -> Tensor:
        """Return Σ xᵀx, [columns, columns].

        Raises:
            ArgumentError: If no sample was added, or a number below the largest is missing.
        """
        blocks = sorted(self.nodes, key=lambda node: node[1] << node[0])
        covered = [(index << level, (index + 1) << level) for level, index in blocks]
        edges = [0, *(stop for _, stop in covered)]
        if not blocks or [start for start, _ in covered] != edges[:-1]:
            raise ArgumentError(
                expected="samples 0, 1, 2, … without a gap",
                received=f"samples {covered}",
                remedy="merge the statistics of every rank, and number samples from 0",
            )
        total = self.nodes[blocks[-1]]
        for block in reversed(
            blocks[:-1]
        ):  # smaller blocks first, as in a tree of the next power of two
            total = self.nodes[block] + total
        return total


CHUNK, CHUNKS = 16, 64  # bits of a digit, digits: squares of fp32 have exponents from −298 to 256
LOWEST = -384


class ColumnNorms:
    """Root of the sum of squares of each column: exact sums, rounded once, so that they have no order.

    Example:
        >>> norms = isobit.calibration.ColumnNorms(2)
        >>> norms.add(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        >>> norms.value().tolist()
        [5.0, 1.0]
    """

    def __init__(self, columns: int) -> None:
        """Start without samples."""
        self.columns = columns
        self.digits = torch.zeros(CHUNKS, columns, dtype=torch.int64)
        self.broken = torch.zeros(columns, dtype=torch.bool)  # NaN or infinity

    def add(self, x: Tensor) -> None:
        """Add activations [..., columns] of fp32, bf16 or fp16."""
        rows = check_input(x, self.columns)
        if rows.dtype == torch.float64:
            raise ArgumentError(
                expected="fp32, bf16 or fp16: their squares are exact in fp64",
                received="float64",
                remedy="x.float()",
            )
        square = rows.cpu().double().square()
        finite = torch.isfinite(square)
        self.broken |= ~finite.all(0)
        mantissa, exponent = torch.frexp(torch.where(finite, square, 0.0))
        whole = (mantissa * 2.0**53).long()
        place = exponent.long() - 53 - LOWEST
        digit, shift = place // CHUNK, place % CHUNK
        mask = (1 << CHUNK) - 1
        for part in range(4):  # 53 bits in four digits, each shifted by less than one
            value = ((whole >> (CHUNK * part)) & mask) << shift
            at = torch.where(value == 0, 0, digit + part)
            self.digits.scatter_add_(0, at, value)
        carry = self.digits >> CHUNK  # so that no number of rows overflows
        self.digits = self.digits & mask
        self.digits[1:] += carry[:-1]

    def merge(self, others: Iterable[ColumnNorms]) -> ColumnNorms:
        """Return the statistics of all ranks together."""
        found = ColumnNorms(self.columns)
        for one in (self, *others):
            found.digits = found.digits + one.digits
            found.broken = found.broken | one.broken
        return found

    def squares(self) -> list[Fraction]:
        """Return the exact sums of squares."""
        return [
            sum(
                Fraction(d) * Fraction(2) ** (LOWEST + CHUNK * i) for i, d in enumerate(column) if d
            )
            or Fraction(0)
            for column in self.digits.t().tolist()
        ]

    def value(self) -> Tensor:
        """Return the norms, [columns], in fp64; NaN for columns with NaN or infinities."""
        found = torch.tensor([float(square) for square in self.squares()], dtype=torch.float64)
        return torch.where(self.broken, torch.nan, found.sqrt())


class Ranges:
    """Least and largest value of each column; NaN where there is one.

    Example:
        >>> ranges = isobit.calibration.Ranges(1)
        >>> ranges.add(torch.tensor([[3.0], [-4.0]]))
        >>> [one.tolist() for one in ranges.value()]
        [[-4.0], [3.0]]
    """

    def __init__(self, columns: int) -> None:
        """Start without samples."""
        self.columns = columns
        self.low = torch.full((columns,), torch.inf)
        self.high = torch.full((columns,), -torch.inf)

    def add(self, x: Tensor) -> None:
        """Add activations [..., columns]."""
        rows = check_input(x, self.columns).cpu().float()
        if len(rows):
            self.low = torch.minimum(self.low, rows.amin(0))
            self.high = torch.maximum(self.high, rows.amax(0))

    def merge(self, others: Iterable[Ranges]) -> Ranges:
        """Return the statistics of all ranks together."""
        found = Ranges(self.columns)
        for one in (self, *others):
            found.low = torch.minimum(found.low, one.low)
            found.high = torch.maximum(found.high, one.high)
        return found

    def value(self) -> tuple[Tensor, Tensor]:
        """Return least and largest values, [columns] each."""
        return self.low, self.high
