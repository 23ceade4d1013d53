"""A whole Qwen3, forward and backward, on the Triton executors for sm_90: in fp32 the CPU's bits.

In bf16 it has the bits of the portable executors over the tensor core's arithmetic (tensor_core_oracle.py).
Interpreted in `./check`; by compiled code in the PTX machine, which takes minutes, in `./check --full`.
"""

import pytest
import torch
from tensor_core_oracle import tensor_core_order
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import isobit
from isobit import bits

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}


def make_model(sizes, dtype=torch.float32):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(**sizes, **heads, max_position_embeddings=64, tie_word_embeddings=False)
    return isobit.enable(Qwen3ForCausalLM(config).to(dtype))


def train(model, ids):
    """Return the log-probabilities of a batch, and the gradients of all parameters."""
    model.zero_grad()
    found = isobit.logprobs(model, ids)
    found.backward(torch.ones_like(found))
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "sizes", "tokens"),
    [
        ("interpreter", TINY, 4),
        pytest.param("machine", TINY, 4, marks=pytest.mark.full),
        pytest.param("machine", SMALL, 11, marks=pytest.mark.full),
    ],
)
def test_a_model_trains_with_the_bits_of_the_cpu(kind, sizes, tokens):
    model = make_model(sizes)
    ids = torch.randint(0, sizes["vocab_size"], (3, tokens))
    expected, gradients = train(model, ids)
    with isobit.certifying.executing(kind, target="sm_90"):
        found, compiled = train(model, ids)
        alone, _ = train(model, ids[2:])
    assert bits.equal(found, expected)
    assert len(compiled) == 3 + 11 * sizes["num_hidden_layers"]
    assert [name for name in gradients if not bits.equal(compiled[name], gradients[name])] == []
    assert bits.equal(alone, found[2:])


@pytest.mark.parametrize(
    ("kind", "sizes", "tokens"),
    [
        ("interpreter", TINY, 4),
        pytest.param("machine", SMALL, 11, marks=pytest.mark.full),
    ],
)
def test_a_model_in_bf16_trains_in_the_order_of_the_tensor_core(kind, sizes, tokens):
    model = make_model(sizes, torch.bfloat16)
    ids = torch.randint(0, sizes["vocab_size"], (3, tokens))
    with tensor_core_order("tc25x16"):
        expected, gradients = train(model, ids)
    with isobit.certifying.executing(kind, target="sm_90"):
        found, compiled = train(model, ids)
        with torch.no_grad():  # all of them by compiled code, one by the interpreter
            places = range(3 if kind == "machine" else 1)
            alone = {at: isobit.logprobs(model, ids[at : at + 1]) for at in places}
    assert bits.equal(found, expected)
    assert len(compiled) == 3 + 11 * sizes["num_hidden_layers"]
    assert [name for name in gradients if not bits.equal(compiled[name], gradients[name])] == []
    assert all(bits.equal(one, found[at : at + 1]) for at, one in alone.items())


def test_another_tensor_core_is_seen():
    """The comparison in bf16 can fail: Ampere's arithmetic gives other gradients, and so does that of the CPU."""
    model = make_model(SMALL, torch.bfloat16)
    ids = torch.randint(0, SMALL["vocab_size"], (3, 11))
    found = []
    for engine in ("tc25x16", "tc24x8"):
        with tensor_core_order(engine):
            found.append(train(model, ids))
    found.append(train(model, ids))
    for scores, gradients in found[1:]:
        assert not bits.equal(scores, found[0][0])
        same = [name for name, own in gradients.items() if bits.equal(own, found[0][1][name])]
        assert len(same) < len(gradients) / 2


def test_a_wrong_kernel_is_seen(monkeypatch):
    """The comparison above can fail."""
    from isobit.ops.rms_norm import triton

    model = make_model(TINY)
    ids = torch.randint(0, TINY["vocab_size"], (1, 4))
    run = triton.run

    def wrong(kernel, grid, x, *args, **options):
        run(kernel, grid, x + 2**-20, *args, **options)

    with torch.no_grad():
        expected = isobit.logprobs(model, ids)
        monkeypatch.setattr(triton, "run", wrong)
        with isobit.certifying.executing("interpreter", target="sm_90"):
            assert not bits.equal(isobit.logprobs(model, ids), expected)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention"],
    "shared_expert_intermediate_size": 6,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixture", "mixture and linear attention"])
def test_a_mixture_trains_with_the_bits_of_the_cpu(name):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes = {**TINY, "hidden_size": 16, "tie_word_embeddings": False, **heads, **EXPERTS}
    if name == "mixture":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **LINEAR_ATTENTION))
    model, ids = isobit.enable(model), torch.randint(0, 40, (2, 3))
    expected, gradients = train(model, ids)
    with isobit.certifying.executing("interpreter", target="sm_90"):
        found, interpreted = train(model, ids)
    assert bits.equal(found, expected)
    assert len(gradients) >= 14
    assert [name for name in gradients if not bits.equal(interpreted[name], gradients[name])] == []
