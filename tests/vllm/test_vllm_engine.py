"""vLLM with isobit's worker: the bits of the trainer, in every layout; what is not computed is refused.

The engine runs in the environment that ./setup_vllm makes, the trainer in this one; arrays travel in files.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import isobit
from benchmarks import vllm as rollouts

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not rollouts.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]


def two_models(family, place):
    """Return the folders of two models of one shape with other weights."""
    first, second = str(place / "first"), str(place / "second")
    rollouts.save_model(family, "bfloat16", first)
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    model.save_pretrained(second)
    return first, second


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models("Qwen3", tmp_path_factory.mktemp("models"))


def ask(check, models, out):
    command = [str(rollouts.PYTHON), "tests/vllm/in_engine.py", check, *models, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def trained(folder, found, prompts):
    """Return the trainer's log-probabilities of generated tokens, from one padded batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole = [
        torch.tensor(prompt + tokens) for prompt, (tokens, _) in zip(prompts, found, strict=True)
    ]
    ids = torch.stack(whole)
    with torch.no_grad():
        scored = isobit.logprobs(isobit.enable(model.eval()), ids)
    return [scored[row, len(prompt) - 1 : -1].tolist() for row, prompt in enumerate(prompts)]


def test_update_of_the_weights_is_seen_and_keys_of_the_old_ones_are_refused(models, tmp_path):
    from tests.vllm.in_engine import PROMPTS

    said = ask("weights", models, tmp_path / "weights.json")
    for folder, name in zip(models, ("first", "second"), strict=True):
        logprobs = [row[1] for row in said[name]]
        assert sum(map(len, logprobs)) == 96
        assert logprobs == trained(folder, said[name], PROMPTS)
    assert said["first"] != said["second"]
    assert len(said["packed"]) == 9  # four per layer, and the head
    assert all(said["packed"])
    assert all(said["packed again"])
    assert said["in place"] == said["second"]
    stale = [row[1] for row in said["stale packs"]]
    assert stale != trained(models[0], said["stale packs"], PROMPTS)
    assert said["after refused requests"] == said["second"]
    assert "seed" in said["no seed"]
    assert "min_p" in said["min_p"]
    assert "changed since" in said["hook"]
    assert "changed since" in said["method"]
    assert said["as prepared"] == ""
    assert "reset_prefix_cache" in said["stale keys"]


@pytest.mark.parametrize(("family", "is_tied"), [("Qwen2", True), ("Qwen3", False)])
def test_the_control_computes_with_the_weights_that_it_reloaded(family, is_tied, tmp_path):
    def flat(made):
        return [value for _, logprobs in made for value in logprobs]

    said = ask("stock", two_models(family, tmp_path), tmp_path / "stock.json")
    assert sum(len(tokens) for tokens, _ in said["fresh"]) == 96
    assert said["first"] != said["fresh"]
    assert said["reloaded"] == said["fresh"]
    assert (said["as vLLM reloads"] != said["fresh"]) == is_tied
    pairs = zip(flat(said["as vLLM reloads"]), flat(said["fresh"]), strict=True)
    print(f"\n{family}, as vLLM reloads: {sum(a != b for a, b in pairs)} of 96 differ")


def test_engines_that_are_not_computed_are_refused(models, tmp_path):
    said = ask("refusals", models, tmp_path / "refusals.json")
    expected = {
        "tensor parallel": "tensor_parallel_size=2",
        "quantization": "quantization='fp8'",
        "lora": "enable_lora",
        "speculative": "speculative decoding",
        "cache dtype": "kv_cache_dtype='fp8'",
        "logprobs": "raw_logits",
        "worker": "CPUWorker",
        "architecture": "MistralForSequenceClassification",
        "transfer": "'nccl'",
        "processors": "isobit.no:Such",
        "dtype": "turns float32 into bfloat16",
        "enforce_eager": "enforce_eager=False",
        "logprobs_mode": "raw_logprobs",
    }
    for name, words in expected.items():
        assert words in said[name], (name, said[name])
        assert "remedy" in said[name], said[name]
    assert said["plain"] == "isobit.integrations.vllm.worker.Worker"
    assert said["disabled"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert said["by name"] == said["plain"]
    assert "isobit" not in said["stock of disabled"]
    assert said["options of requests"] == []


def test_rollouts_have_one_value_in_every_layout_and_the_trainers():
    assert rollouts.run(quick=True, threads=[1, 2], dtypes=["bfloat16"]) == 0


FAMILIES = ["Qwen3Moe", "Mistral", "Phi3", "Gemma", "Granite"]
FAMILIES += ["Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"]


@pytest.fixture
def no_images(tmp_path, monkeypatch):
    """An empty torchvision, which vLLM's file of Qwen3.5 imports for images, and which ./setup_vllm cannot install."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(NO_IMAGES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


NO_IMAGES = """
import importlib.abc, importlib.machinery, sys, types
from unittest import mock

__version__ = "0.0"  # transformers compares it

class Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_of_known_layers_have_the_trainers_bits(family, tmp_path, request):
    """Mistral has a window of 48 keys, Gemma norms with 1 + weight and gelu, Granite scaled logits.

    The last three have linear attention, with states of chunks of 64 tokens, and two of them a gated shared expert.
    """
    from tests.vllm.in_engine import PROMPTS

    if family.startswith("Qwen3_5"):
        request.getfixturevalue("no_images")
    folder = str(tmp_path / "model")
    rollouts.save_model(family, "bfloat16", folder)
    said = ask("layouts", (folder, folder), tmp_path / "layouts.json")
    logprobs = [row[1] for row in said["together"]]
    assert sum(map(len, logprobs)) == 96
    assert said["alone"] == said["together"][:4]
    assert logprobs == trained(folder, said["together"], PROMPTS)
    stock = ask("stock layouts", (folder, folder), tmp_path / "stock.json")
    of_trainer = trained(folder, stock["together"], PROMPTS)
    differ = sum(
        a != b
        for row, scored in zip(stock["together"], of_trainer, strict=True)
        for a, b in zip(row[1], scored, strict=True)
    )
    print(f"\n{family}: isobit 0 of 96 differ from the trainer, stock {differ} of 96")
    assert differ > 0  # the control
