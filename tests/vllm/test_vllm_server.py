"""`vllm serve` with isobit's worker is kept on every axis of `isobit compare server`; stock vLLM is not.

The servers run in the environment that ./setup_vllm makes.
"""

import json

import pytest
import torch
import transformers

import isobit
from benchmarks import vllm as rollouts
from isobit.cli.main import main
from isobit.comparing.server.completions import EXACT
from isobit.comparing.server.report import AXES
from isobit.errors import ServerError
from isobit.foundation.http_json import Server
from isobit.rollout import (
    check_weights,
    compare_weights,
    digest_weights,
    send_weights,
    served_weights,
)
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


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def two_models(place):
    """Return the model that is served at first, and one with other weights."""
    first, second = load(place / "model"), load(place / "model")
    for parameter in second.parameters():
        parameter.data.mul_(1.25)
    return first, second


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
        with pytest.raises(ServerError, match="packed for the CPU"):
            check_weights(address, load(place / "model"))
    assert codes == (1, 1), said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": 1.0}, "seed"),
        ({"temperature": 1.0, "seed": 3, "min_p": 0.1}, "min_p"),
        ({"logit_bias": {"3": 5.0}}, "logit_bias"),
        ({"repetition_penalty": 1.1}, "--generation-config vllm"),
        ({"vllm_xargs": {"isobit_requests": 3}}, "isobit_request"),
    ],
)
def test_a_request_that_no_trainer_scores_is_refused_and_the_server_lives(served, more, words):
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 2, "temperature": 0} | EXACT
    server = Server(served, timeout=300)
    refused = server.post("/v1/completions", body | more)
    assert refused.status == 400, refused.words
    assert words in refused.data.decode()
    assert server.post("/v1/completions", body).status == 200


# ---- what is served -----------------------------------------------------------------------------------------------


def flip_a_bit(now, before):
    now["model.layers.0.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1


def leave_one_out(now, before):
    name = "model.layers.1.self_attn.k_proj.weight"
    now[name].copy_(before[name])


def stop_half_way(now, before):
    name = "model.layers.0.mlp.gate_proj.weight"
    now[name][100:].copy_(before[name][100:])


SPOILED = {  # the digests' finding, and that of vLLM's own checksums, which have no rows
    "right": (lambda now, before: None, [], []),
    "wrong": (
        flip_a_bit,
        [("model.layers.0.mlp.down_proj.weight", "wrong", 1)],
        [("model.layers.0.mlp.down_proj.weight", "wrong")],
    ),
    "stale": (
        leave_one_out,
        [("model.layers.1.self_attn.k_proj.weight", "stale", 128)],
        [("model.layers.1.self_attn.k_proj.weight", "stale")],
    ),
    "half": (
        stop_half_way,
        [("model.layers.0.mlp.gate_proj.weight", "half-written", 412)],
        [("model.layers.0.mlp.gate_up_proj.weight", "wrong")],
    ),
}


def test_a_wrong_stale_or_half_written_tensor_is_named(served, place, capsys):
    first, second = two_models(place)
    old, sent = digest_weights(first), digest_weights(second)
    assert compare_weights(served_weights(served), old).equal
    server = Server(served, timeout=300)
    for name, (spoil, expected, by_checksum) in SPOILED.items():
        model = load(place / "model")
        model.load_state_dict(second.state_dict())
        spoil(model.state_dict(), first.state_dict())
        model.save_pretrained(place / name)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(place / name)}}
        assert server.post("/collective_rpc", body).status == 200
        found = compare_weights(served_weights(served), sent, previous=old)
        checked = check_weights(served, second, previous=first)
        with capsys.disabled():
            print(f"\n{name}: {found}\n  /weight_checker: {checked}")
        assert found.tensors == checked.tensors == len(sent)
        assert [(one.name, one.kind, one.rows) for one in found.differences] == expected
        assert [(one.name, one.kind) for one in checked.differences] == by_checksum


def test_a_transfer_is_checked_before_it_is_loaded(served, place, capsys):
    first, second = two_models(place)
    for model in (first, second):
        assert send_weights(served, model, place / "sent").equal
        assert check_weights(served, model).equal

    def save_half(folder):
        half = load(place / "model")
        half.load_state_dict(first.state_dict())
        stop_half_way(half.state_dict(), second.state_dict())
        half.save_pretrained(folder)

    whole, first.save_pretrained = first.save_pretrained, save_half
    with pytest.raises(
        ServerError, match=r"gate_proj\.weight is half-written, rows 100 to 512"
    ) as told:
        send_weights(served, first, place / "sent")
    with capsys.disabled():
        print(f"\n{told.value}")
    assert check_weights(served, second).equal
    first.save_pretrained = whole
    assert send_weights(served, first, place / "sent").equal
    assert transferred_equals_trained(served, first)


def transferred_equals_trained(address, model):
    """Return whether a completion of the server has the trainer's log-probabilities."""
    prompt = make_prompts(1, 40, seed=5)[0]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    body |= EXACT
    said = Server(address, timeout=300).post("/v1/completions", body).json()["choices"][0]
    ids = torch.tensor([prompt + said["token_ids"]])
    with torch.no_grad():
        scored = isobit.logprobs(isobit.enable(model.eval()), ids)[0, len(prompt) - 1 : -1]
    return scored.tolist() == said["logprobs"]["token_logprobs"] and len(scored) == 8
