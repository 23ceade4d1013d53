"""Attacks on LoRA in an enabled model, alone and with older features: each keeps the bits, or raises an error."""

import copy
import io
import threading

import peft
import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForSequenceClassification

import isobit
from isobit import bits
from isobit.integrations.transformers import merged_copy
from tests.integrations.peft_cases import (
    SAMPLES,
    SIZES,
    adapted,
    differing_layouts,
    gradients,
    in_micro_batches,
    padded,
    plain,
    same,
)

pytestmark = pytest.mark.full
SECOND = {"r": 2, "target_modules": ["q_proj", "k_proj"]}


def score(model, ids=SAMPLES[1]):
    with torch.no_grad():
        return isobit.logprobs(model, ids)


def first_layer(model, name="q_proj"):
    return getattr(model.get_base_model().model.layers[0].self_attn, name)


def test_copies_are_independent():
    model = isobit.enable(adapted(second=SECOND))
    before, other = score(model), copy.deepcopy(model)
    other.set_adapter("second")
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    assert not bits.equal(score(other), before)
    assert differing_layouts(other) == []
    assert bits.equal(score(model), before)


def test_a_saved_model_has_the_same_bits():
    model, file = isobit.enable(adapted(), adapters="merged"), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert bits.equal(score(torch.load(file, weights_only=False)), score(model))


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_first_calls_in_threads(mode):
    model, found = isobit.enable(adapted(), adapters=mode), {}

    def run(at):
        found[at] = score(model, SAMPLES[at % 4])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bits.equal(found[at], score(model, SAMPLES[at % 4])) for at in range(8))


def test_nan_and_infinity_are_the_same_in_every_layout():
    model = isobit.enable(adapted(dtype=torch.bfloat16))
    first_layer(model).lora_B["default"].weight.data[0, 0] = float("nan")
    assert bool(score(model).isnan().any())
    assert differing_layouts(model) == []
    model = isobit.enable(adapted())
    first_layer(model).scaling["default"] = float("inf")
    assert not bool(score(model).isfinite().all())


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_base_and_adapters_that_train_together(mode):
    model = isobit.enable(adapted(target_modules=["q_proj"]), adapters=mode)
    model.requires_grad_(True)
    found = gradients(model, "left")
    assert sum("base_layer" in name for name in found) == 2
    assert gradients(model, "packed") == found


def test_only_a_is_trained():
    model = isobit.enable(adapted())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_A" in name)
    found = gradients(model, "left")
    assert len(found) == 14
    assert gradients(model, "right") == in_micro_batches(model, 2) == found


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_adapters_in_bf16(mode):
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    base = plain(dtype=torch.bfloat16)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).eval()
    isobit.enable(model, adapters=mode)
    assert differing_layouts(model) == []
    found = gradients(model, "left")
    assert gradients(model, "packed") == in_micro_batches(model, 4) == found


def test_adapters_of_two_dtypes():
    model = adapted(second=SECOND)
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data = parameter.data.bfloat16()
    isobit.enable(model)
    assert differing_layouts(model) == []
    assert gradients(model, "left") == gradients(model, "packed")


def test_autocast():
    beside = isobit.enable(adapted())
    merged = isobit.enable(adapted(), adapters="merged")
    served = isobit.enable(merged_copy(merged))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing_layouts(beside) == differing_layouts(merged) == []
        assert bits.equal(score(merged), score(served))


def test_a_hook_that_changes_the_input_of_one_sibling():
    model = isobit.enable(adapted())
    before = score(model)
    layer = first_layer(model, "k_proj")
    handle = layer.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    assert not bits.equal(score(model), before)
    assert differing_layouts(model) == []
    handle.remove()
    assert bits.equal(score(model), before)


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("Qwen3", {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 32}}),
        ("Qwen3", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
        ("Qwen3", {"init_lora_weights": "pissa"}),
        ("Llama", {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [0, 2]]}),
    ],
    ids=str,
)
def test_options_of_lora(family, asked):
    assert differing_layouts(isobit.enable(adapted(family, **asked))) == []


def test_methods_of_peft_between_calls():
    model = isobit.enable(adapted(second={"r": 4, "target_modules": "all-linear"}))
    before = score(model)
    first_layer(model).scale_layer(3.0)
    assert not bits.equal(score(model), before)
    first_layer(model).unscale_layer(3.0)
    assert bits.equal(score(model), before)
    model.base_model.set_adapter([])
    assert bits.equal(score(model), score(isobit.enable(plain())))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mix", combination_type="linear")
    model.set_adapter("mix")
    assert differing_layouts(model) == []


def test_nested_blocks_compile_and_coverage():
    model = adapted()
    with isobit.enabled(model):
        outer = score(model)
        with isobit.enabled(model):
            assert bits.equal(score(model), outer)
        assert bits.equal(score(model), outer)
    assert "forward" not in vars(first_layer(model))
    assert not isobit.coverage_report(model, {"input_ids": SAMPLES[0]}).kept
    isobit.enable(model)
    assert isobit.coverage_report(model.train(), {"input_ids": SAMPLES[0]}).kept
    compiled = torch.compile(model.eval())
    assert bits.equal(compiled(SAMPLES[0]).logits, model(SAMPLES[0]).logits)


