"""Factors of a Hessian in one order of operations, so that LAPACK's blocking and threads do not decide integers."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError


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
