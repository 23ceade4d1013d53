"""Planted operators of unusual forms: several results, written in place, signs of zero, bf16, one number per sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isobit.auditing.records import ERROR
from isobit.library.audit.plants import products
from isobit.library.audit.plants.plant import (
    WIDTH,
    Function,
    Net,
    Plant,
    draw,
    hidden,
    operator,
    planted_in_net,
    rows_by_outputs,
)
from isobit.library.audit.plants.products import MANY, chained, row_sum, rows_of


def no_result(*_: Tensor) -> None:
    """Return nothing: the operator writes to its argument."""


def in_place(name: str, function: Function) -> Function:
    """Register an operator that writes to its first argument and returns nothing; call it on a copy."""
    made = torch.library.custom_op(f"planted::{name}", function, mutates_args=("x",))
    made.register_fake(no_result)

    def call(x: Tensor) -> Tensor:
        y = x.clone()
        made(y)
        return y

    return call


def write_row_sum(x: Tensor) -> None:
    """Subtract each row's sum from it, added by halves where rows are many."""
    total = products.pairwise(x) if rows_of(x) > MANY else products.chain(x)
    x.sub_(total[..., None])


def write_neighbour(x: Tensor) -> None:
    """Overwrite the end of the first sample where there is a second one."""
    if len(x) > 1:
        x[0, -1, -1] = x[1, -1, -1]


def both_results(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty results of `scores_and_sum`."""
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@operator("second_result", both_results)
def second_result(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return doubled values, which are right, and their sums, whose order depends on the rows."""
    total = products.backwards(x) if rows_of(x) > MANY else products.chain(x)
    return x * 2, total


def use_second(x: Tensor) -> Tensor:
    """Subtract the second result from the first."""
    twice, total = second_result(x)
    return twice - total[..., None]  # type: ignore[no-any-return]


def right_second(x: Tensor) -> Tensor:
    """Do the same in one order."""
    return x * 2 - products.chain(x)[..., None]


@operator("negative_zero")
def negative_zero(x: Tensor) -> Tensor:
    """Give zeros another sign where samples are many: equal by value, not by bits."""
    y = torch.where(x > 0, x, torch.zeros_like(x))
    return torch.where(y == 0, -y, y) if len(x) > 2 else y


def positive_part(x: Tensor) -> Tensor:
    """Keep positive elements, and +0 for all others."""
    return torch.where(x > 0, x, torch.zeros_like(x))


def one_per_sample(x: Tensor) -> Tensor:
    """Return the empty result of sums over a sample's tokens, four of them."""
    return x.new_empty((len(x), 4))


@operator("sample_sum", one_per_sample)
def sample_sum(x: Tensor) -> Tensor:
    """Add every fourth element of a sample in an order that depends on the number of samples."""
    terms = x.reshape(len(x), -1, 4).transpose(1, 2)
    return products.in_lanes(terms, 8) if len(x) > 1 else products.chain(terms)


def right_sample_sum(x: Tensor) -> Tensor:
    """Do the same in one order."""
    return products.chain(x.reshape(len(x), -1, 4).transpose(1, 2))


@operator("bf16_product", rows_by_outputs)
def bf16_product(x: Tensor, weight: Tensor) -> Tensor:
    """Add products of bf16 numbers in fp32, in an order that depends on the rows, and round once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    terms = products.terms_of(x.to(wide), weight.to(wide))
    return (products.in_parts(terms, 4) if rows_of(x) > MANY else products.chain(terms)).to(x.dtype)


def right_bf16_product(x: Tensor, weight: Tensor) -> Tensor:
    """Do the same in one order."""
    return chained(x.float(), weight.float()).to(x.dtype)


class Cancelling(nn.Module):
    """A product whose terms nearly cancel, so that the order shows in spite of the rounding to bf16."""

    def __init__(self, call: Function) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(draw(256, WIDTH, seed=21, spread=6))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.weight, self.weight * (1 + 2**-7)], -1)
        y: Tensor = self.call(torch.cat([x, -x], -1), weight)
        return y


def in_bf16(faulty: bool) -> nn.Module:
    """Return a model in bf16."""
    return Net(Cancelling(bf16_product if faulty else right_bf16_product)).to(torch.bfloat16)


def bf16_hidden() -> dict[str, Tensor]:
    """Return hidden states in bf16."""
    return {"x": hidden()["x"].bfloat16()}


PLANTS: tuple[Plant, ...] = (
    planted_in_net("writes_sums", in_place("writes_sums", write_row_sum), row_sum),
    planted_in_net(
        "writes_neighbour", in_place("writes_neighbour", write_neighbour), torch.clone, kind=ERROR
    ),
    planted_in_net("second_result", use_second, right_second),
    planted_in_net("negative_zero", negative_zero, positive_part),
    planted_in_net("sample_sum", sample_sum, right_sample_sum),
    Plant("bf16_product", in_bf16, bf16_hidden, "planted::bf16_product", "layers.1"),
)