def test_an_audit_of_the_stock_model_finds_it_guilty():
    ids = torch.cat([SAMPLES[1], SAMPLES[1].flip(-1)])
    assert not isobit.audit(adapted(), {"input_ids": ids}).kept


def test_adapters_that_are_disabled_during_generate_leave_the_base():
    ids, mask = padded("left")
    asked = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    model, base = isobit.enable(adapted()), isobit.enable(plain())
    with model.disable_adapter():
        off = model.generate(input_ids=ids, **asked)
    expected = base.generate(ids, **asked)
    assert torch.equal(off.sequences, expected.sequences)
    assert same(off.logits, expected.logits)
    assert not same(model.generate(input_ids=ids, **asked).logits, expected.logits)


def test_an_adapter_that_is_set_between_two_decoding_steps_is_the_next_steps():
    """Keys of the cache stay those of the adapter that computed them."""
    ids, cut = SAMPLES[1], 8
    model = isobit.enable(adapted(second=SECOND))
    found = []
    for width in (1, 2):  # the steps after the switch one by one, and in pieces
        cache, made = DynamicCache(), []
        model.set_adapter("default")
        with torch.no_grad():
            model(ids[:, :cut], past_key_values=cache)
            model.set_adapter("second")
            for at in range(cut, ids.shape[1], width):
                made.append(model(ids[:, at : at + width], past_key_values=cache).logits)
            found.append(torch.cat(made, 1))
    assert bits.equal(*found)
    with torch.no_grad():
        assert not bits.equal(found[0], model(ids).logits[:, cut:])


def test_two_models_that_train_in_two_threads():
    expected = gradients(isobit.enable(adapted(lora_dropout=0.2)), "left")
    models, found = [isobit.enable(adapted(lora_dropout=0.2)) for _ in range(2)], {}

    def run(at):
        found[at] = gradients(models[at], ("packed", "right")[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_dropout_in_micro_batches(reentrant):
    asked = {"target_modules": ["q_proj", "k_proj", "down_proj"], "lora_dropout": 0.25}
    expected = in_micro_batches(isobit.enable(adapted(**asked)), 1)
    model = adapted(**asked)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    isobit.enable(model)
    assert in_micro_batches(model, 2) == in_micro_batches(model, 4) == expected


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_writes_to_a_frozen_model_are_seen(mode):
    model = isobit.enable(adapted(dtype=torch.bfloat16), adapters=mode)
    layer, before = first_layer(model), score(model)
    with isobit.freeze(model):
        assert bits.equal(score(model), before)
        layer.lora_B["default"].weight.data.mul_(2)
        second = score(model)
        layer.base_layer.weight.data.mul_(1.5)
        third = score(model)
        with model.disable_adapter():
            fourth = score(model)
    assert len({bits.digest(one) for one in (before, second, third, fourth)}) == 4
    assert bits.equal(score(model), third)
    assert bits.equal(score(copy.deepcopy(model)), third)


def test_a_saved_model_trains_with_the_same_masks():
    model, file = isobit.enable(adapted(lora_dropout=0.2)), io.BytesIO()
    expected = gradients(model, "left")
    torch.save(model, file)
    file.seek(0)
    assert gradients(torch.load(file, weights_only=False), "packed") == expected
    assert gradients(copy.deepcopy(model), "right") == expected


def test_a_hook_that_changes_the_output_of_one_sibling():
    model = isobit.enable(adapted())
    expected = gradients(model, "left")
    first_layer(model).register_forward_hook(lambda _, __, output: output * 2)
    assert differing_layouts(model) == []
    found = gradients(model, "left")
    assert found == gradients(model, "packed")
    assert found != expected


@pytest.mark.parametrize("whole", [False, True])
def test_a_replaced_layer_raises_at_the_next_call(whole):
    model = isobit.enable(adapted())
    attention = model.get_base_model().model.layers[0].self_attn
    if whole:
        attention.q_proj = attention.q_proj.base_layer
    else:
        attention.q_proj.base_layer = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(isobit.UnsupportedError, match="q_proj of type Linear, which was put there"):
        score(model)


def test_a_part_of_the_adapters_is_merged():
    model = isobit.enable(adapted())
    first_layer(model, "k_proj").merge()
    assert differing_layouts(model) == []
    assert gradients(model, "left") == gradients(model, "packed")


def test_reward_models_with_adapters():
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=16, num_labels=1)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False)
    model = peft.get_peft_model(Qwen3ForSequenceClassification(config), lora).eval()
    isobit.enable(model)
    scores = [
        model(ids, attention_mask=mask).logits for ids, mask in map(padded, ("left", "right"))
    ]
    assert bits.equal(*scores)
    alone = torch.cat([model(ids).logits for ids in SAMPLES])
    assert bits.equal(scores[0], alone)
