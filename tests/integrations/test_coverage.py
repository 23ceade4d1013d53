"""What carries an order of its own is found where it runs, whatever hides it; what carries none is not accused.

1. Planted stock operators are found, forward and backward; a chain of isobit's operators is kept.
2. What the table does not know is treated as carrying an order.
3. The gradient's graph shows sums before they run: nodes, broadcasts, values used more than twice.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isobit
from isobit.integrations.transformers.operator_table import find_reason
from isobit.integrations.transformers.residual import fork
from isobit.integrations.transformers.strictness import Coverage, Use, observe, walk_gradients

aten = torch.ops.aten
W = torch.randn(8, 8)


def seen_in(function, *given):
    with observe() as seen:
        function(*given)
    return seen.coverage()


def names(coverage):
    return {use.operator for use in coverage.order_dependent}


# ---- 1. planted operators --------------------------------------------------------------------------------

PLANTED = {
    "F.linear": (lambda x: F.linear(x, W), "aten::mm"),
    "F.linear with bias": (lambda x: F.linear(x, W, W[0]), "aten::addmm"),
    "matmul": (lambda x: x[None] @ W[None], "aten::bmm"),
    "softmax": (lambda x: x.softmax(-1), "aten::_softmax"),
    "log_softmax": (lambda x: x.log_softmax(-1), "aten::_log_softmax"),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), "aten::native_layer_norm"),
    "rms norm": (lambda x: F.rms_norm(x, (8,)), None),
    "silu": (F.silu, "aten::silu"),
    "sigmoid": (torch.sigmoid, "aten::sigmoid"),
    "gelu": (F.gelu, "aten::gelu"),
    "sum": (torch.sum, "aten::sum"),
    "mean": (lambda x: x.mean(-1), "aten::mean"),
    "logsumexp": (lambda x: x.logsumexp(-1), None),
    "cumsum": (lambda x: x.cumsum(0), "aten::cumsum"),
    "norm": (torch.linalg.vector_norm, "aten::linalg_vector_norm"),
    "index_add": (
        lambda x: x.clone().index_add_(0, torch.tensor([0, 0]), x[:2]),
        "aten::index_add_",
    ),
    "index_put": (
        lambda x: x.clone().index_put_((torch.tensor([0]),), x[:1], accumulate=True),
        "aten::index_put_",
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        None,
    ),
    "multinomial": (lambda x: torch.multinomial(x.abs(), 1), "aten::multinomial"),
    "dropout": (lambda x: F.dropout(x, 0.5), None),
    "pow": (lambda x: x.abs() ** 0.3, "aten::pow"),
    "fused AdamW": (
        lambda x: torch.optim.AdamW([leaf(x)], fused=True).step(),
        "aten::_fused_adamw_",
    ),
    "total norm": (lambda x: torch.nn.utils.get_total_norm([x, x]), "aten::linalg_vector_norm"),
}


def leaf(x):
    made = nn.Parameter(x.clone())
    made.grad = x.clone()
    return made


@pytest.mark.parametrize("name", PLANTED)
def test_planted_operators_are_found(name):
    function, operator = PLANTED[name]
    coverage = seen_in(function, torch.randn(4, 8))
    assert not coverage.kept
    assert operator is None or operator in names(coverage)
    assert all(use.reason and use.remedy for use in coverage.order_dependent)
    assert str(coverage.order_dependent[0].count) in str(coverage)


FREE = {
    "moves": lambda x: (
        torch.cat([x.t().reshape(4, 8), x.clone()]).split(2)[0].contiguous().flip(0)[..., None]
    ),
    "elements": lambda x: (
        (x * 2 + x / 3 - x.sqrt().neg()).clamp(-1, 1).rsqrt().exp().log().tanh() ** 2
    ),
    "rotary": lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1) * x.cos() + x * x.sin(),
    "choices": lambda x: (x.amax(-1), x.argmax(-1), x.topk(2), x.sort(), (x > 0).any(), x.max()),
    "lookups": lambda x: F.embedding(torch.tensor([1, 1]), x).gather(
        1, torch.zeros(2, 1, dtype=torch.int64)
    ),
    "whole numbers": lambda x: ((x > 0).sum(), (x > 0).long().cumsum(0), torch.arange(5).sum()),
    "masks": lambda x: torch.where(x > 0, x, 0.0).masked_fill(x < 1, -1.0).tril(),
    "writes": lambda x: x.clone().index_put_((torch.tensor([0]),), x[:1]),
    "isobit": lambda x: isobit.softmax(isobit.linear(x, W)),
    "AdamW": lambda x: torch.optim.AdamW([leaf(x)], foreach=False).step(),
    "AdamW by lists": lambda x: torch.optim.AdamW([leaf(x)], foreach=True).step(),
    "clipping": lambda x: isobit_clip(x),
}


def isobit_clip(x):
    from isobit.optim import clip_grad_norm_

    return clip_grad_norm_([leaf(x)], 1.0)


@pytest.mark.parametrize("name", FREE)
def test_what_adds_nothing_is_not_accused(name):
    coverage = seen_in(FREE[name], torch.rand(4, 8))
    assert coverage.kept, str(coverage)
    assert "none carries" in str(coverage)


def test_backward_is_seen():
    table = nn.Parameter(torch.randn(5, 8))

    def run(ids):
        F.embedding(ids, table).backward(torch.ones(3, 8))

    coverage = seen_in(run, torch.tensor([1, 1, 2]))
    assert names(coverage) == {"aten::embedding_dense_backward"}
    layer = isobit.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    coverage = seen_in(lambda: isobit.softmax(layer(x)).backward(x))
    assert coverage.kept, str(coverage)


def test_a_broadcast_that_needs_a_gradient_is_found():
    scale, x = nn.Parameter(torch.ones(8)), torch.randn(4, 8)
    assert names(seen_in(lambda: x * scale)) == {"aten::mul"}
    assert names(seen_in(lambda: scale.expand(4, 8))) == {"aten::expand"}
    assert names(seen_in(lambda: scale.repeat(2))) == {"aten::repeat"}
    assert seen_in(lambda: x * scale.detach()).kept
    assert seen_in(lambda: scale * scale + scale).kept
    with torch.no_grad():
        assert seen_in(lambda: x * scale).kept


def test_attestation_is_not_counted_as_the_models():
    isobit.ops.dispatch.attestations.cache_clear()
    isobit.ops.dispatch.has_native.cache_clear()
    coverage = seen_in(lambda: isobit.softmax(W))
    assert [use.operator for use in coverage.operators if "isobit" in use.operator] != []
    assert sum(use.count for use in coverage.operators) <= 3


# ---- 2. fails closed -------------------------------------------------------------------------------------


def test_what_is_unknown_carries_an_order():
    assert "unknown" in find_reason(aten.special_bessel_j0.default, (W,)).reason
    assert "unknown" in find_reason(aten.erfinv.default, (W,)).reason

    @torch.library.custom_op("somebody::sum", mutates_args=())
    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    assert names(seen_in(theirs, W)) == {"somebody::sum"}
    assert find_reason(aten.sum.default, (torch.arange(3),)) is None
    assert find_reason(aten.sum.default, (torch.arange(3),), {"dtype": torch.float32}) is not None
    assert find_reason(torch.ops.isobit.portable_softmax.default, (W,)) is None


def test_nothing_is_not_kept():
    assert not Coverage(()).kept
    assert str(Coverage(())) == "nothing ran"
    assert Coverage((Use("aten::add", 1),)).kept


# ---- 3. the gradient's graph -----------------------------------------------------------------------------


def test_nodes_that_add_are_found():
    w, x = nn.Parameter(W.clone()), torch.randn(4, 8)
    found = {use.operator for use in walk_gradients(F.silu(x @ w).softmax(-1))}
    assert found == {"Mm", "Silu", "Softmax"}
    assert [u.operator for u in walk_gradients(F.embedding(torch.tensor([0, 0]), w))] == [
        "Embedding"
    ]
    assert walk_gradients(isobit.softmax(isobit.linear(x, w)).reshape(-1).exp() * 2) == []


def test_broadcasts_are_found():
    b, x = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(4, 8))
    assert [u.operator for u in walk_gradients(x + b)] == ["Add"]
    assert [u.operator for u in walk_gradients(b.expand(4, 8))] == ["Expand"]
    assert walk_gradients(x + x) == []


@pytest.mark.parametrize("is_parameter", [True, False])
def test_more_than_two_gradients_are_found(is_parameter):
    x = nn.Parameter(torch.randn(4, 8))
    value = x if is_parameter else x.exp()
    assert walk_gradients(value * 2 + value.neg()) == []
    (found,) = walk_gradients([value * 2, value.neg(), value.abs()])
    assert "3 gradients" in found.operator
    assert "graph" in found.reason


def test_a_gradient_of_before_counts():
    x = nn.Parameter(torch.randn(4))
    x.grad = torch.ones(4)
    (found,) = walk_gradients(x.exp() + x.neg())
    assert "parameter [4] with 3 gradients" in found.operator


def test_slices_that_do_not_overlap_are_one_gradient():
    """As a packed projection that is cut into queries, keys and values: each element has one gradient."""
    x = torch.randn(2, 5, 12, requires_grad=True) * 1.0
    apart = [x[..., :4], x[..., 4:8], x[..., 8:]]
    assert not walk_gradients([part * 2 for part in apart])
    overlapping = [x[..., :5], x[..., 4:8], x[..., 8:]]
    assert [use.operator for use in walk_gradients([p * 2 for p in overlapping])] == [
        "the output of Mul with 3 gradients"
    ]
    other_axis = [x[:, :2], x[..., 4:8], x[..., 8:]]
    assert walk_gradients([part * 2 for part in other_axis])
    steps = [x[..., 0::3], x[..., 1::3], x[..., 2::3]]
    assert walk_gradients([part * 2 for part in steps])  # only contiguous slices are looked at
    assert walk_gradients([*(part * 2 for part in apart), x * 3, x * 4])


def test_uses_of_a_value_are_added_from_left_to_right_in_fp32():
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.full((3,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    uses = fork(x, 3)
    assert len(uses) == 3
    torch.autograd.backward(list(uses), grads)
    assert x.grad.tolist() == [258.0] * 3  # in bf16, 256 + 1 is 256
    with torch.no_grad():
        assert all(use is x for use in fork(x, 4))
    y = torch.ones(3, requires_grad=True)
    first, _, third = fork(y, 3)
    (first * 2 + third * 3).sum().backward()
    assert y.grad.tolist() == [5.0] * 3
