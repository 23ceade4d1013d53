"""The batch-layout gate passes for enabled models, and fails and names each planted operator."""

import pytest
import torch
import torch.nn.functional as F

import isobit
from isobit.cli.main import main
from isobit.gates.model import batch_layouts
from isobit.gates.model.batch_layout_gate import Comparison, compare, count_steps, run_gate
from isobit.gates.model.batch_layouts import IsobitScorer
from isobit.gates.model.models import build_model
from isobit.integrations.transformers.parts import linear
from isobit.library import model_gate

# chain-v1 judges the tiny models in both dtypes; these have wider layers and a larger vocabulary.
SMALL = [
    ("qwen3-small", torch.bfloat16),
    ("qwen2-small", torch.float32),
    ("llama-small", torch.bfloat16),
]


@pytest.fixture(scope="module")
def tiny():
    return build_model("qwen3-tiny", torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [SMALL[0], *(pytest.param(*one, marks=pytest.mark.full) for one in SMALL[1:])],
)
def test_every_layout_gives_the_same_bits(name, dtype):
    model = build_model(name, dtype)
    samples, heard = batch_layouts.draw_samples(model.config.vocab_size), []
    with isobit.enabled(model):
        report = run_gate(IsobitScorer(model), samples, heard.append)
    assert [row for row in report.rows if not row.kept] == []
    assert report.kept
    assert report.trained == report.parameters > 20
    assert len(heard) == count_steps(samples)
    selected = [row for row in report.rows if row.quantity == "log-probability"]
    assert [row.numbers for row in selected] == [batch_layouts.SELECTED] * 10 + [24]
    assert all(row.aggregates == (0.0, 0.0, 0.0) for row in selected)


def stock_linear(x, weight, bias, *_):
    return F.linear(x, weight, bias)


# What stands in an operator's place, the quantity that must go red, and what the gate must name.
PLANTED = {
    model_gate.with_stock_linear: ("log-probability", "_proj"),
    model_gate.with_keys_of_padding: ("log-probability", "self_attn"),
    model_gate.with_positions_of_padding: ("log-probability", ""),
    model_gate.with_padded_dgamma: ("gradient", "norm"),
    model_gate.with_stock_norm: ("gradient", "norm"),
    model_gate.with_stock_loss: ("loss", "loss"),
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
@pytest.mark.sweep(3)
def test_a_planted_operator_turns_the_gate_red(planted):
    quantity, named = PLANTED[planted]
    broken = [row for row in planted(torch.zeros(1)).rows if not row.kept]
    assert quantity in {row.quantity for row in broken}
    assert any(named in row.where for row in broken)


def test_strict_mode_names_a_stock_operator(tiny, monkeypatch):
    monkeypatch.setattr(linear, "linear_with_packed", stock_linear)
    with (
        isobit.enabled(tiny),
        pytest.raises(
            isobit.UnsupportedError, match=r"aten::mm in model\.layers\.0\.self_attn\.o_proj"
        ),
    ):
        tiny(torch.arange(12)[None])


def test_a_row_without_evidence_is_not_kept():
    zero, one = torch.zeros(3), torch.ones(3)
    assert not Comparison("gradient", "x", 0, 0, 0, 0).kept
    assert not compare("gradient", "x", [("a", zero, zero)]).kept
    assert not compare("gradient", "x", [("a", one / 0, one / 0)]).kept
    assert compare("gradient", "x", [("a", one, one)]).kept
    assert not compare("gradient", "x", [("a", one, -one)]).kept


def test_batches_hold_the_same_tokens():
    samples = batch_layouts.draw_samples(4096)
    for batch in (
        batch_layouts.padded(samples, "left"),
        batch_layouts.padded(samples, "right"),
        batch_layouts.packed(samples),
    ):
        assert all(torch.equal(rows, samples[i]) for i, rows in batch.gather(batch.ids).items())
        assert int((batch.targets() != -100).sum()) == batch_layouts.SELECTED == 55
        assert int((batch.labels() != -100).sum()) == batch_layouts.TRAINED == 27


def test_the_command(capsys):
    assert main(["gate", "model", "--model", "qwen3-tiny"]) == 0
    shown = capsys.readouterr().out
    assert "0 of 55" in shown
    assert "24 of 24 parameters with gradients: kept" in shown
