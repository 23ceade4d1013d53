"""LoRA in an enabled model, next to the weights or merged into them.

1. Log-probabilities and logits alone = padded left = right = packed = decoded; gradients of A and B in left, right,
   packed and 1, 2, 4 micro-batches, with dropout and checkpointing. Stock, in the same test, differs.
2. What it computes is PEFT's formula; merged, it is the plain model with the merged weights, bit for bit, and the base
   keeps its bits.
3. The state of adapters is read at every call.
"""

import copy

import peft
import pytest
import torch
from peft_cases import (
    LENGTHS,
    SAMPLES,
    adapted,
    base_digest,
    differing_layouts,
    gradients,
    grads_of,
    in_micro_batches,
    packed,
    padded,
    plain,
)

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.integrations.transformers import merged_copy
from isobit.sampling import dropout_key

SECOND = {"r": 3, "target_modules": ["q_proj", "k_proj"], "lora_alpha": 5}
CASES = {
    "q and v, r 1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "all linears, rsLoRA": {"r": 8, "use_rslora": True},
    "one of siblings, r 64": {"r": 64, "target_modules": ["k_proj", "gate_proj", "down_proj"]},
    "modules to save": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"]},
    "two adapters": {"target_modules": ["q_proj", "up_proj"], "second": SECOND},
}
BESIDE = {
    "lora_bias": {"target_modules": ["v_proj", "down_proj"], "lora_bias": True},
    "dropout": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "lora_dropout": 0.3,
        "second": {**SECOND, "lora_dropout": 0.1},
    },
}
EVERY = [
    *((name, mode) for name in CASES for mode in ("beside", "merged")),
    *((name, "beside") for name in BESIDE),
]
QUICK = [
    ("q and v, r 1", "beside"),
    ("one of siblings, r 64", "merged"),
    ("modules to save", "beside"),
    ("two adapters", "merged"),
    ("lora_bias", "beside"),
    ("dropout", "beside"),
]
ASKED = {**CASES, **BESIDE}


def judge(model, mode):
    """Check every layout and every number of micro-batches of one model."""
    kept = base_digest(model)
    isobit.enable(model, adapters=mode)
    assert differing_layouts(model) == []
    expected = gradients(model, "left")
    assert any("lora_A" in name for name in expected)
    for form in ("right", "packed"):
        assert gradients(model, form) == expected, form
    for count in (1, 2, 4):
        assert in_micro_batches(model, count) == expected, count
    assert base_digest(model) == kept
    return expected


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize(("name", "mode"), QUICK)
@pytest.mark.sweep(2)
def test_a_sample_has_the_same_bits_in_every_layout(name, mode):
    dtype = (torch.float32, torch.bfloat16)[len(name) % 2]
    judge(adapted(dtype=dtype, **ASKED[name]), mode)


def test_a_layer_whose_input_is_the_residual_stream():
    """OLMo 2 normalises after attention: its input has three uses, of the residual, the base and the adapters."""
    judge(adapted("Olmo2", torch.bfloat16), "beside")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral", "Olmo2", "Phi3"])
@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_every_family_and_dtype(name, mode, family, dtype):
    asked = ASKED[name]
    if family == "Phi3":
        packed_names = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        packed_names |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}

        def renamed(options):
            targets = options.get("target_modules", "all-linear")
            if isinstance(targets, list):
                targets = sorted({packed_names.get(one, one) for one in targets})
            return {**options, "target_modules": targets}

        asked = renamed(asked)
        if "second" in asked:
            asked["second"] = renamed(asked["second"])
    judge(adapted(family, dtype, **asked), mode)


