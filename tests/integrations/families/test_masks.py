"""Masks are read from what transformers builds them of: causal and windows are computed, all others are named."""

import copy

import pytest
import torch
import transformers
from transformers import masking_utils

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.integrations.transformers.parts.masks import Seen, read_mask

IDS = torch.arange(24).reshape(2, 12) % 60 + 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_masks_that_are_computed():
    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_causal_mask_function(7)
    assert read_mask(mask_function=causal) == Seen(None)
    assert read_mask(mask_function=window) == Seen(7)
    rows = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4))
    assert read_mask(mask_function=masking_utils.and_masks(window, rows)) == Seen(7)


def everything(b, h, q, k):
    return q >= 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (
            lambda m: m.and_masks(m.causal_mask_function, m.chunked_overlay(8, torch.zeros(1))),
            "chunks of 8",
        ),
        (lambda m: m.or_masks(m.causal_mask_function, everything), "union of masks.*everything"),
        (lambda m: m.and_masks(m.causal_mask_function, everything), "everything"),
        (lambda m: m.bidirectional_mask_function, "bidirectional_mask_function"),
        (lambda m: m.sliding_window_overlay(4), "not causal"),
    ],
    ids=["chunks", "prefix", "other", "both sides", "window alone"],
)
def test_other_masks_are_named(mask, said):
    with pytest.raises(UnsupportedError, match=f"(?s)causal mask.*{said}"):
        read_mask(mask_function=mask(masking_utils))


def test_a_name_does_not_make_a_mask():
    """A function that is called like transformers' own is another one."""

    def inner_mask(b, h, q, k):
        return k > q - 3

    inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    inner_mask.__module__ = masking_utils.__name__
    both = masking_utils.and_masks(masking_utils.causal_mask_function, inner_mask)
    with pytest.raises(UnsupportedError, match="the mask"):
        read_mask(mask_function=both)


def test_attention_from_both_sides_of_a_config_is_named():
    config = transformers.Gemma3TextConfig(
        **SIZES, use_bidirectional_attention=True, query_pre_attn_scalar=16, pad_token_id=0
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    isobit.enable(model)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"(?s)union of masks|is_causal"):
        model(IDS)


def test_a_window_that_mask_and_module_do_not_share_is_named():
    config = transformers.MistralConfig(**SIZES, sliding_window=8, pad_token_id=0)
    model = transformers.MistralForCausalLM(config).eval()
    isobit.enable(model)
    with torch.no_grad():
        model(IDS)
        model.model.layers[1].self_attn.config = copy.deepcopy(config)
        model.model.layers[1].self_attn.config.sliding_window = 4
        isobit.disable(model)
        isobit.enable(model)
        with pytest.raises(UnsupportedError, match=r"(?s)one window.*of 8.*sliding_window=4"):
            model(IDS)


def test_a_soft_cap_of_the_head_is_named():
    config = transformers.Gemma3TextConfig(
        **SIZES, final_logit_softcapping=30.0, query_pre_attn_scalar=16, pad_token_id=0
    )
    with pytest.raises(UnsupportedError, match=r"final_logit_softcapping=30\.0"):
        isobit.enable(transformers.Gemma3ForCausalLM(config))
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16, pad_token_id=0)
    ).eval()
    isobit.enable(model)
    model(IDS)
    model.config.final_logit_softcapping = 30.0  # read at every call
    with pytest.raises(UnsupportedError, match=r"final_logit_softcapping=30\.0"):
        model(IDS)


def test_an_embedding_of_an_embedding_that_is_another_is_named():
    """Its source is that of a scaled embedding, but what it scales is computed by another class."""
    config = transformers.GemmaConfig(**SIZES, pad_token_id=0)
    model = transformers.GemmaForCausalLM(config).eval()
    kind = type(model.model.embed_tokens)

    class Doubled(torch.nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    model.model.embed_tokens.__class__ = type("Scaled", (kind, Doubled), {})
    with pytest.raises(UnsupportedError, match=r"embed_tokens of type .*Scaled"):
        isobit.enable(model)


def test_a_soft_cap_of_attention_is_named():
    config = transformers.Gemma2Config(**SIZES, pad_token_id=0, final_logit_softcapping=None)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with pytest.raises(UnsupportedError, match="softcap"):
        isobit.enable(model)(IDS)


def test_dropout_inside_a_composite_is_named_in_training():
    config = transformers.Starcoder2Config(
        **SIZES, residual_dropout=0.1, embedding_dropout=0.0, pad_token_id=0
    )
    for strict in (True, False):
        model = transformers.Starcoder2ForCausalLM(config).eval()
        isobit.enable(model, strict=strict)
        model(IDS)
        model.train()
        with pytest.raises(UnsupportedError, match=r"residual_dropout of 0\.1 in training"):
            model(IDS)


def test_dropout_modules_of_a_layer_are_keyed():
    """Phi-3 has them as modules; a sample has the same masks alone, padded and packed, and in another step others."""
    config = transformers.Phi3Config(
        **SIZES, resid_pdrop=0.2, embd_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = isobit.enable(transformers.Phi3ForCausalLM(config)).train()
    ids = torch.arange(2, 14)[None]
    wide = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], 1)
    with pytest.raises(UnsupportedError, match=r"(?s)dropout of 0\.2 in training.*dropout_key"):
        model(ids)
    with isobit.sampling.dropout_key(seed=1, step=0):
        alone = model(ids, use_cache=False).logits
        left = model(wide, attention_mask=(wide > 0).long(), use_cache=False).logits[:, 3:]
        after = isobit.sampling.dropout_key(seed=1, step=0, first=1)
        both, places = torch.cat([ids, ids], 1), torch.arange(12).repeat(2)[None]
        first, second = model(both, position_ids=places, use_cache=False).logits.split(12, 1)
        with after:
            later = model(ids, use_cache=False).logits
    assert bits.equal(left.contiguous(), alone)
    assert bits.equal(first.contiguous(), alone)
    assert bits.equal(second.contiguous(), later)
    assert not bits.equal(later, alone)
    with isobit.sampling.dropout_key(seed=1, step=1):
        assert not bits.equal(model(ids, use_cache=False).logits, alone)
