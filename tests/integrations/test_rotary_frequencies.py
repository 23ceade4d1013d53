"""A model whose rotary frequencies were rounded is named, once; one that was loaded in its dtype is not."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import isobit
from isobit.errors import RotaryWarning
from isobit.rollout import digest_weights

SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[1, 2, 3]])


def build(config=Qwen3Config, dtype=torch.bfloat16):
    more = {"head_dim": 16} if config is Qwen3Config else {}
    return AutoModelForCausalLM.from_config(config(**SIZES, **more), dtype=dtype).eval()


@contextmanager
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("config", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_enable_names_rounded_frequencies_once(config, dtype):
    model = build(config, torch.float32).to(dtype)
    named = r"model\.model\.rotary_emb\.inv_freq is b?float16, expected float32"
    with pytest.warns(RotaryWarning, match=named) as said:
        isobit.enable(model)
    assert len(said) == 1
    with silent(), torch.no_grad():
        isobit.enable(model)
        if dtype == torch.bfloat16:
            model(IDS)


def test_models_in_their_dtype_are_silent():
    with silent(), torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            isobit.enable(build(dtype=dtype))(IDS)
            digest_weights(build(dtype=dtype))


def test_a_model_that_is_cast_after_it_was_enabled_is_named_when_it_is_called():
    model = isobit.enable(build(dtype=torch.float32))
    with torch.no_grad():
        model(IDS)
        model.to(torch.bfloat16)
        with pytest.warns(RotaryWarning, match=r"rotary_emb\.inv_freq is bfloat16"):
            model(IDS)


def test_with_enabled_and_digests_of_weights_name_them():
    for use in (lambda model: isobit.enabled(model).__enter__(), digest_weights):
        with pytest.warns(RotaryWarning, match="inv_freq is bfloat16"):
            use(build(dtype=torch.float32).to(torch.bfloat16))


def test_the_remedy_works():
    model, loaded = build(dtype=torch.float32).to(torch.bfloat16), build()
    with pytest.warns(RotaryWarning) as said:
        digest_weights(model)
    remedy = str(said[0].message).rpartition(": ")[2]
    exec(remedy, {"model": model})
    assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    with silent():
        isobit.enable(model)


def test_frequencies_of_each_kind_of_layer_are_looked_at():
    """Models with windows may have a table for each kind of layer, each with frequencies of its own name."""
    from benchmarks.families import build

    model = build("gemma3_text", torch.bfloat16)  # in fp32, as from_pretrained makes them
    with warnings.catch_warnings():
        warnings.simplefilter("error", RotaryWarning)
        isobit.enable(model)
    isobit.disable(model)
    with pytest.warns(RotaryWarning, match=r"rotary_emb\.\w+_attention_inv_freq is bfloat16"):
        isobit.enable(model.to(torch.bfloat16))
