"""Layers of the gated delta rule in an enabled model: caches that are cropped, reordered, trained through or foreign.

test_families.py compares every layout; here is what only a state that is carried can get wrong.
"""

import pytest
import torch
from transformers import DynamicCache

import isobit
from benchmarks.families import build, samples_of
from isobit import UnsupportedError, bits


@pytest.fixture(scope="module")
def model():
    return isobit.enable(build("qwen3_5_text", torch.float32))


@torch.no_grad()
def logits(model, ids, cache=None):
    return model(ids, past_key_values=cache, use_cache=cache is not None).logits


def test_stock_decodes_other_bits_than_it_prefills(model):
    """The control: the same comparison without isobit finds differences."""
    ids = samples_of()[1]
    isobit.disable(model)
    try:
        cache = DynamicCache(config=model.config)
        steps = [logits(model, ids[:, at : at + 1], cache) for at in range(12)]
        differ = (torch.cat(steps, 1) != logits(model, ids[:, :12])).sum()
    finally:
        isobit.enable(model)
    assert differ > 12


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been(model):
    ids = samples_of()[1][:, :20]
    whole, cache = logits(model, ids), DynamicCache(config=model.config)
    logits(model, ids[:, :9], cache)
    logits(model, ids[:, 2:7], cache)
    cache.crop(-5)
    assert bits.equal(logits(model, ids[:, 9:], cache), whole[:, 9:])
    cache.crop(-1)
    assert bits.equal(logits(model, ids[:, 19:], cache), whole[:, 19:])
    with pytest.raises(UnsupportedError, match="at most the 20 tokens of the open chunk"):
        cache.crop(-21)


def test_beams_are_reordered_and_repeated(model):
    ids = torch.cat((samples_of()[1][:, :8], samples_of()[3][:, :8]))
    whole, cache = logits(model, ids), DynamicCache(config=model.config)
    logits(model, ids[:, :6], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert bits.equal(logits(model, ids[[1, 0], 6:7], cache), whole[[1, 0], 6:7])
    cache.batch_repeat_interleave(2)
    assert bits.equal(logits(model, ids[[1, 1, 0, 0], 7:], cache), whole[[1, 1, 0, 0], 7:])


def test_a_cache_that_training_fills_changes_no_gradient(model):
    ids = samples_of()[2]
    found = []
    for used in (True, False):
        model.zero_grad(set_to_none=True)
        output = model(ids, labels=ids, use_cache=used)
        output.loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(bits.equal(a, b) for a, b in zip(*found, strict=True))
    model.zero_grad(set_to_none=True)


def test_a_cache_of_stock_and_one_without_layers_are_errors_that_name_the_layer(model):
    ids = samples_of()[2]
    with pytest.raises(
        UnsupportedError, match=r"as layer 0(?s:.*)DynamicCache\(config=model.config\)"
    ):
        logits(model, ids, DynamicCache())
    isobit.disable(model)
    cache = DynamicCache(config=model.config)
    try:
        logits(model, ids[:, :4], cache)
    finally:
        isobit.enable(model)
    with pytest.raises(UnsupportedError, match="with LinearAttentionLayer as layer 0"):
        logits(model, ids[:, 4:], cache)


def test_hooks_of_projections_run_and_one_on_the_convolution_is_an_error(model):
    ids, seen = samples_of()[2], []
    layer = model.model.layers[0].linear_attn
    handle = layer.in_proj_z.register_forward_hook(lambda *_: seen.append(1))
    logits(model, ids)
    handle.remove()
    assert seen == [1]
    handle = layer.conv1d.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match="conv1d"):
            logits(model, ids)
    finally:
        handle.remove()


def test_another_activation_or_a_bias_of_the_convolution_is_refused_by_name():
    model = build("qwen3_5_text", torch.float32)
    layer = model.model.layers[0].linear_attn
    layer.activation = "gelu"
    with pytest.raises(UnsupportedError, match="without bias, then silu"):
        isobit.enable(model)
