"""Masks and soft caps: what transformers builds a mask of is read; what is not computed is named."""

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
    chunks = masking_utils.chunked_causal_mask_function(8, torch.zeros(1))
    assert read_mask(mask_function=chunks) == Seen(None, True, 8)
    both = masking_utils.bidirectional_mask_function
    assert read_mask(mask_function=both) == Seen(None, False)
    near = masking_utils.sliding_window_bidirectional_mask_function(4)  # up to this distance
    assert read_mask(mask_function=near) == Seen(5, False)


def everything(b, h, q, k):
    return q >= 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (lambda m: m.chunked_overlay(8, torch.zeros(1)), "not causal"),
        (
            lambda m: m.and_masks(
                m.causal_mask_function, m.sliding_window_bidirectional_overlay(4)
            ),
            "a causal mask with a window of both sides",
        ),
        (lambda m: m.or_masks(m.causal_mask_function, everything), "union of masks.*everything"),
        (lambda m: m.and_masks(m.causal_mask_function, everything), "everything"),
        (lambda m: m.sliding_window_overlay(4), "not causal"),
    ],
    ids=["chunks alone", "mixed windows", "prefix", "other", "window alone"],
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


def capped_model(**more):
    caps = {
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.25,
        "initializer_range": 0.2,
    }
    torch.manual_seed(3)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **{**SIZES, **caps, **more}, query_pre_attn_scalar=16, pad_token_id=0
        )
    ).eval()


@torch.no_grad()
def test_soft_caps_are_read_at_every_call():
    model = capped_model()
    stock = model(IDS).logits
    model.config.final_logit_softcapping = None
    uncapped = model(IDS).logits
    isobit.enable(model)
    assert torch.allclose(model(IDS).logits, uncapped, atol=1e-5)
    model.config.final_logit_softcapping = 0.25
    capped = model(IDS).logits
    assert torch.allclose(capped, stock, atol=1e-5)
    assert not torch.allclose(capped, uncapped, atol=1e-3)
    scores = isobit.logprobs(model, IDS)[:, :-1]
    every = isobit.log_softmax(capped)[:, :-1].gather(2, IDS[:, 1:, None]).squeeze(2)
    assert bits.equal(scores, every)
    model.config.final_logit_softcapping = -1.0
    with pytest.raises(isobit.ArgumentError, match=r"softcap=-1\.0"):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("forgotten", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_cap_that_is_forgotten_is_another_function(forgotten):
    model = capped_model()
    with isobit.enabled(model):
        right = isobit.logprobs(model, IDS)
    wrong = capped_model(**{forgotten: None})
    with isobit.enabled(wrong):
        assert (isobit.logprobs(wrong, IDS) - right).abs().max() > 1e-4


def test_the_gradient_of_capped_logits_is_that_of_fp64():
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(0, 30, (7,))
    found = isobit.linear_logprob(hidden, weight, targets, softcap=3.0, temperature=0.7)
    found.sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = 3.0 * torch.tanh(exact[0] @ exact[1].t() / 3.0) / 0.7
    known = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    known.sum().backward()
    assert torch.allclose(found.double(), known, atol=2e-6)
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, atol=1e-5)
    alone = isobit.linear_logprob(hidden[2:3], weight, targets[2:3], softcap=3.0, temperature=0.7)
    assert bits.equal(alone.detach(), found[2:3].detach())


def encoder(kind=transformers.ModernBertForMaskedLM, **more):
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    config = transformers.ModernBertConfig(
        **sizes, local_attention=4, pad_token_id=0, cls_token_id=1, sep_token_id=1, **more
    )
    return kind(config).eval()


@torch.no_grad()
def test_what_an_encoder_does_not_compute_is_named():
    model = isobit.enable(encoder())
    for more in ({"use_cache": True}, {"past_key_values": transformers.DynamicCache()}):
        with pytest.raises(UnsupportedError, match="no cache for ModernBertModel"):
            model(IDS, **more)
    model.sparse_prediction = True
    model(IDS)
    with pytest.raises(UnsupportedError, match="sparse_prediction=True"):
        model(IDS, labels=IDS)
    scores = encoder(transformers.ModernBertForSequenceClassification, classifier_pooling="mean")
    with pytest.raises(UnsupportedError, match="classifier_pooling='mean'"):
        isobit.enable(scores)(IDS)
    with pytest.raises(isobit.ArgumentError, match="language-model head"):
        isobit.logprobs(isobit.enable(encoder()), IDS)


@torch.no_grad()
def test_scores_of_every_token_of_an_encoder_do_not_depend_on_padding():
    model = isobit.enable(encoder(transformers.ModernBertForTokenClassification, num_labels=3))
    wide = torch.cat([torch.zeros(2, 5, dtype=IDS.dtype), IDS], 1)
    padded = model(wide, attention_mask=(wide > 0).long()).logits[:, 5:]
    assert bits.equal(padded.contiguous(), model(IDS).logits)


@torch.no_grad()
def test_a_window_of_both_sides_is_seen_and_no_more():
    """Two layers of which each sees two tokens of either side: a token four places away is seen, one at five is not."""
    model = encoder(layer_types=["sliding_attention", "sliding_attention"])
    for enabled in (False, True):
        if enabled:
            isobit.enable(model)
        before = model(IDS).logits
        for distance, seen in ((4, True), (5, False)):
            changed = IDS.clone()
            changed[:, 2 + distance] = 63
            assert bits.equal(model(changed).logits[:, 2], before[:, 2]) is not seen


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
