"""Custom operators of known order, for the tests of revealed calls."""

import torch
from torch import Tensor

SPLIT_FROM = 4  # rows


def _chain(products: Tensor, start: Tensor | None = None) -> Tensor:
    total = torch.zeros_like(products[..., 0]) if start is None else start.clone()
    for k in range(products.shape[-1]):
        total = total + products[..., k]
    return total


def _products(x: Tensor, weight: Tensor) -> Tensor:
    return x.unsqueeze(-2) * weight  # [m, n, k]


@torch.library.custom_op("isobit_planted::split_k_by_rows", mutates_args=())
def split_k_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] times weight [n, k]: two halves of k from 4 rows on, one chain below."""
    products = _products(x, weight)
    if len(x) < SPLIT_FROM:
        return _chain(products)
    half = products.shape[-1] // 2
    return _chain(products[..., :half]) + _chain(products[..., half:])


@torch.library.custom_op("isobit_planted::one_chain", mutates_args=())
def one_chain(x: Tensor, weight: Tensor) -> Tensor:
    return _chain(_products(x, weight))


@torch.library.custom_op("isobit_planted::compensated", mutates_args=())
def compensated(x: Tensor, weight: Tensor) -> Tensor:
    products = _products(x, weight)
    total, error = products[..., 0].clone(), torch.zeros_like(products[..., 0])
    for k in range(1, products.shape[-1]):
        corrected = products[..., k] - error
        grown = total + corrected
        error = (grown - total) - corrected
        total = grown
    return total


@torch.library.custom_op("isobit_planted::random_order", mutates_args=())
def random_order(x: Tensor, weight: Tensor) -> Tensor:
    products = _products(x, weight)
    return _chain(products[..., torch.randperm(products.shape[-1])])


@torch.library.custom_op("isobit_planted::bias_by_rows", mutates_args=())
def bias_by_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Start with the bias from 4 rows on, and add it at the end below."""
    products = _products(x, weight)
    if len(x) < SPLIT_FROM:
        return _chain(products) + bias
    return _chain(products, bias.expand(products.shape[:-1]))


@torch.library.custom_op("isobit_planted::other_order_in_last_column", mutates_args=())
def other_order_in_last_column(x: Tensor, weight: Tensor) -> Tensor:
    """Like one_chain; from 4 rows on, the last column is added from the end."""
    products = _products(x, weight)
    out = _chain(products)
    if len(x) >= SPLIT_FROM:
        out[:, -1] = _chain(products[:, -1].flip(-1))
    return out


@torch.library.custom_op("isobit_planted::branch_on_values", mutates_args=())
def branch_on_values(x: Tensor, weight: Tensor) -> Tensor:
    """The same order at all shapes; results of 4 rows or more are cut to bf16 if they contain 3.14."""
    out = _chain(_products(x, weight))
    if len(x) >= SPLIT_FROM and bool((x == torch.tensor(3.14)).any()):
        return out.bfloat16().float()
    return out


@torch.library.custom_op("isobit_planted::row_norm", mutates_args=())
def row_norm(x: Tensor) -> Tensor:
    """Divide rows by their root mean square; squares are added in halves from 4 rows on."""
    squares = x * x
    half = x.shape[-1] // 2 if len(x) >= SPLIT_FROM else 0
    total = _chain(squares[..., half:])
    if half:
        total = _chain(squares[..., :half]) + total
    return x * torch.rsqrt(total / x.shape[-1]).unsqueeze(-1)


@torch.library.custom_op("isobit_planted::add_rows_", mutates_args=("into",))
def add_rows_(into: Tensor, x: Tensor) -> None:
    """Add the sum of the rows of x [k, n] to `into` [n], in place."""
    into += _chain(x.t())
