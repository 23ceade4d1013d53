"""`isobit doctor --device` attests the GPU executors, here compiled for a card and run in the PTX machine."""

import json

import pytest
import torch

import isobit
from isobit.cli import main
from isobit.ops.gpu import attestation, launching

FEW = ["doctor", "--device", "sm_90", "--operators", "silu", "rotary", "-q"]


def test_compiled_code_keeps_the_order(capsys, tmp_path):
    record = tmp_path / "card.json"
    assert main.main([*FEW, "--record", str(record)]) == 0
    assert "6 of 6 kept" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["device"]["name"] == "sm_90"
    assert sorted(found["operators"]) == ["rotary", "silu"]
    assert all(one["kept"] for row in found["operators"].values() for one in row)


def test_a_wrong_kernel_is_not_attested(capsys, monkeypatch):
    run = launching.run

    def wrong(kernel, grid, x, y, *args, **options):
        run(kernel, grid, x, y, *args, **options)
        y.view(-1)[-1] += 1

    monkeypatch.setattr("isobit.ops.gpu.element_tiles.run", wrong)
    assert main.main([*FEW, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["operators"]
    assert [one["kept"] for one in found["rotary"]] == [True] * 3
    assert [one["kept"] for one in found["silu"]] == [False] * 3
    assert found["silu"][0]["detail"].startswith("silu")


@pytest.mark.parametrize(
    "words",
    [
        ["--device", "cuda:99"],
        ["--device", "sm_1"],
        ["--device", "sm_90", "--operators", "rmsnorm"],
        ["--device", "sm_90", "--record", "missing/x.json"],
        ["--device", "sm_90", "--record", "/dev/null"],
        ["--record", "x.json"],
    ],
)
def test_what_cannot_run_is_refused_with_a_remedy(capsys, words):
    assert main.main(["doctor", *words]) == 2
    assert "remedy" in capsys.readouterr().err


@pytest.mark.parametrize("operator", ["linear", "attention", "logprob"])
def test_the_wrong_tensor_core_is_seen_by_every_operator_that_multiplies(monkeypatch, operator):
    """Attention and log-probabilities in 16 bits are not taken for kept by what was compared in fp32."""
    for engine, kept in (("tc25x16", True), ("tc24x8", False)):
        monkeypatch.setattr(attestation, "ENGINE_OF_TARGET", {"sm_90": engine})
        with isobit.compiled.executing("interpreter", target="sm_90"):
            found = attestation.attest_operator(operator, torch.bfloat16, torch.device("cpu"))
        assert found.kept is kept, found.detail
        assert found.engine == engine
    assert "product" in found.detail
