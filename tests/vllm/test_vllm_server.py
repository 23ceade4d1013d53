"""`vllm serve` with isobit's worker is kept on every axis of `isobit audit --server`; stock vLLM is not.

The servers run in the environment that ./setup_vllm makes.
"""

import json

import pytest
import torch
import transformers

from benchmarks import vllm as rollouts
from isobit.cli.main import main
from isobit.errors import ServerError
from isobit.http_json import Server
from isobit.rollout import compare_weights, digest_weights, served_weights
from isobit.server_records import AXES
from tests.vllm.served import ISOBIT, STOCK, make_prompts, serve

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not rollouts.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model and prompts."""
    place = tmp_path_factory.mktemp("served")
    rollouts.save_model("Qwen3", "bfloat16", place / "model")
    lines = [json.dumps({"input_ids": prompt}) for prompt in make_prompts(16, 160)]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    return place


@pytest.fixture(scope="module")
def served(place):
    """Return the address of a server with isobit's worker."""
    with serve(place / "model", ISOBIT, place / "isobit.log") as address:
        yield address


def audit(address, place, name, capsys):
    """Return the exit codes of two audits, the text of the first and the record of the second."""
    words = ["--inputs", str(place / "prompts.jsonl"), "--html", str(place / f"{name}.html")]
    command = ["audit", "--server", address, "--model", "tiny", "-q", "--timeout", "300", *words]
    codes = main(command), main([*command, "--json", "--vary", "batch,concurrency"])
    said, record = capsys.readouterr().out.split("\n{\n", 1)
    with capsys.disabled():
        print(f"\n{said}")
    assert set(AXES) <= set(said.split())
    assert "exact fp32 values" in said
    assert "after /reset_prefix_cache" in said
    found = json.loads("{" + record)
    assert sum(one["values"] for one in found["audit"]["variants"]) > 20_000
    return codes, said


def test_isobit_is_kept_on_every_axis(served, place, capsys):
    codes, said = audit(served, place, "isobit", capsys)
    assert codes == (0, 0), said
    assert "kept on repeats, batch, order, prefix-cache, concurrency" in said


def test_stock_is_broken_and_has_no_digests(place, capsys):
    with serve(place / "model", STOCK, place / "stock.log") as address:
        codes, said = audit(address, place, "stock", capsys)
        with pytest.raises(ServerError, match="--worker-cls isobit"):
            served_weights(address)
    assert codes == (1, 1), said


# ---- what is served -----------------------------------------------------------------------------------------------


def flip_a_bit(now, before):
    now["model.layers.0.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1


def leave_one_out(now, before):
    name = "model.layers.1.self_attn.k_proj.weight"
    now[name].copy_(before[name])


def stop_half_way(now, before):
    name = "model.layers.0.mlp.gate_proj.weight"
    now[name][100:].copy_(before[name][100:])


SPOILED = {
    "right": (lambda now, before: None, []),
    "wrong": (flip_a_bit, [("model.layers.0.mlp.down_proj.weight", "wrong", 1)]),
    "stale": (leave_one_out, [("model.layers.1.self_attn.k_proj.weight", "stale", 128)]),
    "half": (stop_half_way, [("model.layers.0.mlp.gate_proj.weight", "half-written", 412)]),
}


def test_a_wrong_stale_or_half_written_tensor_is_named(served, place, capsys):
    load = transformers.AutoModelForCausalLM.from_pretrained
    first = load(place / "model", dtype=torch.bfloat16)
    second = load(place / "model", dtype=torch.bfloat16)
    for parameter in second.parameters():
        parameter.data.mul_(1.25)
    old, sent = digest_weights(first), digest_weights(second)
    assert compare_weights(served_weights(served), old).equal
    server = Server(served, timeout=300)
    for name, (spoil, expected) in SPOILED.items():
        model = load(place / "model", dtype=torch.bfloat16)
        model.load_state_dict(second.state_dict())
        spoil(model.state_dict(), first.state_dict())
        model.save_pretrained(place / name)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(place / name)}}
        assert server.post("/collective_rpc", body).status == 200
        found = compare_weights(served_weights(served), sent, previous=old)
        with capsys.disabled():
            print(f"\n{name}: {found}")
        assert found.tensors == len(sent)
        assert [(one.name, one.kind, one.rows) for one in found.differences] == expected
