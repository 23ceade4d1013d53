"""Sums of products: the sums of a linear layer and of matrix products, for any function that computes them."""

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
    """Return y[row, column] = Σ x[row, k] · weight[column, k] as a target.

    Args:
        k: the number of terms.
        m: the number of rows.
        n: the number of columns; k if None.
        dtype: fp32, bf16 or fp16.
        row: the row that is read; None reads the last one and requires every row and column to have its bits.
        column: the output that is read.
        function: the linear layer, called with x and weight.

    Returns:
        A target.

    Example:
        >>> import isobit
        >>> from isobit.reveal import order, targets
        >>> print(order(targets.linear(24, m=3, n=8, function=isobit.linear)).n)
        24
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
    """Return one element of a matrix product of [m, k] by a contiguous [k, n] as a target.

    Args:
        k: the number of terms.
        m: the number of rows.
        n: the number of columns; k if None.
        dtype: fp32, bf16 or fp16.
        row: the row that is read.
        column: the column that is read.
        batch: the number of products of `torch.bmm`; the last is read.
        function: `torch.matmul`, `torch.mm`, `torch.bmm` or one like them.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.matmul(6, n=4)).n
        6
    """
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
    """Return dX[row, column] = Σ grad[row, k] · weight[k, column] as a target, through autograd.

    Args:
        k: the number of terms: the outputs of the layer.
        m: the number of rows.
        n: the number of inputs; k if None.
        dtype: fp32, bf16 or fp16.
        row: the row that is read; None reads the last one and requires every row and column to have its bits.
        function: the linear layer, called with x and weight.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.input_grad(6, n=4)).n
        6
    """
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
    """Return dW[output, input] = Σ grad[token, output] · x[token, input] as a target, through autograd.

    Args:
        k: the number of terms: tokens.
        m: the number of inputs.
        n: the number of outputs; k if None.
        dtype: fp32, bf16 or fp16.
        function: the linear layer, called with x and weight.
        everywhere: require every element of dW to have the bits of the one that is read.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.weight_grad(6, n=4)).n
        6
    """
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
    """Return db[output] = Σ grad[token, output] as a target, through autograd.

    Args:
        k: the number of terms: tokens.
        n: the number of outputs; 64 if None.
        dtype: fp32, bf16 or fp16.
        function: the linear layer, called with x, weight and bias.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.bias_grad(6, n=4)).n
        6
    """
    grad, x = torch.zeros(k, n or 64, dtype=dtype), torch.zeros(k, 1, dtype=dtype)
    weight = torch.zeros(n or 64, 1, dtype=dtype)
    bias = torch.zeros(n or 64, dtype=dtype, requires_grad=True)
    run = backward_of(function(x, weight, bias), bias, grad)
    return TensorTarget(
        f"db of {_name(function)} over {k} tokens, {n or 64} outputs", grad.t(), run
    )


def backward_of(output: Tensor, leaf: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the gradient. The forward pass ran once; probes are written through `.data`."""
    return lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True)[0]


def _name(function: Callable[..., Tensor]) -> str:
    name = getattr(function, "__name__", "function")
    return f"isobit.{name}" if getattr(function, "__module__", "").startswith("isobit") else name


# The sum over keys in attention, and the sum over tokens in the gradient of an embedding.


def attention(
    k: int,
    m: int = 1,
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
    width: int = 64,
    row: int = 0,
    function: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention,
) -> TensorTarget:
    """Return the sum over k keys of one query as a target. Queries are zero, so all keys have the weight 1/k.

    Args:
        k: the number of keys.
        m: the number of queries.
        dtype: fp32, bf16 or fp16.
        heads: the number of heads; the last is read.
        width: the width of a head.
        row: the query that is read.
        function: takes query, key and value, [1, heads, tokens, width].

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.attention(6, width=16)).n
        6
    """
    q = torch.zeros(1, heads, m, width, dtype=dtype)
    key, value = (torch.zeros(1, heads, k, width, dtype=dtype) for _ in range(2))
    return TensorTarget(
        f"{function.__name__} of {m} queries over {k} keys, {heads} heads of {width}, query {row}",
        value[0, -1].t(),
        lambda: function(q, key, value)[0, -1, row],
        divided_by=k,
        scope=f"the sum over keys at equal weights, query {row}",
    )


def embedding_grad(
    k: int,
    m: int = 64,
    dtype: torch.dtype = torch.float32,
    function: Callable[[Tensor, Tensor], Tensor] = F.embedding,
) -> TensorTarget:
    """Return the gradient of one row of an embedding of width m that k tokens share as a target.

    Args:
        k: the number of tokens.
        m: the width of the table.
        dtype: fp32, bf16 or fp16.
        function: takes ids and the table.

    Returns:
        A target.

    Example:
        >>> from isobit.reveal import order, targets
        >>> order(targets.embedding_grad(5, 8)).n
        5
    """
    indices = torch.ones(k, dtype=torch.long)
    weight = torch.zeros(3, m, dtype=dtype, requires_grad=True)
    grad = torch.zeros(k, m, dtype=dtype)
    run = backward_of(function(indices, weight), weight, grad)
    return TensorTarget(
        f"gradient of {function.__name__} over {k} tokens, width {m}", grad.t(), lambda: run()[1]
    )
