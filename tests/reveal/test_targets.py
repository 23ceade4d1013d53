"""Every shipped adapter shows an order; stock's change with the configuration, ours do not and are the defined ones."""

import pytest
import torch

import isobit
from isobit import RevealError
from isobit.ops.linear.targets import TARGETS, expected_order
from isobit.order.addition import chain, digest
from isobit.reveal import targets
from tests.reveal.kernels import stripes
from tests.sweeps import mostly_full

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
M = (1, 2, 8, 16, 64, 256)
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def test_stock_linear_has_several_orders_and_ours_one():
    stock = isobit.reveal.compare_orders(targets.linear, [{"k": 1024, "m": m} for m in M])
    assert len(stock.classes) > 1  # the control
    assert not stock.refused
    if HAS_AVX512:
        assert [c.label for c in stock.classes] == ["m=1", "m=2, 8", "m=16, 64", "m=256"]
    assert all(c.tree.replayed >= 8 for c in stock.classes)


@pytest.mark.parametrize("dtype", mostly_full(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.sweep(4)
def test_ours_is_the_defined_order(name, dtype):
    configurations = [{"k": 1024, "n": 200, "dtype": dtype}]
    if name != "bias_grad":
        configurations = [{**configurations[0], "m": m} for m in M]
    found = isobit.reveal.compare_orders(TARGETS[name], configurations)
    assert found.matches(digest(expected_order(name, 1024, dtype))), str(found)
    assert found.classes[0].tree.replayed >= 8


@pytest.mark.parametrize("tokens", [2, 31, 33, 34, 44, 63, 65, 257, 290, 300, 515])
@pytest.mark.parametrize("dtype", mostly_full(DTYPES, DTYPES[1:2]))
def test_weight_gradients_of_any_number_of_tokens(tokens, dtype):
    """The tile engine chooses its block from the length; the order must not."""
    for name in ("weight_grad", "bias_grad"):
        tree = isobit.reveal.order(TARGETS[name](k=tokens, n=48, dtype=dtype))
        assert tree.order_digest == digest(expected_order(name, tokens, dtype)), (name, str(tree))


@pytest.mark.parametrize("k", [2, 33, 34, 44, 95, 250, 1025, 1096])
def test_features_of_any_number(k):
    for name in ("linear", "input_grad"):
        tree = isobit.reveal.order(TARGETS[name](k=k, n=48, m=5, dtype=torch.bfloat16))
        assert tree.order_digest == digest(expected_order(name, k, torch.bfloat16)), (
            name,
            str(tree),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (targets.sum, {"k": 100, "m": 3}),
        (targets.sum, {"k": 100, "m": 3, "axis": 0}),
        (targets.mean, {"k": 128, "m": 3}),
        (targets.mean, {"k": 100, "m": 3}),
        (targets.linear, {"k": 96, "m": 3, "n": 40, "row": 2, "column": 39}),
        (targets.matmul, {"k": 96, "m": 3}),
        (targets.matmul, {"k": 96, "m": 3, "function": torch.mm}),
        (targets.matmul, {"k": 96, "m": 3, "function": torch.bmm, "batch": 2}),
        (targets.input_grad, {"k": 96, "m": 3}),
        (targets.weight_grad, {"k": 96, "m": 3}),
        (targets.bias_grad, {"k": 96}),
        (targets.attention, {"k": 64, "m": 1}),
        (targets.attention, {"k": 64, "m": 64, "heads": 2, "row": 63}),
        (targets.attention, {"k": 100, "m": 7}),
        (targets.embedding_grad, {"k": 70}),
    ],
    ids=lambda v: (
        v.__name__ if callable(v) else "-".join(str(x) for x in v.values() if isinstance(x, int))
    ),
)
def test_stock_sums_are_shown(target, shape, dtype):
    tree = isobit.reveal.order(target(**shape, dtype=dtype))
    assert tree.n == shape["k"]
    # What follows the sum is plain, except a division by what is no power of two (or, in fp16, any).
    divided = target in (targets.mean, targets.attention) and (
        shape["k"] == 100 or dtype == torch.float16
    )
    assert (tree.replayed >= 8) != divided


def test_an_embedding_gradient_in_bf16_is_added_in_bf16():
    tree = isobit.reveal.order(targets.embedding_grad(70, dtype=torch.bfloat16))
    assert tree.order_digest == digest(chain(range(70)))
    assert str(tree.arithmetic).startswith("bf16 sums")


@pytest.mark.parametrize("target", [targets.softmax, targets.log_softmax, targets.rms_norm])
@pytest.mark.parametrize("k", [3, 64, 100, 1024])
def test_stock_row_functions_are_shown(target, k):
    tree = isobit.reveal.order(target(k, 4))
    assert tree.n == k
    assert tree.arithmetic is None


@pytest.mark.skipif(not HAS_AVX512, reason="16 lanes of AVX-512")
def test_stock_softmax_has_sixteen_stripes():
    tree = isobit.reveal.order(targets.softmax(1024))
    assert str(tree) == "16 stripes of 64, folded, then pairs, far ones first"


def test_rms_norm_adds_as_sum_does():
    assert (
        isobit.reveal.order(targets.rms_norm(128)).order_digest
        == isobit.reveal.order(targets.sum(128)).order_digest
    )


def test_stock_layer_norm_is_no_plain_sum_of_squares():
    with pytest.raises(RevealError, match="not such a sum"):
        isobit.reveal.order(targets.layer_norm(64))


def test_a_two_pass_layer_norm_is_shown():
    def two_pass(x, shape, weight, bias, eps):
        centred = x - x.mean(-1, keepdim=True)
        total = torch.zeros_like(x[..., 0])
        for k in range(x.shape[-1]):
            total = total + centred[..., k] * centred[..., k]
        return centred * torch.rsqrt(total / x.shape[-1] + eps).unsqueeze(-1)

    assert isobit.reveal.order(targets.layer_norm(50, 4, function=two_pass)).order_digest == digest(
        chain(range(50))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_softmax_with_a_narrow_output_hides_its_order(dtype):
    with pytest.raises(RevealError, match="hides its order"):
        isobit.reveal.order(targets.softmax(64, dtype=dtype))


def test_places_that_add_otherwise_are_not_mixed():
    """The last columns add in another order, as a tail tile may: probes stand only where the asked one's holds."""

    def tailed(x, weight):
        products = [x[:, k : k + 1] * weight[:, k] for k in range(64)]
        forward, backward = products[0], products[-1]
        for k in range(1, 64):
            forward, backward = forward + products[k], backward + products[63 - k]
        return torch.cat([forward[:, :30], backward[:, 30:]], 1)

    for column, order in ((0, chain(range(64))), (39, chain(range(63, -1, -1)))):
        target = targets.linear(64, 2, 40, column=column, function=tailed)
        tree = isobit.reveal.order(target)
        assert tree.order_digest == digest(order)
        assert tree.unlike == target.unlike == (10 if column == 0 else 30)
    with pytest.raises(RevealError, match="places may differ"):
        isobit.reveal.order(targets.linear(64, 2, 40, row=None, function=tailed))


def test_any_callable_is_a_target():
    tree = isobit.reveal.order(lambda x: x.view(-1, 4).cumsum(0)[-1].cumsum(0)[-1], 64)
    assert tree.order_digest == digest(stripes(64, 4, chain))
    assert "Tree" in repr(tree)


@pytest.mark.full
def test_gloo_adds_each_chunk_in_another_order_of_ranks():
    with targets.Ranks(4, 64) as group:
        found = isobit.reveal.compare_orders(group.element, [{"element": e} for e in range(64)])
    assert [c.label for c in found.classes] == [
        "element=0–15",
        "element=16–31",
        "element=32–47",
        "element=48–63",
    ]
    assert all(c.tree.replayed >= 8 for c in found.classes)
    assert all(c.parting for c in found.classes[1:])


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
def test_numpy_scalars_are_read(kind):
    numpy = pytest.importorskip("numpy")

    def total(x):
        return getattr(numpy, kind)(x.sum().item())

    assert isobit.reveal.order(total, 8, arithmetic=False).n == 8
