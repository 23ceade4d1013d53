"""Theorem: LoRA in models with experts, latent attention or linear attention has one value in every layout."""

import pytest
import torch

pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

import isobit
from benchmarks.families import (
    build,
    differing,
    gradients_of,
    in_micro_batches,
    labelled,
    packed,
    padded,
    places_of,
    rows_of,
    samples_of,
    score_stock,
    stock_gradients,
)
from isobit import UnsupportedError
from isobit.integrations.transformers import merged_copy
from isobit.integrations.transformers.parts import experts as parts
from isobit.integrations.transformers.parts import recognition
from isobit.ops.experts import merged as operators

# Attention of every kind, the dense parts beside it, and the weights of all experts.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
CASES = [
    ("qwen3_moe", ["q_proj", "v_proj", "o_proj"], ()),
    ("deepseek_v3", ["q_b_proj", "kv_b_proj", "o_proj"], ()),
    ("gpt_oss", ["q_proj", "o_proj"], ()),
    ("qwen3_next", ["in_proj_qkvz", "out_proj", "q_proj"], ()),
    ("qwen3_5_text", ["in_proj_qkv", "out_proj", "q_proj", "up_proj"], ()),
    ("qwen3_moe", ["q_proj"], EXPERTS),
    ("qwen3_moe", [], EXPERTS[:1]),
    ("gpt_oss", ["q_proj"], EXPERTS),
    ("qwen3_next", ["out_proj"], EXPERTS[1:]),
]


def adapted(kind, modules, parameters, dtype=torch.float32):
    config = LoraConfig(
        r=4,
        target_modules=list(modules),
        target_parameters=list(parameters),
        init_lora_weights=False,
    )
    torch.manual_seed(4)
    return get_peft_model(build(kind, dtype), config).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "modules", "parameters"), CASES)
def test_one_value_in_every_layout(kind, modules, parameters):
    model, samples = adapted(kind, modules, parameters), samples_of()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    inputs = {side: padded(samples, side) for side in ("left", "right")}
    stock = [
        gradients_of(
            model,
            input_ids=ids,
            attention_mask=mask,
            labels=labelled(ids, mask),
            position_ids=places_of(mask),
        )
        for ids, mask in inputs.values()
    ]
    alone_by_stock = stock_gradients(model, samples)
    controls = score_stock(model, samples)[1] + differing(*([*one.values()] for one in stock))
    assert controls > 0
    isobit.enable(model)
    with torch.no_grad():
        alone = [isobit.logprobs(model, sample)[0, :-1] for sample in samples]
        for side, given in inputs.items():
            rows = rows_of(isobit.logprobs(model, *given), side)
            assert differing(alone, [row[:-1] for row in rows]) == 0
    found = [
        gradients_of(model, input_ids=ids, attention_mask=mask, labels=labelled(ids, mask))
        for ids, mask in inputs.values()
    ]
    ids, places = packed(samples)
    found.append(gradients_of(model, input_ids=ids, position_ids=places, labels=ids))
    for one in found:
        assert set(one) == trained
        assert differing([*found[0].values()], [*one.values()]) == 0
    for name, grad in found[0].items():
        wanted = alone_by_stock[name]
        assert (grad - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


# Adapters of the weights of experts (`target_parameters`).


def by_layout(model):
    """Return each sample's log-probabilities alone and in a padded batch, and gradients in 1, 2 and 4 micro-batches."""
    samples = samples_of()
    ids, mask = padded(samples, "left")
    with torch.no_grad():
        alone = [isobit.logprobs(model, sample)[0, :-1] for sample in samples]
        rows = rows_of(isobit.logprobs(model, ids, mask), "left")
    grads = [in_micro_batches(model, samples, count) for count in (1, 2, 4)]
    assert len(grads[0]) == sum(p.requires_grad for p in model.parameters()) > 0
    return alone, [row[:-1] for row in rows], grads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["beside", "merged"])
