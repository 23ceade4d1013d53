"""Theorem: a sum in any order is never called an error, and what no order of addition explains always is."""

import pytest
import torch
import torch.nn.functional as F

from isobit.auditing.judging.accuracy import explain, sensitivity
from isobit.auditing.records import ERROR, ORDER, RANDOM
from isobit.auditing.replay.call import Call


@torch.library.custom_op("tested::row_sum", mutates_args=())
def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@torch.library.custom_op("tested::plain_gelu", mutates_args=())
def plain_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


@torch.library.custom_op("tested::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


def terms(generator, count, dtype, cancelling):
    powers = torch.randint(-12, 13, (3, count), generator=generator)
    x = torch.ldexp(torch.randn(3, count, generator=generator), powers)
    if cancelling:
        x = torch.cat([x, 1e-6 * torch.randn(3, count, generator=generator) - x], -1)
    return x.to(dtype)


def chained(x, order):
    total = torch.zeros(len(x))
    for at in order:
        total = total + x[:, at].float()
    return total.to(x.dtype)


@pytest.mark.parametrize(
    "operator", [torch.ops.tested.row_sum.default, torch.ops.aten.sum.dim_IntList]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_a_sum_in_any_order_is_no_error(operator, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = terms(generator, 3 + 41 * seed, dtype, cancelling=bool(seed % 2))
    args = (x,) if operator is torch.ops.tested.row_sum.default else (x, [-1])
    run = chained(x, torch.randperm(x.shape[1], generator=generator))
    variant = chained(x, x[0].abs().argsort())
    kind, accuracy = explain(Call(operator, args, {}), run, variant)
    assert kind == ORDER, accuracy


@pytest.mark.parametrize(
    "operator", [torch.ops.tested.row_sum.default, torch.ops.aten.sum.dim_IntList]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_lost_term_is_an_error(operator, seed):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed))
    args = (x,) if operator is torch.ops.tested.row_sum.default else (x, [-1])
    kind, _ = explain(Call(operator, args, {}), x.sum(-1), x[:, :-1].sum(-1))
    assert kind == ERROR


@pytest.mark.parametrize("width", [32, 1024, 8192])
def test_another_formula_is_an_error_in_rows_of_any_width(width):
    generator = torch.Generator().manual_seed(width)
    x = torch.ldexp(
        torch.randn(2, width, generator=generator),
        torch.randint(-6, 7, (2, width), generator=generator),
    )
    call = Call(torch.ops.tested.plain_gelu.default, (x,), {})
    assert explain(call, F.gelu(x, approximate="tanh"), F.gelu(x))[0] == ERROR


def test_one_wrong_element_beside_a_large_one_is_an_error():
    x = torch.tensor([[1e6, 1.0, 2.0, 3.0]])
    y = F.gelu(x)
    wrong = y.clone()
    wrong[0, 1] *= 1.001
    assert explain(Call(torch.ops.tested.plain_gelu.default, (x,), {}), wrong, y)[0] == ERROR


def test_drawn_numbers_are_random_and_leave_the_generator_alone():
    before = torch.random.get_rng_state()
    x = torch.zeros(4)
    kind, _ = explain(Call(torch.ops.tested.noise.default, (x,), {}), x, x + 1)
    assert kind == RANDOM
    assert torch.equal(torch.random.get_rng_state(), before)


def test_in_place_operators_are_explained_by_what_they_read():
    x = torch.randn(64)
    kind, _ = explain(Call(torch.ops.aten.mul_.Tensor, (x.clone(), x), {}), x * x, x * x * 1.01)
    assert kind == ERROR


@pytest.mark.parametrize(("inputs", "low", "high"), [(1, 1, 2), (16, 8, 64), (256, 100, 1000)])
def test_the_number_of_inputs_is_estimated(inputs, low, high):
    x = torch.randn(64, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved, found = sensitivity(lambda change: change(x).sum(-1), x.sum(-1), 2.0**-24)
    assert low <= found <= high
    ratio = moved / x.norm(dim=-1)
    assert float(ratio.min()) > 0.1
    assert float(ratio.max()) < 4
