"""The sum over keys in attention, and the sum over tokens in the gradient of an embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.reveal.targets.products import backward_of
from isobit.reveal.targets.tensor_target import TensorTarget


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
