"""A trainer asks a server for the digests of what it serves: a wrong, stale or half-written tensor is named, and the
right weights are equal, under fused names."""

import pytest
import torch

from isobit.comparing.checkpoints.weight_digests import RPC, digests_to_json
from isobit.errors import ArgumentError, ServerError
from isobit.rollout import compare_weights, digest_weights, served_weights
from tests.comparing.fake_completions import FakeServer, reply


def trained(seed):
    """Return a trainer's weights in bf16."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.mlp.gate_proj.weight": (6, 8),
        "model.layers.0.mlp.up_proj.weight": (6, 8),
        "model.norm.weight": (8,),
    }
    return {n: torch.randn(s, generator=draw).bfloat16() for n, s in shapes.items()}


def fused(weights):
    """Return the weights under vLLM's names."""
    part = {name.split(".")[-2]: tensor for name, tensor in weights.items()}
    return {
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat(
            [part["q_proj"], part["k_proj"], part["v_proj"]]
        ),
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat([part["gate_proj"], part["up_proj"]]),
        "model.norm.weight": part["norm"].clone(),
    }


def keep(served, before):
    pass


def flip_a_bit(served, before):
    served["model.layers.0.mlp.gate_up_proj.weight"].view(torch.int16)[7, 3] ^= 1


def leave_one_out(served, before):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    served[name][8:12] = before[name][8:12]  # all of k_proj


def stop_half_way(served, before):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    served[name][5:8] = before[name][5:8]  # the end of q_proj


NEW, OLD = trained(1), trained(0)


def serve_digests(change):
    """Return an answer to collective RPCs, as vLLM's development server gives it."""
    served = fused(NEW)
    change(served, fused(OLD))
    text = digests_to_json(digest_weights(served))

    def answer(handler, body):
        assert (handler.path, body) == ("/collective_rpc", {"method": RPC})
        reply(handler, 200, {"results": [text]})
        return True

    return answer


@pytest.mark.parametrize(
    ("change", "tensor", "kind", "rows"),
    [
        (keep, None, None, None),
        (flip_a_bit, "model.layers.0.mlp.up_proj.weight", "wrong", (1, 6)),
        (leave_one_out, "model.layers.0.self_attn.k_proj.weight", "stale", (4, 4)),
        (stop_half_way, "model.layers.0.self_attn.q_proj.weight", "half-written", (3, 8)),
    ],
)
def test_tensors_that_were_not_transferred_are_named(change, tensor, kind, rows):
    with FakeServer(answer=serve_digests(change)) as server:
        found = compare_weights(
            served_weights(server.url), digest_weights(NEW), previous=digest_weights(OLD)
        )
    assert (found.tensors, found.rows) == (6, 36)
    named = [(one.name, one.kind, (one.rows, one.of)) for one in found.differences]
    assert named == ([] if tensor is None else [(tensor, kind, rows)])
    assert found.equal is (tensor is None)


def test_an_engine_in_this_process_is_asked_directly():
    class Engine:
        def collective_rpc(self, method):
            assert method == RPC
            return [digests_to_json(digest_weights(fused(NEW)))]

    class Stock:
        def collective_rpc(self, method):
            raise NotImplementedError(method)

    assert compare_weights(served_weights(Engine()), digest_weights(NEW)).equal
    with pytest.raises(ServerError, match="engine_arguments"):
        served_weights(Stock())
    with pytest.raises(ArgumentError, match=r"a vllm\.LLM, or the address"):
        served_weights(3)


GOOD = digests_to_json(digest_weights(fused(NEW)))


@pytest.mark.parametrize(
    ("status", "said", "error", "words"),
    [
        (404, {"detail": "Not Found"}, ServerError, "VLLM_SERVER_DEV_MODE=1"),
        (500, {"error": "not implemented"}, ServerError, "--worker-cls isobit"),
        (401, {}, ServerError, "pass key="),
        (200, {"results": []}, ServerError, "the digests of one worker"),
        (200, {"results": [GOOD, GOOD]}, ServerError, "2 of them"),
        (200, {"results": [None]}, ServerError, "the digests of one worker"),
        (200, [], ServerError, "the digests of one worker"),
        (200, b"ok", ServerError, "not JSON|that are not"),
        (200, {"results": ["{}"]}, ArgumentError, "digests_to_json"),
        (200, {"results": [GOOD.replace("bfloat16", "float16")]}, ArgumentError, "another"),
        (200, b" " * 5000, ServerError, "at most 4,096 bytes"),
    ],
)
def test_servers_without_digests_are_refused(status, said, error, words):
    def answer(handler, body):
        reply(handler, status, said)
        return True

    with FakeServer(answer=answer) as server, pytest.raises(error, match=words):
        served_weights(server.url, largest=4096)
