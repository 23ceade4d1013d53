"""Direct calls of native operators raise errors on three lines, as the Python functions do."""

import re
from pathlib import Path

import pytest
import torch

import isobit
from isobit.ops import dispatch

FORM = re.compile(r"isobit\.\w+: expected .+\n  received: .+\n  remedy: .+")
CSRC = Path(__file__).parents[2] / "csrc"
X, HEADS = torch.randn(4, 16), torch.randn(4, 2, 16)
SPANS, IDS = torch.tensor([[0, 4]]), torch.tensor([0, 9])
BLOCKS, LENGTHS = torch.tensor([[0]]), torch.tensor([4])
TARGETS = torch.zeros(4, dtype=torch.int64)

CALLS = {
    "linear": lambda ops: ops.linear(X, torch.randn(3, 5), None, None, None),
    "linear bias": lambda ops: ops.linear(X, X, torch.randn(3), None, None),
    "linear dtype": lambda ops: ops.linear(X.double(), X.double(), None, None, None),
    "input gradient": lambda ops: ops.linear_input_grad(X, torch.randn(3, 5)),
    "spans": lambda ops: ops.linear_bias_grad(X, torch.tensor([[0, 5]])),
    "share": lambda ops: ops.linear_bias_grad(X, SPANS.expand(3, 2).contiguous(), 16),
    "group": lambda ops: ops.linear_group_input_grad([X], [X, X], 1),
    "softmax": lambda ops: ops.softmax(X.double()),
    "log_softmax": lambda ops: ops.log_softmax_backward(X, X[:1]),
    "silu": lambda ops: ops.silu_backward(X, X.bfloat16()),
    "rotary": lambda ops: ops.rotary(HEADS, X[:3], X[:3]),
    "rms_norm": lambda ops: ops.rms_norm(X, torch.randn(3)),
    "layer_norm": lambda ops: ops.layer_norm_backward(X, X, X[0], X[:, 0], X[:3, 0], None),
    "exact_round": lambda ops: ops.exact_round(TARGETS, torch.float32),
    "attention": lambda ops: ops.attention(
        HEADS, HEADS[:, :, :8], HEADS, SPANS, BLOCKS, LENGTHS, 1.0, True, 0
    ),
    "attention blocks": lambda ops: ops.attention(
        HEADS, HEADS, HEADS, SPANS, BLOCKS + 1, LENGTHS, 1.0, True, 0
    ),
    "logprob": lambda ops: ops.linear_logprob(X, X, TARGETS[:3], 1.0, None),
    "logprob shard": lambda ops: ops.linear_logprob_pairs(X, X, TARGETS, 1.0, 20, 0),
}


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
@pytest.mark.parametrize("name", CALLS)
def test_native_checks_have_the_form_of_the_python_errors(name):
    isobit.softmax(X)  # attests the kernels
    with pytest.raises(RuntimeError) as error:
        CALLS[name](torch.ops.isobit)
    assert FORM.match(str(error.value)), str(error.value)


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_an_id_outside_the_table_is_an_index_error():
    isobit.softmax(X)
    with pytest.raises(IndexError) as error:
        torch.ops.isobit.embedding(IDS, X, None, -1)
    assert FORM.match(str(error.value))
    assert "received: 9" in str(error.value)


def test_every_native_check_uses_that_form():
    users = {p.name for p in CSRC.iterdir() if re.search(r"\bTORCH_CHECK", p.read_text())}
    assert users == {"errors.h"}
