"""Theorem: `isobit check --like prune|quantize|merge|tokenizer` keeps right tools and names what wrong ones break."""

import json
import re

import pytest

from isobit.cli import main

TOOLS = """
import torch
from isobit.library.post_training.merging import lerp_for_slerp as merge_linearly
from isobit.library.post_training.pruning import wanda_magnitude
from isobit.library.post_training.quantising import (
    quantize as right_quantize, scaled_mm_of_the_tensor, torch_dynamic, zero_off_by_one
)

def by_rows(x):
    scale = x.double().abs().amax(1, True).clamp(min=1e-30) / 127
    return (x.double() / scale).round(), scale, torch.zeros_like(scale)

def matches_nothing(weight, sparsity):
    return weight.clone()

def by_torch(weight, sparsity):
    from torch.nn.utils import prune
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight.contiguous().clone()
    prune.l1_unstructured(layer, "weight", float(sparsity))
    return layer.weight.detach()
"""


def claims_of(capsys, monkeypatch, tmp_path, code, like):
    module = "tools_" + "".join(filter(str.isalnum, str(tmp_path)))  # imported once per process
    (tmp_path / f"{module}.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    code = code.replace("tools_here", module)
    exit_code = main.main(["check", code, "--like", like, "--quiet", "--json"])
    record = json.loads(capsys.readouterr().out)["contract"]
    assert all(
        p["caught"] for c in record["claims"] for p in c["planted"] if c["verdict"] == "kept"
    )
    return exit_code, {c["claim"]: c["verdict"] for c in record["claims"]}


@pytest.mark.parametrize(
    ("code", "like", "broken"),
    [
        ("tools_here.py:matches_nothing", "prune", {"exact-count"}),
        ("tools_here.py:by_torch", "prune", set()),
        ("tools_here.py:right_quantize", "quantize", set()),
        ("tools_here.py:zero_off_by_one", "quantize", {"half-a-step", "zero-is-exact"}),
        ("tools_here.py:merge_linearly", "merge", {"slerp-keeps-norms"}),
        ("tools_here.py:wanda_magnitude", "prune", {"exact-count", "kept-bits", "ends"}),
        ("tools_here.py:by_rows", "quantize_int8", set()),
        ("tools_here.py:right_quantize", "quantize_fp8", set()),
        ("tools_here.py:torch_dynamic", "quantize_int8", {"fine-steps-int8", "rows-int8"}),
        ("tools_here.py:scaled_mm_of_the_tensor", "quantize_fp8", {"fine-steps-fp8", "rows-fp8"}),
    ],
)
@pytest.mark.sweep(4)
def test_tools_are_judged(capsys, monkeypatch, tmp_path, code, like, broken):
    exit_code, found = claims_of(capsys, monkeypatch, tmp_path, code, like)
    assert {claim for claim, verdict in found.items() if verdict != "kept"} == broken, found
    assert exit_code == bool(broken)


def make_file(path, **options):
    tokenizers = pytest.importorskip("tokenizers")
    from isobit.library.post_training.tokenizing import tokenizer

    made = tokenizer()
    merges = [tuple(pair) for pair in made.merges]
    model = tokenizers.models.BPE(vocab=dict(made.vocab), merges=merges)
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=options.get("space", False)
    )
    found.decoder = tokenizers.decoders.ByteLevel()
    if options.get("lower"):
        found.normalizer = tokenizers.normalizers.Lowercase()
    found.save(str(path))


def test_a_users_tokenizer_is_judged(capsys, monkeypatch, tmp_path):
    make_file(tmp_path / "tokenizer.json")
    code, found = claims_of(capsys, monkeypatch, tmp_path, "tokenizer.json", "tokenizer")
    assert (code, set(found.values())) == (0, {"kept"})
    assert main.main(["check", "tokenizer.json", "--like", "tokenizer", "--quiet"]) == 0
    said = re.search(r"is not ids for (\d+) of (\d+) drawn", capsys.readouterr().out)
    assert 0 < int(said[1]) < int(said[2])  # merges that text would apply, and ids that text gives
    make_file(tmp_path / "lower.json", lower=True)
    code, found = claims_of(capsys, monkeypatch, tmp_path, "lower.json", "tokenizer")
    assert (code, found["round-trip"]) == (1, "broken")