def test_experts_in_micro_batches(mode, dtype):
    model = isobit.enable(adapted("qwen3_moe", ["q_proj"], EXPERTS, dtype), adapters=mode)
    alone, together, grads = by_layout(model)
    assert differing(alone, together) == 0
    assert differing(grads[0], grads[1]) == differing(grads[0], grads[2]) == 0
    assert all(grad.any() for grad in grads[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_merged_experts_are_those_of_a_merged_copy_and_near_stock(kind):
    model = adapted(kind, ["q_proj"], EXPERTS)
    sample = samples_of()[1]
    stock, wanted = model(sample).logits.log_softmax(-1), stock_gradients(model, samples_of())
    before = [p.clone() for p in model.parameters()]
    isobit.enable(model, adapters="merged")
    with torch.no_grad():
        served = isobit.enable(merged_copy(model))
        values = isobit.logprobs(model, sample)
        assert differing([values], [isobit.logprobs(served, sample)]) == 0
        near = stock[0, :-1].gather(1, sample[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(values[0, :-1], near, atol=1e-5, rtol=0)
        beside = isobit.logprobs(isobit.enable(isobit.disable(model)), sample)
        assert differing([values], [beside]) > 0
    assert differing(before, [*model.parameters()]) == 0
    isobit.enable(isobit.disable(model), adapters="merged")
    ids, mask = padded(samples_of(), "right")
    found = gradients_of(model, input_ids=ids, attention_mask=mask, labels=labelled(ids, mask))
    for name, grad in found.items():
        assert (grad - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


def of_the_next_expert(x, adapter, *, routes):
    rolled = adapter.a.view(routes.total, -1, adapter.a.shape[1]).roll(1, 0).view_as(adapter.a)
    return operators.low_rank_experts(x, adapter._replace(a=rolled), routes=routes)


def in_order_of_ranks(a, b, experts):
    """B as if the numbers of one expert were neighbours."""
    return a.view(experts, -1, a.shape[1]), b.view(len(b), experts, -1).transpose(0, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (parts, "low_rank_experts", of_the_next_expert),
        (operators, "split_factors", in_order_of_ranks),
    ],
)
def test_planted_adapters_are_far_from_stock(place, name, wrong, monkeypatch):
    model, sample = adapted("qwen3_moe", [], EXPERTS), samples_of()[1]
    with torch.no_grad():
        stock = model(sample).logits
        isobit.enable(model)
        assert (model(sample).logits - stock).abs().max() < 1e-5
        monkeypatch.setattr(place, name, wrong)
        assert (model(sample).logits - stock).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_a_planted_gradient_over_whole_experts_differs_in_micro_batches(monkeypatch):
    """Wrong: the rows of an expert as one sample, so that leaves and samples are not those of the batch."""
    model = isobit.enable(adapted("qwen3_moe", [], EXPERTS))
    assert differing(*by_layout(model)[2][:2]) == 0
    right = operators.expert_spans

    def one_sample(tokens, rows, samples):
        spans = right(tokens, rows, samples)
        spans[:, 0, 1] = torch.tensor(rows)
        spans[:, 1:, 1] = 0
        return spans

    monkeypatch.setattr(operators, "expert_spans", one_sample)
    assert differing(*by_layout(model)[2][:2]) > 0


@pytest.mark.filterwarnings("ignore")
def test_state_of_adapters_of_experts_is_read_at_every_call():
    model, sample = adapted("qwen3_moe", [], EXPERTS), samples_of()[0]
    plain = isobit.enable(build("qwen3_moe", torch.float32).eval())
    isobit.enable(model)
    with torch.no_grad():
        base, with_adapter = isobit.logprobs(plain, sample), isobit.logprobs(model, sample)
        assert differing([base], [with_adapter]) == 1
        with model.disable_adapter():
            assert differing([base], [isobit.logprobs(model, sample)]) == 0
        for layer in model.get_base_model().model.layers:
            for wrapper in (layer.mlp.experts, layer.mlp.experts.base_layer):
                wrapper.scaling["default"] *= 2
        assert differing([with_adapter], [isobit.logprobs(model, sample)]) == 1
        model.merge_adapter()
        assert differing([base], [isobit.logprobs(model, sample)]) == 1
        with pytest.raises(isobit.ArgumentError, match="unmerge_adapter"):
            merged_copy(model)


@pytest.mark.filterwarnings("ignore")
def test_what_adapters_of_experts_do_not_support(monkeypatch):
    model = adapted("llama4_text", [], [f"feed_forward.{name}" for name in EXPERTS])
    with pytest.raises(UnsupportedError, match=r"(?s)target_parameters.*Llama4.*merge_and_unload"):
        isobit.enable(model)
    isobit.enable(model.merge_and_unload())
    model = adapted("qwen3_moe", [], ["mlp.gate.weight"])
    with pytest.raises(UnsupportedError, match=r"(?s)target_parameters.*gate_up_proj"):
        isobit.enable(model)
    model = isobit.enable(adapted("qwen3_moe", [], EXPERTS), adapters="merged")
    experts = model.get_base_model().model.layers[0].mlp.experts
    experts.get_base_layer().gate_up_proj.requires_grad_()
    with pytest.raises(UnsupportedError, match="frozen weights of experts"):
        model(samples_of()[0], labels=samples_of()[0])
    for shard in (
        isobit.integrations.transformers.shard,
        isobit.integrations.transformers.shard_experts,
    ):
        with pytest.raises(UnsupportedError, match="PEFT adapters"):
            shard(model, None)
    monkeypatch.setattr(recognition, "LORA", {})
    with pytest.raises(UnsupportedError, match="another version of PEFT"):
        isobit.enable(adapted("qwen3_moe", [], EXPERTS))
