"""`isobit doctor --device` attests the GPU executors, here compiled for a card and run in the PTX machine."""

import json
import re

import pytest
import torch

import isobit
from isobit.certifying.running.backends import InterpreterBackend, MachineBackend, compiler_for
from isobit.certifying.running.compile import specialise
from isobit.cli import main
from isobit.foundation import backends
from isobit.foundation.records import Attestation
from isobit.library.on_gpu import attesting, devices
from isobit.library.on_gpu.devices import Device
from isobit.ops.gpu import attestation, launching, shipped_forms
from isobit.order.engines import TENSOR_CORES, tensor_core
from isobit.reveal.tensor_core import reveal_tensor_core

FEW = ["doctor", "--device", "sm_90", "--operators", "silu", "rotary", "-q"]


def test_compiled_code_keeps_the_order(capsys, tmp_path):
    record = tmp_path / "card.json"
    assert main.main([*FEW, "--record", str(record)]) == 0
    assert "6 of 6 kept" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["device"]["name"] == "sm_90"
    assert sorted(found["operators"]) == ["rotary", "silu"]
    assert all(one["kept"] for row in found["operators"].values() for one in row)
    assert len(found["kernels"]) >= 6
    assert all(one["same"] and len(one["digest"]) == 32 for one in found["kernels"])
    assert "cuda_" in found["device"]["ptxas"]


def test_a_wrong_kernel_is_not_attested(capsys, monkeypatch):
    run = launching.run

    def wrong(kernel, grid, x, y, *args, **options):
        run(kernel, grid, x, y, *args, **options)
        y.view(-1)[-1] += 1

    monkeypatch.setattr("isobit.ops.gpu.launching.run", wrong)
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


@pytest.mark.parametrize(
    "operator", ["linear", "attention", pytest.param("logprob", marks=pytest.mark.full)]
)
def test_the_wrong_tensor_core_is_seen_by_every_operator_that_multiplies(monkeypatch, operator):
    """Attention and log-probabilities in 16 bits are not taken for kept by what was compared in fp32."""
    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", ((2, 64, 2048, ""),))
    monkeypatch.setattr(shipped_forms, "gradient_difference", lambda *_: None)
    monkeypatch.setattr(shipped_forms, "ATTENTION_FORMS", ((1, 70),))
    monkeypatch.setattr(shipped_forms, "HEADS", (64,))
    monkeypatch.setattr(shipped_forms, "VOCABULARY", 310)
    for engine, kept in (("tc25x16", True), ("tc24x8", False)):
        monkeypatch.setattr(attestation, "ENGINE_OF_TARGET", {"sm_90": engine})
        with isobit.certifying.executing("interpreter", target="sm_90"):
            found = attestation.attest_operator(operator, torch.bfloat16, torch.device("cpu"))
        assert found.kept is kept, found.detail
        assert found.engine == engine
    assert "differs from its definition" in found.detail


class WrongLeaf(InterpreterBackend):
    """Ampere's arithmetic on a target whose defined arithmetic is Hopper's."""

    @property
    def engine(self):
        return "tc24x8"


class NewGpu(InterpreterBackend):
    """A GPU that is in no table, with Hopper's arithmetic, or with one that depends on the number of rows."""

    mixed = False

    @property
    def engine(self):
        return "tc25x16"

    def launch(self, kernel, grid, args, constants, options):
        super().launch(kernel, grid, args, constants, options)
        if self.mixed and kernel.__name__ == "linear_tile" and args[3].shape[0] > 16:
            args[3].mul_(1.0001)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_gpu_that_is_not_listed_has_the_arithmetic_that_is_revealed(monkeypatch, mixed):
    """It is attested by the engine that was found, in every form; one that agrees with none is refused."""
    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", ((2, 64, 512, ""),))
    monkeypatch.setattr(shipped_forms, "gradient_difference", lambda *_: None)
    monkeypatch.setattr(NewGpu, "mixed", mixed)
    with backends.use(NewGpu("sm_103")):
        found = attestation.attest_operator("linear", torch.bfloat16, torch.device("cpu"))
    assert found.kept is not mixed
    assert found.engine == ("unknown" if mixed else "tc25x16")
    assert not mixed or "sm_103 is not known" in found.detail


