"""A recording holds every forward call made while it is open, with the executor that served it, and nothing else."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.foundation import launches, native
from isobit.foundation.launches import Launch, record_launches
from isobit.ops import dispatch
from isobit.ops.softmax.op import softmax

X, W = torch.randn(2, 3, 8), torch.randn(5, 8)
EXECUTOR = "native" if dispatch.has_native() else "portable"


def test_launches_say_operator_executor_dtype_and_sizes():
    softmax(X)
    with record_launches() as seen:
        isobit.linear(X, W)
        softmax(X.bfloat16(), 1)
        softmax(X[0, 0].double())
    softmax(X)
    assert seen == [
        Launch("linear", EXECUTOR, "float32", (6, 8, 5)),
        Launch("softmax", EXECUTOR, "bfloat16", (16, 3)),
        Launch("softmax", "portable", "float64", (1, 8)),
    ]


def test_recordings_nest_and_survive_errors():
    def fail(seen):
        with record_launches() as inner:
            softmax(X)
            assert inner == seen  # equal, so that the one to close cannot be found by value
            raise KeyError

    with record_launches() as outer:
        with pytest.raises(KeyError):
            fail(outer)
        softmax(X)
    assert len(outer) == 2
    assert not launches.is_recording()


def test_a_refused_call_is_no_launch():
    with record_launches() as seen, pytest.raises(isobit.ArgumentError):
        softmax(X.int())
    assert seen == []


def test_compiled_code_is_not_seen():
    with record_launches() as seen:
        torch.compile(lambda x: softmax(isobit.linear(x, W)), fullgraph=True, backend="eager")(X)
    assert seen == []


HEADS = torch.randn(1, 5, 2, 16)
BREAKING = {
    "attention": lambda x: isobit.attention(HEADS * x, HEADS * x, HEADS, is_causal=True),
    "linear_group": lambda x: torch.cat(isobit.linear_group(x * X, [W, W])),
    "linear_cross_entropy": lambda x: isobit.linear_cross_entropy(x * X[0], W, torch.arange(3)),
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # of torch, where a graph goes on after a break
@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.sweep(2)
def test_operators_that_break_the_graph_have_the_eager_bits(name):
    """They decide by values, which a graph cannot: what is around them is compiled."""
    function, x = BREAKING[name], torch.tensor(1.5, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x + 1).square(), backend="aot_eager")
    with_gradients = [
        (y.detach(), *torch.autograd.grad(y.sum(), x))
        for y in (function(x + 1).square(), compiled(x))
    ]
    assert all(bits.equal(*pair) for pair in zip(*with_gradients, strict=True))


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_the_library_is_loaded_once_and_each_load_is_an_event():
    before = native.load_count()
    assert before >= 1
    isobit.linear(X, W)
    assert native.load() is None
    assert native.load_count() == before
    native.load.cache_clear()
    assert native.load() is None
    assert native.load_count() == before + 1