def test_stock_differs_between_layouts():
    model = adapted("Qwen3")
    ids, mask = padded("left")
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        alone = [model(one).logits[0] for one in SAMPLES]
    differ = [
        not bits.equal(together[row][mask[row].bool()], alone[row]) for row in range(len(LENGTHS))
    ]
    assert any(differ)
    found = [gradients(model, form) for form in ("left", "right")]
    assert found[0] != found[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    asked = {"target_modules": ["q_proj", "k_proj", "down_proj"], "lora_dropout": 0.25}
    expected = gradients(isobit.enable(adapted(**asked)), "left")
    model = adapted(**asked)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    isobit.enable(model)
    assert gradients(model, "left") == expected
    assert gradients(model, "packed") == expected


# ---- 2. what is computed ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*lora_bias")
@pytest.mark.parametrize("name", ASKED)
def test_the_formula_is_that_of_peft(name):
    model = adapted(**ASKED[name])
    with torch.no_grad():
        stock = [model(ids).logits for ids in SAMPLES]
    own = copy.deepcopy(model)
    isobit.enable(model)
    with torch.no_grad():
        for ids, expected in zip(SAMPLES, stock, strict=True):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    if name == "dropout":
        return
    for each in (model, own):
        ids, mask = padded("right")
        each.train()(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss.backward()
    others = dict(own.named_parameters())
    for parameter, found in model.named_parameters():
        if found.grad is not None:
            wanted = others[parameter].grad
            assert float((found.grad - wanted).norm() / wanted.norm()) < 1e-5, parameter


@pytest.mark.parametrize("name", CASES)
def test_merged_is_the_plain_model_with_the_merged_weights(name):
    dtype = (torch.float32, torch.bfloat16)[len(name) % 2]
    model = isobit.enable(adapted(dtype=dtype, **CASES[name]), adapters="merged")
    served = merged_copy(model)
    assert not [one for one in served.modules() if hasattr(one, "lora_A")]
    isobit.enable(served)
    with torch.no_grad():
        for ids in SAMPLES:
            assert bits.equal(model(ids).logits, served(ids).logits)
            assert bits.equal(isobit.logprobs(model, ids), isobit.logprobs(served, ids))
    # Next to the weights, what is computed differs by the rounding of the weights.
    beside = isobit.enable(adapted(dtype=dtype, **CASES[name]))
    assert not bits.equal(beside(SAMPLES[1]).logits, model(SAMPLES[1]).logits)


def test_the_base_keeps_its_bits_over_a_hundred_merged_steps():
    model = isobit.enable(
        adapted(dtype=torch.bfloat16, target_modules=["q_proj", "v_proj"]), adapters="merged"
    ).train()
    optimizer = isobit.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    kept, losses = base_digest(model), []
    ids, mask = padded("right", [0, 2])
    for step in range(100):
        if step % 25 == 0:
            merged_copy(model)  # as a server is given the weights before a rollout
        optimizer.zero_grad()
        loss = model(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert base_digest(model) == kept
    # The planted twin: what TRL does before each rollout.
    model.merge_adapter()
    model.unmerge_adapter()
    assert base_digest(model) != kept


# ---- 3. live state ----------------------------------------------------------------------------------------


@torch.no_grad()
def score(model):
    return isobit.logprobs(model, SAMPLES[1])


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_the_state_of_adapters_is_read_at_every_call(mode):
    model = adapted(second=SECOND)
    base = isobit.enable(plain())
    isobit.enable(model, adapters=mode)
    both = score(model)
    with model.disable_adapter():
        assert bits.equal(score(model), score(base))
    assert bits.equal(score(model), both)
    model.set_adapter("default")
    first = score(model)
    model.set_adapter("second")
    second = score(model)
    assert len({bits.digest(one) for one in (both, first, second, score(base))}) == 4
    alone = adapted(second=SECOND)
    alone.set_adapter("second")
    assert bits.equal(second, score(isobit.enable(alone, adapters=mode)))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    kept = layer.scaling["second"]
    layer.scaling["second"] = 0.0
    assert not bits.equal(score(model), second)
    layer.scaling["second"] = kept
    assert bits.equal(score(model), second)
    with torch.no_grad():
        layer.lora_B["second"].weight.data.mul_(2)  # no version counter sees it
    assert not bits.equal(score(model), second)


@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_a_merge_by_peft_is_seen(mode):
    model = isobit.enable(adapted(), adapters=mode)
    before = score(model)
    model.merge_adapter()
    merged = score(model)
    torch.testing.assert_close(merged, before, atol=1e-4, rtol=1e-4)
    plain_one = isobit.enable(copy.deepcopy(adapted()).merge_and_unload())
    assert bits.equal(merged, score(plain_one))
    with model.disable_adapter(), pytest.raises(UnsupportedError, match="unmerge_adapter"):
        score(model)
    with pytest.raises(ArgumentError, match="PEFT has not merged"):
        merged_copy(model)
    model.unmerge_adapter()
    torch.testing.assert_close(score(model), before, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_is_loaded_later_is_computed(tmp_path):
    other = adapted(seed=9)
    other.save_pretrained(tmp_path)
    expected = score(isobit.enable(other))
    model = isobit.enable(adapted())
    first = score(model)
    model.load_adapter(tmp_path, "loaded")
    assert bits.equal(score(model), first)
    model.set_adapter("loaded")
    assert bits.equal(score(model), expected)
    model.set_adapter("default")
    model.delete_adapter("loaded")
    assert bits.equal(score(model), first)


def test_a_model_with_add_adapter_needs_no_wrapper():
    model = plain()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    wrapped = adapted(target_modules=["q_proj", "down_proj"])
    state = {n.removeprefix("base_model.model."): p for n, p in wrapped.state_dict().items()}
    model.load_state_dict(state)
    assert bits.equal(score(isobit.enable(model)), score(isobit.enable(wrapped)))
    model.disable_adapters()
    assert bits.equal(score(model), score(isobit.enable(plain())))


def test_enable_and_disable_take_the_wrapper_or_the_model_inside():
    model = adapted()
    with torch.no_grad():
        stock = model(SAMPLES[0]).logits
    assert isobit.enable(model) is model
    found = score(model)
    assert bits.equal(found, score(model.get_base_model()))
    with pytest.raises(UnsupportedError, match=r"(?s)adapters='beside'.*disable"):
        isobit.enable(model, adapters="merged")
    assert isobit.disable(model) is model
    with torch.no_grad():
        assert bits.equal(model(SAMPLES[0]).logits, stock)
    with isobit.enabled(model, adapters="merged"):
        assert not bits.equal(score(model), found)
    with pytest.raises(ArgumentError, match="beside"):
        isobit.enable(model, adapters="unmerged")
    with torch.no_grad():
        assert bits.equal(model(SAMPLES[0]).logits, stock)


def test_hooks_of_layers_with_adapters_run_and_those_inside_raise():
    model = isobit.enable(adapted())
    seen = []
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    score(model)
    assert seen == [1]
    handle.remove()
    layer.lora_A["default"].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"no hook on .*k_proj\.lora_A\.default"):
        score(model)


def test_freeze_and_generate():
    model = isobit.enable(adapted())
    ids, mask = padded("left")
    asked = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    made = model.generate(input_ids=ids, **asked)
    with isobit.freeze(model):
        assert torch.equal(model.generate(input_ids=ids, **asked), made)
        assert bits.equal(score(model), score(isobit.enable(adapted())))


def test_dropout_is_keyed():
    model = isobit.enable(adapted(lora_dropout=0.5)).train()
    ids = SAMPLES[1]
    with pytest.raises(UnsupportedError, match=r"(?s)dropout of 0\.5.*q_proj.*dropout_key"):
        model(input_ids=ids, labels=ids)
    found = []
    for step in (0, 0, 1):
        with dropout_key(seed=1, step=step):
            found.append(model(input_ids=ids, labels=ids).loss.detach())
    assert bits.equal(found[0], found[1])
    assert not bits.equal(found[0], found[2])
    assert bits.equal(score(model.eval()), score(isobit.enable(adapted(lora_dropout=0.0))))


def test_packed_samples_have_masks_of_their_own():
    """Planted in a way that shows: two equal samples in one row are dropped differently."""
    model = isobit.enable(adapted(lora_dropout=0.5)).train()
    twice = torch.cat([SAMPLES[0], SAMPLES[0]], 1)
    positions = torch.arange(LENGTHS[0]).repeat(2)[None]
    with dropout_key(seed=1, step=0):
        logits = model(twice, position_ids=positions).logits[0]
    assert not bits.equal(logits[: LENGTHS[0]], logits[LENGTHS[0] :])
    assert len(packed()[0][0]) == sum(LENGTHS)
    assert grads_of(model) == {}


def test_the_source_of_lora_was_read_and_another_is_compared_with_stock(monkeypatch):
    from peft.tuners.lora.layer import Linear

    from isobit.integrations.transformers.parts import digests, lora, recognition
    from isobit.integrations.transformers.parts.source import digest_of_class

    assert digests.LORA[digest_of_class(Linear)] == "peft.tuners.lora.layer.Linear"
    monkeypatch.setattr(recognition, "LORA", {})  # as with a version of PEFT that was not read
    assert bits.equal(score(isobit.enable(adapted())), score(isobit.enable(adapted())))
    right = lora.live_adapters

    def doubled(wrapper, name):
        for one in right(wrapper, name):
            yield one._replace(weights=one.weights._replace(scale=2 * one.weights.scale))

    monkeypatch.setattr(lora, "live_adapters", doubled)  # planted: not what PEFT computes
    with pytest.raises(UnsupportedError, match="another one: the largest difference"):
        isobit.enable(adapted())
