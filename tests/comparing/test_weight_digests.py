"""Digests of fused, sharded and whole weights are equal by construction; what differs is named.

1. Whole = fused parts = shards of rows = shards of columns, for shapes of all kinds, in the dtype of the engine.
2. A wrong, stale, half-written, missing or converted tensor, and one changed bit anywhere, are named.
3. JSON is read back; what was changed in it raises.
"""

import pytest
import torch

from isobit import ArgumentError
from isobit.comparing.checkpoints.weight_digests import (
    compare_weights,
    digest_rows,
    digest_weights,
    digests_from_json,
    digests_to_json,
    join_digests,
    parts_of,
)

HIDDEN, SIZES = 48, {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 40, "up_proj": 40}


def trainer_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(2):
        start = f"model.layers.{layer}."
        for name, rows in SIZES.items():
            part = "self_attn" if name[0] in "qkv" else "mlp"
            found[f"{start}{part}.{name}.weight"] = torch.randn(rows, HIDDEN, generator=generator)
        found[start + "self_attn.o_proj.weight"] = torch.randn(HIDDEN, 32, generator=generator)
        found[start + "mlp.down_proj.weight"] = torch.randn(HIDDEN, 40, generator=generator)
        found[start + "input_layernorm.weight"] = torch.randn(HIDDEN, generator=generator)
        for name in "qkv":
            found[f"{start}self_attn.{name}_proj.bias"] = torch.randn(
                SIZES[f"{name}_proj"], generator=generator
            )
    found["model.embed_tokens.weight"] = torch.randn(61, HIDDEN, generator=generator)
    return found


def engine_weights(trainer, dtype=torch.bfloat16):
    """As vLLM has them: fused qkv and gate/up, in bf16."""
    found = {}
    for name, tensor in trainer.items():
        value = tensor.to(dtype)
        if name.rsplit(".", 2)[-2] in ("k_proj", "v_proj", "up_proj"):
            continue
        for first, word in (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj")):
            if f".{first}." in name:
                rest = ("k_proj", "v_proj") if word == "qkv_proj" else ("up_proj",)
                parts = [trainer[name.replace(first, other)].to(dtype) for other in rest]
                name, value = name.replace(first, word), torch.cat([value, *parts])
        found[name] = value
    return found


def shard(engine, ranks):
    """Tensor-parallel shards: columns of o_proj and down_proj, rows of the embedding; norms are whole."""
    found, columns = {}, {}
    for name, tensor in engine.items():
        by_columns = ".o_proj." in name or ".down_proj." in name
        if not by_columns and "embed" not in name:
            found[name] = tensor
            continue
        for rank, piece in enumerate(tensor.tensor_split(ranks, 1 if by_columns else 0)):
            found[f"{name}@{rank}"] = piece
            if by_columns:
                columns[f"{name}@{rank}"] = tensor.shape[1]
    return digest_weights(found, columns_of=columns)


# ---- 1. equal by construction ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 8), (16, 48), (33, 24), (9,), (), (4, 2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_any_cut_has_the_digest_of_the_whole(shape, dtype):
    tensor = (100 * torch.randn(shape)).to(dtype)
    whole = digest_rows(tensor)
    assert digest_rows(tensor.t().contiguous().t() if tensor.dim() == 2 else tensor) == whole
    if not shape:
        return
    cuts = 0
    for at in range(1, shape[0]):
        assert join_digests([digest_rows(tensor[:at]), digest_rows(tensor[at:])]) == whole
        assert whole.narrow(at, shape[0]) == digest_rows(tensor[at:])
        cuts += 1
    if len(shape) == 2:
        ranks = 1
        while ranks <= parts_of(shape[1]):
            pieces = [digest_rows(p, columns_of=shape[1]) for p in tensor.chunk(ranks, 1)]
            assert join_digests(pieces, 1) == whole
            ranks, cuts = 2 * ranks, cuts + 1
    assert cuts >= 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_an_engine_has_the_trainer_s_digests(ranks):
    trainer = trainer_weights()
    engine = shard(engine_weights(trainer), ranks)
    found = compare_weights(engine, digest_weights(trainer, dtype=torch.bfloat16))
    assert found.equal
    assert found.tensors == len(trainer)
    assert found.rows == sum(t.shape[0] for t in trainer.values())


def test_columns_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ArgumentError, match="whole blocks"):
        digest_rows(torch.zeros(4, 3), columns_of=8)
    plain = [digest_rows(part) for part in torch.zeros(4, 8).chunk(2, 1)]
    with pytest.raises(ArgumentError, match="columns_of"):
        join_digests(plain, 1)
    with pytest.raises(ArgumentError, match="one dtype"):
        join_digests([digest_rows(torch.zeros(2, 2)), digest_rows(torch.zeros(2, 3))])


