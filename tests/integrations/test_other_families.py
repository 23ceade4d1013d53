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
