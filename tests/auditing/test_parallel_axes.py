"""On the axes `dp` and `tp`, what ranks compute in another order is named; isobit's operators stay silent."""

from functools import partial

import pytest
import torch
from torch import nn

import isobit
from isobit import bits
from isobit.auditing.axes import data_parallel_axis

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}
IDS = {"input_ids": torch.arange(48).reshape(4, 12) % 31}


def qwen3(dtype=torch.float32, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, **more})
    return transformers.Qwen3ForCausalLM(config).eval().to(dtype)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32))


def guilty(report):
    return {(one.place.operator, one.place.module) for one in report.guilty}


def drawn(ranks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(40, generator=generator)] for _ in range(ranks)]


audit_dp = partial(isobit.audit, vary=("dp",), backward=True)


def test_dp_names_stock_gradients_and_the_collective():
    report = audit_dp(mlp(), torch.randn(8, 6, 64))
    found = guilty(report)
    assert {("aten::mm", "0"), ("aten::mm", "2"), (data_parallel_axis.OPERATOR, "")} <= found
    assert all(one.place.backward and one.kind == "order" for one in report.guilty)
    assert report.complete
    shares = [
        one.share for one in report.guilty if one.place.operator != data_parallel_axis.OPERATOR
    ]
    assert sum(shares) == pytest.approx(1)


def test_dp_is_silent_on_isobit_layers():
    torch.manual_seed(0)
    model = nn.Sequential(isobit.nn.Linear(64, 96), isobit.nn.Linear(96, 32))
    report = audit_dp(model, torch.randn(4, 6, 64))
    assert not report.guilty
    assert report.complete
    assert report.axes[0].judged


def test_dp_is_silent_on_an_enabled_model_and_names_one_stock_layer():
    model = isobit.enable(qwen3())
    clean = audit_dp(model, IDS)
    assert not clean.guilty
    assert not clean.unjudged
    assert clean.complete

    planted = nn.Sequential(isobit.nn.Linear(64, 96), nn.Linear(96, 32), isobit.nn.Linear(32, 32))
    found = guilty(audit_dp(planted, torch.randn(8, 6, 64)))
    assert {module for _, module in found} == {"1", ""}


def test_dp_needs_a_backward_pass_and_equal_parts():
    without = isobit.audit(mlp(), torch.randn(4, 6, 64), vary=("dp",))
    assert "backward" in without.skipped[0].reason
    odd = audit_dp(mlp(), torch.randn(3, 6, 64))
    assert "3 samples" in odd.skipped[0].reason


def test_the_collective_of_two_ranks_or_of_exact_sums_is_innocent():
    assert data_parallel_axis.judge("dp", "", drawn(2)) is None
    whole = [[torch.arange(9.0) + rank] for rank in range(8)]
    assert data_parallel_axis.judge("dp", "", whole) is None


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_collective_of_more_ranks_adds_in_another_order(ranks):
    found = data_parallel_axis.judge("dp", "", drawn(ranks))
    assert found is not None
    assert found.kind == "order"
    assert 0 < found.elements < found.of


def test_a_collective_that_forgets_a_rank_is_an_error(monkeypatch):
    honest = data_parallel_axis.all_reduce_many
    monkeypatch.setattr(data_parallel_axis, "all_reduce_many", lambda parts: honest(parts[:-1]))
    found = data_parallel_axis.judge("dp", "", drawn(4))
    assert found is not None
    assert found.kind == "error"


def test_the_simulated_all_reduce_gives_the_sum():
    parts = [one for (one,) in drawn(2)]
    assert bits.equal(data_parallel_axis.all_reduce(parts), parts[0] + parts[1])


class Block(nn.Module):
    """Two layers that ranks split by their names; the second one adds over ranks."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def blocks(*downs):
    torch.manual_seed(0)
    made = [Block(isobit.nn.Linear(64, 512), down(512, 64)) for down in downs]
    return nn.Sequential(*made).to(torch.bfloat16)


def rows():
    return torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


audit_tp = partial(isobit.audit, vary=("tp",))


def test_tp_names_the_rowwise_products_of_a_stock_model():
    report = audit_tp(qwen3(torch.bfloat16), IDS)
    products = {module for operator, module in guilty(report) if operator == "aten::mm"}
    assert products == {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    assert all(one.kind == "order" for one in report.guilty)
    assert report.complete  # against a run of the split model on simulated ranks
    assert (data_parallel_axis.OPERATOR, "model.layers.0.mlp.down_proj") in guilty(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tp_is_silent_on_an_enabled_model(dtype):
    report = audit_tp(isobit.enable(qwen3(dtype)), IDS)
    assert not report.guilty
    assert not report.unjudged
    assert report.complete
    assert report.axes[0].judged


def test_tp_names_exactly_the_planted_stock_layer():
    clean = audit_tp(blocks(isobit.nn.Linear, isobit.nn.Linear), rows())
    assert not clean.guilty
    assert clean.complete
    planted = audit_tp(blocks(isobit.nn.Linear, nn.Linear), rows())
    assert {module for _, module in guilty(planted)} == {"1.down"}
    assert planted.complete


def test_a_collective_that_loses_a_rank_is_an_error_and_leaves_the_list_incomplete(monkeypatch):
    monkeypatch.setattr(data_parallel_axis, "all_reduce", lambda parts: parts[0])
    report = audit_tp(blocks(nn.Linear), rows())
    product = next(
        one for one in report.guilty if one.place.operator != data_parallel_axis.OPERATOR
    )
    assert product.kind == "error"
    assert not report.complete


def test_tp_says_what_it_cannot_split():
    without = audit_tp(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
    assert "no tensor-parallel plan" in without.skipped[0].reason
    torch.manual_seed(0)
    odd = audit_tp(Block(nn.Linear(8, 9), nn.Linear(9, 8)), torch.randn(2, 8))
    assert all("9 cannot be divided" in one.reason for one in odd.unjudged)
    assert len(odd.unjudged) == 2
    assert "could not be run on 2 ranks" in odd.axes[0].why_not


def test_tp_adds_a_bias_once():
    report = audit_tp(Block(nn.Linear(64, 512), nn.Linear(512, 64)), rows().float())
    assert report.complete
    assert report.axes[0].judged >= 2
