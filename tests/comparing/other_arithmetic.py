"""Trainers with the same weights and semantics and another arithmetic: each must be given the class numerics."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from sabotage import model_of, other_model, score

import isobit
from isobit.integrations.transformers.parts import composites, layers, linear


def with_trainer(make):
    """The trainer computes the same function of the same weights in another way."""

    def spoil(r, t):
        with make() as (model, logits_of):
            return r, replace(score(r, model, logits_of), weights=t.weights)

    return spoil


@contextmanager
def stock_model():
    yield isobit.disable(copy.deepcopy(model_of())), None


@contextmanager
def stock_in_fp32():
    yield isobit.disable(copy.deepcopy(model_of())).float(), None


@contextmanager
def another_rotary_table():
    """Frequencies rounded to bf16, as where a table is made in the model's dtype."""

    def change(model):
        table = model.model.rotary_emb.inv_freq
        table.copy_(table.bfloat16())

    yield other_model(change), None


@contextmanager
def stock_head():
    """The last product by stock torch, rounded to bf16."""

    def logits_of(model, ids):
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
        return F.linear(hidden, model.lm_head.weight)

    yield None, logits_of


@contextmanager
def logits_rounded():
    yield None, lambda model, ids: model(ids, use_cache=False).logits.bfloat16()


@contextmanager
def patched(part, **functions):
    """Replace operators that an enabled model's parts call."""
    with mock.patch.multiple(part, **functions):
        yield isobit.enable(isobit.disable(copy.deepcopy(model_of())), strict=False), None


def product_in_two_halves():
    """Each product is the sum of two that are rounded, as split-K kernels and row-parallel layers compute it."""

    def halves(x, weight, bias, samples, packed):
        middle = x.shape[-1] // 2
        return F.linear(x[..., :middle], weight[:, :middle]) + F.linear(
            x[..., middle:], weight[:, middle:], bias
        )

    return patched(linear, linear_with_packed=halves)


def stock_silu_left_in():
    return patched(linear, swiglu=lambda gate, up: F.silu(gate) * up)


def stock_norm_left_in():
    def norm(x, weight, *given, **named):
        mine = isobit.rms_norm(x, weight, *given, **named)
        wide = x.float()
        stock = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )
        return mine if mine.shape != stock.shape else stock

    return patched(layers, rms_norm=norm)


def residual_not_rounded():
    """The norm takes the sum of the residual stream before it is rounded, as fused kernels do."""

    def layer(module, hidden_states, **inputs):
        mixed, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **inputs)
        total, exact = hidden_states + mixed, hidden_states.float() + mixed.float()
        norm = module.post_attention_layernorm
        rows = isobit.rms_norm(exact, norm.weight.float(), norm.variance_epsilon).to(total.dtype)
        return total + module.mlp(rows)

    rebound = composites.rebound

    def planted(kind):
        return layer if kind.__name__.endswith("DecoderLayer") else rebound(kind)

    return patched(composites, rebound=planted)


def another_epsilon():
    def change(model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5

    @contextmanager
    def changed():
        yield other_model(change), None

    return changed()


ARITHMETIC = [
    stock_model,
    stock_in_fp32,
    another_rotary_table,
    stock_head,
    logits_rounded,
    product_in_two_halves,
    stock_silu_left_in,
    stock_norm_left_in,
    residual_not_rounded,
    another_epsilon,
]