def test_zeros_of_either_sign_and_nans_differ():
    zero = torch.zeros(2, 4)
    assert digest_rows(zero) != digest_rows(-zero)
    nan = torch.tensor([[0x7FC00000, 0x7FC00001]], dtype=torch.int32).view(torch.float32)
    assert digest_rows(nan) != digest_rows(nan.flip(1))
    assert digest_rows(zero).digest != digest_rows(zero.t().contiguous()).digest
    rows = torch.randn(6, 4)
    assert digest_rows(rows).digest != digest_rows(rows.flip(0)).digest


# ---- 2. what differs is named ----------------------------------------------------------------------------


def flip_a_bit(weights, name):
    changed = {**weights, name: weights[name].clone()}
    changed[name].view(torch.int16).view(-1)[-1] ^= 1
    return changed


def test_one_bit_of_any_tensor_is_named():
    trainer = trainer_weights()
    sent, engine = digest_weights(trainer, dtype=torch.bfloat16), engine_weights(trainer)
    named = []
    for name in engine:
        found = compare_weights(digest_weights(flip_a_bit(engine, name)), sent)
        assert len(found.differences) == 1
        named.append(found.differences[0].name)
        assert found.differences[0].rows == 1
    assert len(set(named)) == len(engine)


def test_stale_half_written_wrong_and_missing_are_told_apart():
    old, new = trainer_weights(0), trainer_weights(1)
    sent, before = (digest_weights(w, dtype=torch.bfloat16) for w in (new, old))
    engine = engine_weights(new)
    q, gate = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
    norm = "model.layers.0.input_layernorm.weight"
    engine[q] = engine_weights(old)[q]
    engine[gate] = torch.cat([engine[gate][:60], engine_weights(old)[gate][60:]])
    engine[norm] = engine[norm] * 2
    engine["model.embed_tokens.weight"] = new["model.embed_tokens.weight"]  # not converted
    del engine["model.layers.1.mlp.down_proj.weight"]
    found = compare_weights(digest_weights(engine), sent, previous=before)
    kinds = {one.name: one.kind for one in found.differences}
    assert kinds == {
        "model.layers.1.self_attn.q_proj.weight": "stale",
        "model.layers.1.self_attn.k_proj.weight": "stale",
        "model.layers.1.self_attn.v_proj.weight": "stale",
        "model.layers.0.mlp.up_proj.weight": "half-written",
        norm: "wrong",
        "model.embed_tokens.weight": "dtype",
        "model.layers.1.mlp.down_proj.weight": "missing",
    }
    half = next(one for one in found.differences if one.kind == "half-written")
    assert half.detail == "rows 20 to 40 of 40 have the weights sent before"
    assert not found.equal


def test_parts_in_another_order_are_named():
    trainer = trainer_weights()
    engine = engine_weights(trainer)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    engine[name] = torch.cat([engine[name][40:], engine[name][:40]])
    found = compare_weights(digest_weights(engine), digest_weights(trainer, dtype=torch.bfloat16))
    assert {(d.name.split(".")[-2], d.kind) for d in found.differences} == {
        ("gate_proj", "wrong"),
        ("up_proj", "wrong"),
    }


def test_a_tied_head_is_no_difference():
    trainer = trainer_weights()
    listed = {**trainer, "lm_head.weight": trainer["model.embed_tokens.weight"]}
    assert compare_weights(digest_weights(trainer), digest_weights(listed)).equal
    listed["lm_head.weight"] = listed["lm_head.weight"] + 1
    found = compare_weights(digest_weights(trainer), digest_weights(listed))
    assert [(d.name, d.kind) for d in found.differences] == [("lm_head.weight", "missing")]


def test_nothing_in_common_is_refused():
    with pytest.raises(ArgumentError, match="in common"):
        compare_weights(digest_weights({"a": torch.ones(2)}), digest_weights({"b": torch.ones(2)}))


# ---- 3. as JSON ------------------------------------------------------------------------------------------


def test_json_is_read_back_and_checked():
    digests = shard(engine_weights(trainer_weights()), 2)
    text = digests_to_json(digests)
    assert digests_from_json(text) == digests
    some = digests["model.layers.0.input_layernorm.weight"].rows.hex()
    for changed in (
        text.replace(some[:32], "0" * 32),
        text.replace('"isobit_weight_digests": 1', '"isobit_weight_digests": 2'),
        text[:-9],
        "[]",
    ):
        with pytest.raises(ArgumentError):
            digests_from_json(changed)
