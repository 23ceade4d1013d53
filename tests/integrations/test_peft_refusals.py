"""What isobit does not compute of PEFT raises an error that names it, before and after enable; the remedy works."""

import peft
import pytest
import torch
from peft_cases import SAMPLES, adapted, plain
from torch import nn

import isobit
from isobit import UnsupportedError


def wrap(model, config):
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


def lora(**asked):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": ["q_proj"], **asked})


CONFIGS = {
    "DoraLinearVariant": lambda: lora(use_dora=True),
    "ALoraLinearVariant": lambda: lora(alora_invocation_tokens=[5]),
    "target_parameters": lambda: lora(
        target_modules=[], target_parameters=["self_attn.q_proj.weight"]
    ),
    "LoRA of an embedding": lambda: lora(target_modules=["embed_tokens"]),
    "LoRA on lm_head": lambda: lora(target_modules=["lm_head"]),
    "peft.tuners.ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]
    ),
    "peft.tuners.loha": lambda: peft.LoHaConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["k_proj"]
    ),
    "TrainableTokensWrapper": lambda: lora(trainable_token_indices=[1, 2]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_other_adapters_are_named_before_and_after_enable(name):
    model = wrap(plain(), CONFIGS[name]())
    with pytest.raises(UnsupportedError, match=f"(?s)expected .*{name}.*remedy") as error:
        isobit.enable(model)
    assert "_isobit_state" not in vars(model.get_base_model())
    assert any(word in error.value.remedy for word in ("merge_and_unload", "target_modules"))
    later = isobit.enable(plain())
    with torch.no_grad():
        later(SAMPLES[0])
    wrapped = wrap(later, CONFIGS[name]())
    with pytest.raises(UnsupportedError, match=f"(?s){name}|put there later"):
        wrapped(SAMPLES[0])
    isobit.disable(later)
    with pytest.raises(UnsupportedError, match=name):
        isobit.enable(wrapped)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["DoraLinearVariant", "target_parameters", "peft.tuners.loha"])
def test_merge_and_unload_is_a_remedy_that_works(name):
    model = wrap(plain(), CONFIGS[name]())
    with torch.no_grad():
        expected = model(SAMPLES[1]).logits
        merged = isobit.enable(model.merge_and_unload())
        torch.testing.assert_close(merged(SAMPLES[1]).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_quantised_base_is_named():
    class Int8Linear(nn.Linear):
        """What a quantised layer looks like: a subclass with a forward of its own."""

    model = adapted(target_modules=["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.base_layer.__class__ = Int8Linear
    with pytest.raises(UnsupportedError, match=r"(?s)Int8Linear \(QLoRA.*without quantisation"):
        isobit.enable(model)


def test_fan_in_fan_out_is_named():
    model = adapted(target_modules=["q_proj"])
    model.get_base_model().model.layers[0].self_attn.q_proj.fan_in_fan_out = True
    with pytest.raises(UnsupportedError, match="fan_in_fan_out"):
        isobit.enable(model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompt_learning_is_named(kind):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = wrap(plain(), config)
    with pytest.raises(UnsupportedError, match=r"(?s)prompt learning: .*inputs_embeds"):
        isobit.enable(model)
    later = wrap(isobit.enable(plain()), config)
    with pytest.raises(UnsupportedError, match="prompt learning"):
        isobit.logprobs(later, SAMPLES[0])


def test_adapters_per_row_are_named():
    model = isobit.enable(adapted())
    names = ["default", "__base__"]
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"(?s)adapter_names.*set_adapter"):
        model(input_ids=SAMPLES[0].repeat(2, 1), adapter_names=names)


def test_a_variant_that_is_added_after_enable_is_named():
    model = isobit.enable(adapted())
    with torch.no_grad():
        model(SAMPLES[0])
    model.add_adapter("dora", lora(use_dora=True))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="DoraLinearVariant"):
        model(SAMPLES[0])
    model.delete_adapter("dora")
    with torch.no_grad():
        model(SAMPLES[0])


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter"])
def test_lora_that_is_added_after_enable_asks_for_enable_again_which_works(how):
    model = isobit.enable(plain().eval())
    with torch.no_grad():
        model(SAMPLES[0])
    if how == "add_adapter":
        model.add_adapter(lora())
        outer = model
    else:
        outer = wrap(model, lora())
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"(?s)q_proj.*isobit\.enable"):
        outer(SAMPLES[0])
    isobit.enable(isobit.disable(outer))
    with torch.no_grad():
        outer(SAMPLES[0])


def test_an_adapter_that_is_unloaded_after_enable_asks_for_enable_again_which_works():
    model = isobit.enable(adapted())
    with torch.no_grad():
        model(SAMPLES[0])
    merged = model.merge_and_unload()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"isobit\.enable"):
        merged(SAMPLES[0])
    isobit.enable(isobit.disable(merged))
    with torch.no_grad():
        merged(SAMPLES[0])


def test_a_model_with_adapters_is_not_split_over_ranks():
    model = isobit.enable(adapted())
    with pytest.raises(UnsupportedError, match=r"(?s)PEFT adapters.*merged_copy"):
        isobit.integrations.transformers.shard(model, None)


@pytest.mark.parametrize("child", ["lora_A", "lora_B", "lora_dropout", "bias"])
def test_replaced_modules_of_an_adapter_are_named(child):
    """A and B are read and never called: another module in their place would be ignored."""

    class Tripled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    model = isobit.enable(adapted())
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    if child == "bias":
        layer.lora_A["default"].bias = nn.Parameter(torch.ones(4))
    elif child == "lora_dropout":
        layer.lora_dropout["default"] = nn.AlphaDropout(0.5)
    else:
        old = getattr(layer, child)["default"]
        getattr(layer, child)["default"] = Tripled(old.in_features, old.out_features, bias=False)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"k_proj\.default"):
        model(SAMPLES[0])


@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_that_is_shared_by_two_places_is_named(strict):
    """PEFT wraps one of the places; the other would call the layer as it is."""
    base = plain()
    first, second = (layer.self_attn for layer in base.model.layers)
    second.q_proj = first.q_proj
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.q_proj, which is inside"):
        isobit.enable(model, strict=strict)