@pytest.mark.parametrize("kind", [InterpreterBackend, WrongLeaf])
def test_the_leaf_is_revealed_and_compared(monkeypatch, capsys, kind):
    """Only the leaf decides here: operators are taken for kept."""
    kept = Attestation("bfloat16", "tc25x16", True, 1, "")
    monkeypatch.setattr(attesting, "attest_operator", lambda *_: kept)
    monkeypatch.setattr(attesting, "MachineBackend", lambda target, texts: kind(target))
    wrong = kind is WrongLeaf
    code = main.main(["doctor", "--device", "sm_90", "--operators", "logprob", "-q", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert code == wrong
    assert [leaf["dtype"] for leaf in record["leaf"]] == ["bf16", "f16"]
    for leaf in record["leaf"]:
        assert (leaf["fraction"], leaf["products"]) == ((24, 8) if wrong else (25, 16))
        assert leaf["engines"] == (["tc24x8"] if wrong else ["tc25x16"])
        assert leaf["expected"] == "tc25x16"
        assert leaf["kept"] is not wrong
        assert leaf["probes"] > 300


@pytest.mark.parametrize("engine", ["tc24x8", "tc25x16", "cdna3"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_known_leaf_is_told_from_the_others(engine, dtype):
    add = tensor_core(engine, dtype)

    def sums(rows):
        return [add(None, [(term, 1.0) for term in row]) for row in rows]

    found = reveal_tensor_core(sums, dtype)
    rule = TENSOR_CORES[engine][dtype]
    assert found.engines == (engine,)
    assert (found.fraction, found.products) == (rule.fraction, rule.products)


def test_a_leaf_that_depends_on_the_number_of_rows_agrees_with_no_engine():
    def sums(rows):
        add = tensor_core("tc25x16" if len(rows) > 16 else "tc24x8", "bf16")
        return [add(None, [(term, 1.0) for term in row]) for row in rows]

    assert reveal_tensor_core(sums, "bf16").engines == ()


@pytest.fixture
def card(monkeypatch):
    """Return what a card runs for each kernel: by default the text that is compiled for sm_90, in the machine."""
    facts = {"name": "a card", "how": "run on the card"}
    made = Device("cuda", torch.device("cpu"), "sm_90", False, facts)
    monkeypatch.setattr(devices, "find_device", lambda name: made)
    changes = []

    def run(kernel, grid, args, given):
        MachineBackend("sm_90").launch(kernel, grid, args, given, {})
        call = specialise(kernel, "sm_90", args, given)
        text = compiler_for("sm_90").compile(kernel, call).ptx
        return {"ptx": changes[0](text) if changes else text, "cubin": b""}

    monkeypatch.setattr("isobit.certifying.running.card.run_on_card", run)
    return changes


def test_a_card_that_runs_the_texts_of_the_machine(capsys, card):
    assert main.main(["doctor", "--device", "cuda", "--operators", "silu", "-q"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"(\d+) of (\d+) compiled kernels are the PTX that the machine runs", said)
    assert found[1] == found[2] != "0"
    assert card == []


def test_a_card_that_runs_another_text_is_reported(capsys, card):
    """One instruction differs; the bits of the operators do not."""
    card.append(lambda text: text.replace("add.rn.f32", "add.f32", 1))
    assert main.main(["doctor", "--device", "cuda", "--operators", "silu", "-q", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert all(one["kept"] for one in record["operators"]["silu"])
    assert record["kernels"]
    assert not any(text["same"] for text in record["kernels"] if "silu" in text["kernel"])


def test_comments_and_debug_lines_are_no_difference(capsys, card):
    card.append(lambda text: f"// made on another machine\n{text}")
    assert main.main(["doctor", "--device", "cuda", "--operators", "silu", "-q"]) == 0
    assert "another text" not in capsys.readouterr().out


def test_amd_has_no_machine_to_compare_with(monkeypatch, capsys, card):
    made = Device("cuda", torch.device("cpu"), "gfx942", False, {"name": "an AMD card"})
    monkeypatch.setattr(devices, "find_device", lambda name: made)
    assert main.main(["doctor", "--device", "cuda", "--operators", "silu", "-q"]) == 0
    assert re.search(r"0 of \d+ compiled kernels are the PTX", capsys.readouterr().out)
    assert card == []


def test_a_kernel_without_a_text_is_not_attested(monkeypatch, capsys, card):
    monkeypatch.setattr("isobit.certifying.running.card.run_on_card", lambda *given: {"cubin": b""})
    assert main.main(["doctor", "--device", "cuda", "--operators", "silu", "-q"]) == 1
    assert "0 of 3 kept" in capsys.readouterr().out
    assert card == []


def test_a_leaf_whose_kernels_raise_is_not_as_defined(monkeypatch, capsys):
    """As on a GPU that has no products of a type."""
    kept = Attestation("bfloat16", "tc25x16", True, 1, "")
    monkeypatch.setattr(attesting, "attest_operator", lambda *_: kept)

    def fail(*_):
        raise ValueError("no such instruction")

    monkeypatch.setattr(attesting, "reveal_leaf", fail)
    assert main.main(["doctor", "--device", "sm_90", "--operators", "linear", "-q"]) == 1
    said = capsys.readouterr().out
    assert "no such instruction" in said
    assert said.count("NOT as defined (tc25x16)") == 2
