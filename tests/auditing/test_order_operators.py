"""At two shapes, the order of every operator that sums is found, and random values never contradict it."""

import pytest
import torch

from tests.auditing.recorded_calls import DTYPES, both, empty, trees

aten = torch.ops.aten


def rows_of(shape, rest=(), dtype=torch.float32):
    return lambda m: (empty(m, *shape, dtype=dtype), *rest)


def convolution(m):
    rest = ([4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    return empty(m, 3, 16, 16), empty(24, 3, 4, 4), empty(24), *rest


def grouped(m):
    offsets = torch.tensor([m // 2, m], dtype=torch.int32)
    return empty(m, 64, dtype=torch.bfloat16), empty(2, 64, 32, dtype=torch.bfloat16), offsets


def batch_norm(m):
    return empty(2, m, 6), None, None, empty(m), empty(m), True, 0.1, 1e-5


INDEX = torch.arange(30) % 3
OPERATORS = {
    # operator: (the arguments for m rows, number of terms)
    "bmm": (aten.bmm.default, lambda m: (empty(m, 5, 40), empty(m, 40, 24)), 40),
    "baddbmm": (
        aten.baddbmm.default,
        lambda m: (empty(m, 5, 24), empty(m, 5, 40), empty(m, 40, 24)),
        40,
    ),
    "linear": (aten.linear.default, lambda m: (empty(m, 5, 40), empty(24, 40), empty(24)), 40),
    "matmul": (aten.matmul.default, lambda m: (empty(m, 5, 40), empty(40, 24)), 40),
    "convolution": (aten.convolution.default, convolution, 48),
    "sum": (aten.sum.default, lambda m: (empty(40).expand(1, 40),), 40),
    "sum.dim_IntList": (aten.sum.dim_IntList, rows_of((7, 40), ([1, 2],)), 280),
    "sum over rows": (aten.sum.dim_IntList, lambda m: (empty(40, m), [0]), 40),
    "mean": (aten.mean.default, lambda m: (empty(5, 8),), 40),
    "mean.dim": (aten.mean.dim, rows_of((40,), ([-1], True)), 40),
    "mean.dim of bf16": (aten.mean.dim, rows_of((768,), ([-1],), torch.bfloat16), 768),
    "mean.dim of 300 bf16": (aten.mean.dim, rows_of((300,), ([-1],), torch.bfloat16), 300),
    "cumsum": (aten.cumsum.default, rows_of((40,), (1,)), 40),
    "_fused_rms_norm": (aten._fused_rms_norm.default, rows_of((40,), ([40], empty(40), 1e-6)), 40),
    "attention, math": (
        aten._scaled_dot_product_attention_math.default,
        lambda m: tuple(empty(m, 2, 20, 16) for _ in range(3)),
        20,
    ),
    "_grouped_mm": (aten._grouped_mm.default, grouped, 64),
    "index_add": (aten.index_add.default, lambda m: (empty(3, m), 0, INDEX, empty(30, m)), 10),
    "index_add_": (aten.index_add_.default, lambda m: (empty(3, m), 0, INDEX, empty(30, m)), 10),
    "embedding_dense_backward": (
        aten.embedding_dense_backward.default,
        lambda m: (empty(30, m), INDEX, 3, -1, False),
        10,
    ),
    "native_batch_norm": (aten.native_batch_norm.default, batch_norm, 12),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    func, arguments, n = OPERATORS[name]
    certificate, text = both(func, arguments(8), arguments(2), rows=(1, 1))
    assert certificate is not None, text
    assert {tree.n for tree in trees(certificate).values()} == {n}
    assert certificate.count == 2


@pytest.mark.parametrize(
    ("func", "arguments", "word"),
    [
        (aten.gelu.default, lambda m: (empty(m, 6),), "no order of addition"),
        (aten.add.Tensor, lambda m: (empty(m, 6), empty(6)), "no order of addition"),
        (aten.native_dropout.default, lambda m: (empty(m, 64), 0.5, True), "not repeatable"),
        (
            aten.mm.default,
            lambda m: (empty(m, 6, dtype=torch.float64), empty(6, 4, dtype=torch.float64)),
            "float64",
        ),
    ],
)
def test_what_has_no_order_gives_a_reason(func, arguments, word):
    certificate, reason = both(func, arguments(8), arguments(1))
    assert certificate is None
    assert word in reason


def draw(m, k, dtype, seed):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(2, 31, 16), (4, 128, 24), (8, 300, 100), (33, 64, 5)])
def test_random_values_confirm_one_order(m, k, n, dtype):
    """The certificate is never contradicted: where random values give other bits, there is more than one order."""
    x, weight = draw(m, k, dtype, 1), draw(n, k, dtype, 2).t()
    certificate, text = both(aten.mm.default, (x, weight), (x[1:2], weight), rows=(1, 0))
    assert certificate is not None, text
    equal = all(
        torch.equal(torch.mm(x, weight)[1], torch.mm(x[1:2], weight)[0])
        for x in (draw(m, k, dtype, seed) for seed in range(20))
    )
    assert equal or not certificate.kept
