"""The clients of vLLM's own endpoints: checksums of what any server serves, and transfers that are checked."""

import hashlib
from pathlib import Path

import pytest
import torch
from test_served_weights import NEW, OLD, fused, trained

from isobit.comparing.checkpoints.weight_digests import RPC, digests_from_json, digests_to_json
from isobit.errors import ArgumentError, ServerError
from isobit.rollout import check_weights, compare_weights, digest_weights, send_weights
from tests.comparing.fake_completions import FakeServer, reply

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def with_vocabulary(weights, served):
    """Add an embedding of 70 rows, which a server pads to 128, and its tied head, which it does not list."""
    table = weights["model.norm.weight"].expand(70, 8).contiguous()
    if served:
        return fused(weights) | {EMBEDDING: torch.cat([table, torch.zeros(58, 8).bfloat16()])}
    return weights | {EMBEDDING: table, HEAD: table.clone()}


def checksums(change=None, place="dp0:pp0:pcp0:tp0:"):
    served = with_vocabulary(NEW, served=True)
    if change:
        change(served, with_vocabulary(OLD, served=True))
    return {place + name: sha(tensor) for name, tensor in served.items()}


def check(said, status=200, previous=None, weights=None):
    def answer(handler, body):
        assert (handler.path, body) == ("/weight_checker", {"action": "checksum"})
        reply(handler, status, said)
        return True

    sent = with_vocabulary(NEW, served=False) if weights is None else weights
    with FakeServer(answer=answer) as server:
        return check_weights(server.url, sent, previous=previous)


def flip_a_bit(served, before):
    served[GATE_UP].view(torch.int16)[7, 3] ^= 1


def leave_k_out(served, before):
    served[QKV][8:12] = before[QKV][8:12]


def write_into_the_padding(served, before):
    served[EMBEDDING][100] = 1.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, []),
        (flip_a_bit, [(GATE_UP, "wrong")]),
        (leave_k_out, [(K, "stale")]),
        (write_into_the_padding, [(EMBEDDING, "wrong")]),
        (
            lambda served, before: served.pop("model.norm.weight"),
            [("model.norm.weight", "missing")],
        ),
        (lambda served, before: served.update(new=torch.ones(2)), [("new", "extra")]),
    ],
)
def test_checksums_name_what_differs(change, expected):
    found = check({"checksums": checksums(change)}, previous=with_vocabulary(OLD, served=False))
    assert [(one.name, one.kind) for one in found.differences] == expected
    assert found.equal is (not expected)
    assert found.tensors == 7 - (expected[:1] == [("model.norm.weight", "missing")])


def test_each_replica_is_compared_and_what_was_sent_before_may_be_unknown():
    both = checksums() | checksums(leave_k_out, "dp1:pp0:pcp0:tp0:")
    found = check({"checksums": both})
    assert (found.tensors, [(d.name, d.kind) for d in found.differences]) == (14, [(QKV, "wrong")])


def test_dtype_of_the_server_is_taken():
    wide = {name: tensor.float() for name, tensor in with_vocabulary(NEW, served=False).items()}

    def answer(handler, body):
        reply(handler, 200, {"checksums": checksums()})
        return True

    with FakeServer(answer=answer) as server:
        assert check_weights(server.url, wide, dtype=torch.bfloat16).equal
        assert len(check_weights(server.url, wide).differences) == len(checksums())


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (404, {}, "VLLM_SERVER_DEV_MODE=1"),
        (401, {}, "pass key="),
        (500, {}, "the server's log"),
        (200, {"checksums": {}}, "without checksums"),
        (200, [], "without checksums"),
        (200, {"checksums": {"norm": "00"}}, "another form"),
        (200, {"checksums": {"dp0:pp0:pcp0:tp0:norm": 3}}, "another form"),
        (200, {"checksums": checksums(None, "dp0:pp0:pcp0:tp1:")}, "sharded"),
        (200, {"checksums": {"dp0:pp0:pcp0:tp0:a": sha(torch.ones(0))}}, "packed for the CPU"),
    ],
)
def test_servers_without_comparable_checksums_are_refused(status, said, words):
    with pytest.raises(ServerError, match=words):
        check(said, status)


def test_no_weights_are_refused():
    with pytest.raises(ArgumentError, match="none"):
        check({}, weights={})


# ---- transfers ----------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A trainer's model as transformers has them."""

    dtype = torch.bfloat16

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def state_dict(self):
        return self.weights

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True)


class Engine:
    """vLLM's endpoints: reads the digests as its worker does, and serves what it was given last."""

    def __init__(self, read, served=None, fails=None):
        self.read, self.served, self.fails, self.asked = read, served, fails, []

    def __call__(self, handler, body):
        self.asked.append(handler.path)
        if handler.path == self.fails:
            reply(handler, 500, {"error": "no weight_transfer_config"})
        elif handler.path == "/update_weights":
            sent = digests_from_json(body["update_info"]["digests"])
            found = compare_weights(digest_weights(self.read), sent)
            self.served = self.served or self.read
            reply(handler, 200 if found.equal else 500, {"error": str(found.differences)})
        elif handler.path == "/collective_rpc":
            assert body == {"method": RPC}
            reply(handler, 200, {"results": [digests_to_json(digest_weights(fused(self.served)))]})
        else:
            reply(handler, 200, {})
        return True


def send(engine, folder):
    with FakeServer(answer=engine) as server:
        return send_weights(server.url, Model(NEW), folder / "step")


def test_a_transfer_is_sent_between_pause_and_resume_and_compared(tmp_path):
    engine = Engine(NEW)
    assert send(engine, tmp_path).equal
    assert engine.asked == [
        "/pause?mode=wait",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
        "/collective_rpc",
    ]
    found = send(Engine(NEW, served=NEW | {K: OLD[K]}), tmp_path / "again")
    assert [one.name for one in found.differences] == [K]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(NEW | {K: trained(5)[K]}), f"(?s){K}.*isobit's worker"),
        (Engine(NEW, fails="/start_weight_update"), "--weight-transfer-config"),
    ],
)
def test_a_transfer_that_fails_is_told_and_the_server_resumed(engine, words, tmp_path):
    with pytest.raises(ServerError, match=words):
        send(engine, tmp_path)
    assert engine.asked[-1] == "/resume"
    assert "/finish_weight_update" not in engine.asked
