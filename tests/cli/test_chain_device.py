"""`isobit chain --device` puts a whole model through its layouts on a GPU, here a stand-in or compiled code."""

import json
from contextlib import nullcontext
from pathlib import Path
from runpy import run_path

import pytest
import torch

from isobit.cli import chain, main
from isobit.cli.devices import Device
from isobit.integrations.transformers.parts import rotary

CHAIN = ["chain", "--device", "sm_90", "-q", "--json"]
STAND_IN = Path(__file__).parents[1] / "gpu" / "stand_in_card.py"


def test_fewer_layouts_and_no_stock_where_code_is_run_on_the_cpu(monkeypatch, capsys):
    """All but the kernels: the executors of the CPU serve here."""
    monkeypatch.setattr(chain, "backend_of", lambda *_: nullcontext())
    assert main.main(CHAIN) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "qwen3-micro"
    assert record["device"]["name"] == "sm_90"
    assert record["stock"] is None
    assert record["kept"]
    assert len(record["isobit"]["rows"]) == 3 + 1 + 3 * 2


def test_a_card_runs_every_layout(monkeypatch, capsys):
    """On tensors that say cuda; stock is not run, since the stand-in would compute it as a CPU does."""
    stand_in = run_path(str(STAND_IN))
    device = Device("cuda", stand_in["CARD"], "sm_90", False, {"name": "a card"})
    monkeypatch.setattr(chain, "find_device", lambda name: device)
    words = ["chain", "--device", "cuda", "--model", "qwen3-micro", "--no-stock", "-q", "--json"]
    with stand_in["on_card"]():
        assert main.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"]
    assert record["device"] == {"name": "a card"}
    assert record["isobit"]["trained"] == record["isobit"]["parameters"] == 14
    assert len(record["isobit"]["rows"]) == 10 + 1 + 3 * 5
    ran = stand_in["operators"]
    assert ran["isobit::triton_attention_backward"] > 0
    assert not any(
        name.startswith("isobit::") and not name.startswith("isobit::triton_") for name in ran
    )


def test_a_model_that_depends_on_its_layout_is_broken_on_a_card_too(monkeypatch, capsys):
    """Positions of padding enter the angles."""
    monkeypatch.setattr(chain, "backend_of", lambda *_: nullcontext())
    forward = rotary.forward_rotary

    def shifted(module, x, position_ids):
        cos, sin = forward(module, x, position_ids)
        return cos * (1 + x.shape[1] * 2.0**-20), sin

    monkeypatch.setattr(rotary, "forward_rotary", shifted)
    monkeypatch.setattr(chain, "enabled", enabled_unwatched)
    assert main.main(CHAIN) == 1
    assert not json.loads(capsys.readouterr().out)["kept"]


def enabled_unwatched(model):
    """`enabled` without strict mode: a planted part computes with stock operators."""
    from isobit.integrations.transformers import enabling

    return enabling.enabled(model, strict=False)


@pytest.mark.full
@pytest.mark.parametrize("words", [["--interpreted"], ["--dtype", "bf16"]])
def test_compiled_code_keeps_the_bits_of_a_model(capsys, words):
    assert main.main([*CHAIN, *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"]
    assert sum(row["numbers"] for row in record["isobit"]["rows"]) > 10_000


@pytest.mark.parametrize(
    "words",
    [
        ["--device", "cuda:99"],
        ["--device", "sm_1"],
        ["--device", "sm_90", "--model", "qwen3-small"],
        ["--interpreted"],
    ],
)
def test_what_cannot_run_is_refused_with_a_remedy(capsys, words):
    assert torch.cuda.device_count() < 99
    assert main.main(["chain", *words]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("expected", "received", "remedy"))
