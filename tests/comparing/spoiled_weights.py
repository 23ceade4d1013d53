"""Engines with other weights than the trainer sent; each must be given the class weights and its kind."""

from dataclasses import replace

import torch
from sabotage import engine_names, model_of, other_model, score

from isobit.rollout import digest_weights


def older(model):
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_((0.02 * noise).to(parameter.dtype))


def with_engine(change, previous=True):
    """The engine computes with a spoiled copy of the weights."""

    def spoil(r, t):
        model = other_model(change)
        rollout = score(r, model)
        digests = digest_weights(engine_names(model))
        before = digest_weights(other_model(older)) if previous else None
        return replace(rollout, weights=digests), replace(t, previous=before)

    return spoil


def from_older(select):
    def change(model):
        before = dict(other_model(older).named_parameters())
        for name, parameter in model.named_parameters():
            select(name, parameter.data, before[name].data)

    return change


def only(word, rows=None):
    def select(name, now, before):
        if word in name:
            now[rows].copy_(before[rows]) if rows is not None else now.copy_(before)

    return from_older(select)


def swap_gate_and_up(model):
    layer = model.model.layers[0].mlp
    kept = layer.gate_proj.weight.data.clone()
    layer.gate_proj.weight.data.copy_(layer.up_proj.weight.data)
    layer.up_proj.weight.data.copy_(kept)


def one_bit(model):
    model.model.layers[0].mlp.down_proj.weight.data.view(torch.int16)[3, 5] ^= 64


def rounded_on_the_way(model):
    """One matrix went through fp8."""
    weight = model.model.layers[1].self_attn.o_proj.weight.data
    weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))


def a_tensor_missing(r, t):
    weights = {k: v for k, v in r.weights.items() if "layers.1.mlp.down_proj" not in k}
    return replace(r, weights=weights), t


def another_dtype(r, t):
    return replace(r, weights=digest_weights(engine_names(model_of()), dtype=torch.float16)), t
