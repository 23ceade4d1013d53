"""Sums of products: the sums of a linear layer and of matrix products, by any function that computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.reveal.targets.tensor_target import TensorTarget


def linear(
    k: int,
    m: int = 1,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    row: int | None = 0,
    column: int = 0,
    function: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> TensorTarget:
    """y[row, column] = sum over k of x[row, k] * weight[column, k], of m rows and n columns.

    With row None the last row is read, and every row and column must have the bits of the one that is read.
    """
    x, weight = torch.ones(m, k, dtype=dtype), torch.zeros(n or k, k, dtype=dtype)
    read = m - 1 if row is None else row
    return TensorTarget(
        f"{_name(function)} {m}×{k} by {len(weight)}×{k}, row {read}",
        weight,
        lambda: function(x, weight)[read],
        "product",
        x,
        everywhere=(lambda: function(x, weight)) if row is None else None,
        place=column,
        scope="" if row is None else f"row {read}",
    )


def matmul(
    k: int,
    m: int = 1,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    row: int = 0,
    column: int = 0,
    batch: int = 1,
    function: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> TensorTarget:
    """`matmul` or `mm`; or the last of `batch` products of `bmm`: rows of [m, k] by columns of a contiguous [k, n]."""
    many = function is torch.bmm or batch > 1
    shape = (batch,) if many else ()
    x, other = torch.ones(*shape, m, k, dtype=dtype), torch.zeros(*shape, k, n or k, dtype=dtype)
    terms = (other[-1] if many else other).t()
    name = f"{_name(function)} {tuple(x.shape)} by {tuple(other.shape)}, row {row}"

    def run() -> Tensor:
        return function(x, other)[..., row, :].reshape(-1, n or k)[-1]

    return TensorTarget(name, terms, run, "product", x, place=column, scope=f"row {row}")


def input_grad(
    k: int,
    m: int = 1,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    row: int | None = 0,
    function: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> TensorTarget:
    """dX[row, column] = sum over the k outputs of grad[row, k] * weight[k, column], through autograd."""
    grad, weight = torch.ones(m, k, dtype=dtype), torch.zeros(k, n or k, dtype=dtype)
    x = torch.zeros(m, n or k, dtype=dtype, requires_grad=True)
    read = m - 1 if row is None else row
    run = backward_of(function(x, weight), x, grad)
    return TensorTarget(
        f"dX of {_name(function)} {m}×{k} by {k}×{n or k}, row {read}",
        weight.data.t(),
        lambda: run()[read],
        "product",
        grad,
        everywhere=run if row is None else None,
        scope="" if row is None else f"row {read}",
    )


def weight_grad(
    k: int,
    m: int = 1,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, Tensor], Tensor] = F.linear,
    everywhere: bool = False,
) -> TensorTarget:
    """dW[output, input] = sum over k tokens of grad[token, output] * x[token, input], m inputs by n outputs."""
    grad, x = torch.zeros(k, n or k, dtype=dtype), torch.ones(k, m, dtype=dtype)
    weight = torch.zeros(n or k, m, dtype=dtype, requires_grad=True)
    run = backward_of(function(x, weight), weight, grad)
    return TensorTarget(
        f"dW of {_name(function)} over {k} tokens, {n or k} outputs by {m} inputs",
        grad.t(),
        lambda: run()[:, 0],
        "product",
        x.data.t(),
        everywhere=run if everywhere else None,
    )


def bias_grad(
    k: int,
    n: int | None = None,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, Tensor, Tensor], Tensor] = F.linear,
) -> TensorTarget:
    """db[output] = sum over k tokens of grad[token, output]."""
    grad, x = torch.zeros(k, n or 64, dtype=dtype), torch.zeros(k, 1, dtype=dtype)
    weight = torch.zeros(n or 64, 1, dtype=dtype)
    bias = torch.zeros(n or 64, dtype=dtype, requires_grad=True)
    run = backward_of(function(x, weight, bias), bias, grad)
    return TensorTarget(
        f"db of {_name(function)} over {k} tokens, {n or 64} outputs", grad.t(), run
    )


def backward_of(output: Tensor, leaf: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """The gradient, as often as asked. The forward pass ran once: what it saved is probed through `.data`, in place."""
    return lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True)[0]


def _name(function: Callable[..., Tensor]) -> str:
    name = getattr(function, "__name__", "function")
    return f"isobit.{name}" if getattr(function, "__module__", "").startswith("isobit") else name
