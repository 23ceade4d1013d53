"""Families and forms of models that `isobit.enable` does not know: refused by name, and audited all the same."""

import pytest
import torch
import transformers

import isobit
from isobit.errors import UnsupportedError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "Cohere": {"pad_token_id": 0},
    "GraniteMoe": {"num_local_experts": 4},
}


def build(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_enable_refuses_it_and_an_audit_judges_it(family):
    model = build(family)
    with pytest.raises(UnsupportedError, match=family):
        isobit.enable(model)
    ids = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    report = isobit.audit(model, {"input_ids": ids}, vary=("batch", "repeat"))
    assert report.exit_code in (0, 1)
    assert all(axis.judged for axis in report.axes)
    assert not any(one.is_error for one in report.guilty)


EVERY_AXIS = ("batch", "padding", "packing", "decode", "chunks")
STOCK = {  # a window of 8 keys where sequences have 21 tokens
    "Mistral": {"sliding_window": 8},
    "Gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
NAMES = {"Gemma3": "Gemma3Text"}  # of configs, where they are not those of models
LINEAR = {
    **STOCK["Qwen3Moe"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def stock_model(family, more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{NAMES.get(family, family)}Config")(**SIZES, **HEADS, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return model, {"input_ids": torch.randint(0, 64, (3, 21))}


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.sweep(2)
def test_an_audit_of_a_stock_model_is_complete_on_every_axis(family):
    """Also where a cache drops the keys before its window."""
    report = isobit.audit(*stock_model(family, STOCK[family]), vary=EVERY_AXIS)
    assert {axis.axis: axis.why_not for axis in report.axes} == dict.fromkeys(EVERY_AXIS, "")
    assert report.unjudged == ()
    assert {one.is_error for one in report.guilty} == {False}


def test_a_cache_that_keeps_the_wrong_keys_of_a_window_is_not_called_complete(monkeypatch):
    """As many keys as the window has, but the first ones in place of the last."""
    layer = transformers.cache_utils.DynamicSlidingWindowLayer
    update = layer.update

    def keep_the_first(self, *given, **named):
        seen = update(self, *given, **named)
        self.keys, self.values = (one[:, :, : self.sliding_window - 1] for one in seen)
        return seen

    monkeypatch.setattr(layer, "update", keep_the_first)
    report = isobit.audit(*stock_model("Mistral", STOCK["Mistral"]), vary=("decode",))
    assert not report.complete
    assert report.exit_code != 0


def test_linear_attention_is_judged_by_batch_and_not_accused_elsewhere():
    """Its running totals hold the decays of padding, which cancel; rows of its chunks are not those of the variant."""
    report = isobit.audit(*stock_model("Qwen3Next", LINEAR), vary=("batch", "padding"))
    batch, padding = report.axes
    assert (batch.complete, batch.judged > 100, batch.unjudged) == (True, True, ())
    assert (padding.complete, "adds along positions" in str(padding.unjudged)) == (False, True)
    assert {one.is_error for one in report.guilty} == {False}
    assert report.exit_code != 0


class Int8Linear(torch.nn.Module):
    """A layer with weights of 8 bits and a scale per row, as weight-only quantisers make them."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def test_a_quantised_model_is_refused_and_audited():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Int8Linear(layer.self_attn.q_proj)
    with pytest.raises(UnsupportedError, match="Int8Linear"):
        isobit.enable(model)
    ids = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    report = isobit.audit(model, {"input_ids": ids}, vary=("batch", "decode"))
    assert report.complete
    assert not any(one.is_error for one in report.guilty)
