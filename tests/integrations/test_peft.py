"""PEFT's adapters are refused by name, in either order of calls, and the remedy that is named works."""

import peft
import pytest
import torch

import isobit
from isobit.errors import UnsupportedError
from isobit.gates.model.models import build_model

IDS = torch.arange(24).reshape(2, 12) % 128
REMEDY = r"merge_and_unload\(\).*isobit\.enable"


def wrap(model, *targets):
    torch.manual_seed(0)
    asked = peft.LoraConfig(
        r=4, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, asked)


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("gate_proj",), ("o_proj",), ("lm_head",)], ids=str
)
@pytest.mark.parametrize("warm", [False, True])
def test_an_adapter_on_an_enabled_model_is_refused_until_it_is_merged(targets, warm):
    model, twin = (build_model("llama-tiny", torch.float32) for _ in range(2))
    base = twin(IDS).logits.detach()
    wanted = wrap(twin, *targets).eval()(IDS).logits.detach()
    assert (wanted - base).abs().max() > 1e-3
    isobit.enable(model)
    if warm:
        model(IDS)
    wrapped = wrap(model, *targets).eval()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"(?s)PEFT adapter.*{targets[0]}.*{REMEDY}"):
            wrapped(IDS)
        with pytest.raises(UnsupportedError, match=f"(?s)PEFT.*{REMEDY}"):
            isobit.logprobs(wrapped, IDS)
        with pytest.raises(UnsupportedError, match=f"(?s)PEFT adapter.*{REMEDY}"):
            isobit.logprobs(model, IDS)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_model_with_adapters_is_not_enabled_and_the_remedy_works():
    model = build_model("qwen3-tiny", torch.float32)
    wrapped = wrap(model, "q_proj", "down_proj").eval()
    wanted = wrapped(IDS).logits.detach()
    for refused in (wrapped, wrapped.base_model.model):
        with pytest.raises(UnsupportedError, match=f"(?s)PEFT.*{REMEDY}"):
            isobit.enable(refused)
    model = wrapped.merge_and_unload()
    with isobit.enabled(model):
        torch.testing.assert_close(model(IDS).logits, wanted, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_transformers_adds_is_refused():
    model = build_model("qwen3-tiny", torch.float32)
    isobit.enable(model)
    model(IDS)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["v_proj"]))
    with pytest.raises(UnsupportedError, match=f"(?s)PEFT adapter.*v_proj.*{REMEDY}"):
        model(IDS)
