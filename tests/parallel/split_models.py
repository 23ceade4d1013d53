"""A small Qwen3 that can be split over 4 ranks, its batch, and the comparison with one rank."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import isobit
from isobit import bits
from isobit.gates.model.models import spread_weights
from isobit.integrations.transformers.tensor_parallel import shard
from isobit.parallel.tensor.shard import shard_table, take_shard

logging.set_verbosity_error()
# What ranks cut is 1024 or more: the features of attention, those between gate and down, and the vocabulary.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
}
LENGTHS = (9, 4, 6, 7)


def build(dtype, tied=False, seed=0):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).to(dtype)
    spread_weights(model, seed)
    return model


def batch():
    make = torch.Generator().manual_seed(5)
    ids = torch.randint(0, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)), generator=make)
    mask = torch.tensor([[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS])
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def measure(model):
    """Loss, log-probabilities, logits and gradients."""
    inputs = batch()
    with torch.no_grad():
        found = {"logprobs": isobit.logprobs(model, **inputs), "logits": model(**inputs).logits}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    return {
        **found,
        "loss": loss.detach(),
        **{name: p.grad for name, p in model.named_parameters()},
    }


def differing(ranks, dtype, tied, expected):
    """What a split model has other bits of than the whole one."""
    model = build(dtype, tied)
    isobit.enable(model)
    shard(model, ranks)
    shards, found = shard_table(model), measure(model)
    assert found.keys() == expected.keys()
    assert len(shards) == 2 * 7 + 2
    return [
        name
        for name, value in found.items()
        if not bits.equal(
            value, take_shard(expected[name], shards[name]) if name in shards else expected[name]
        )
    ]
