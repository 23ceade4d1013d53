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
    labelled,
    packed,
    padded,
    places_of,
    rows_of,
    samples_of,
    score_stock,
    stock_gradients,
)

# Attention of every kind, and the dense parts beside it; the weights of experts are no linear layers.
TARGETS = {
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"],
    "gpt_oss": ["q_proj", "o_proj"],
    "qwen3_next": ["in_proj_qkvz", "out_proj", "q_proj"],
    "qwen3_5_text": ["in_proj_qkv", "out_proj", "q_proj", "up_proj"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TARGETS)
def test_one_value_in_every_layout(kind):
    config = LoraConfig(r=4, target_modules=TARGETS[kind], init_lora_weights=False)
    model, samples = get_peft_model(build(kind, torch.float32), config).eval(), samples_of()
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
