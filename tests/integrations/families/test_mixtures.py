"""Mixtures of experts in enabled models: what is not computed is named, and a plain batch has its samples."""

import pytest
import torch

import isobit
from benchmarks.families import TYPES, build, differing_routes, gradients_of, samples_of
from isobit import bits
from isobit.errors import UnsupportedError

IDS = torch.randint(2, 96, (2, 7), generator=torch.Generator().manual_seed(3))


def test_what_is_not_computed_is_named(monkeypatch):
    model = isobit.enable(build("mixtral", torch.float32))
    with pytest.raises(UnsupportedError, match="output_router_logits=True"):
        model(IDS, labels=IDS, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="output_router_logits=True"):
        model(IDS)
    model.config.output_router_logits = False
    model.model.layers[0].mlp.jitter_noise = 0.1
    model(IDS)
    with pytest.raises(UnsupportedError, match=r"router_jitter_noise of 0\.1"):
        model.train()(IDS)
    monkeypatch.setitem(TYPES, "olmoe", {**TYPES["olmoe"], "clip_qkv": 8.0})
    with pytest.raises(UnsupportedError, match=r"clip_qkv=8\.0"):
        isobit.enable(build("olmoe", torch.float32))


def test_experts_of_an_enabled_model_are_not_split():
    model = isobit.enable(build("qwen3_moe", torch.float32))
    with pytest.raises(UnsupportedError, match="a mixture of experts"):
        isobit.integrations.transformers.shard(model, None)


def test_tensors_on_another_backend_raise_with_the_operator_s_name():
    from isobit.foundation import backends

    logits, routes = torch.zeros(2, 4), isobit.route(torch.zeros(2, 4), 2)
    x, weight = torch.zeros(4, 3), torch.zeros(4, 5, 3)
    calls = {
        "route": lambda: isobit.route(logits, 2),
        "dispatch_rows": lambda: isobit.dispatch_rows(torch.zeros(2, 3), routes),
        "grouped_linear": lambda: isobit.grouped_linear(x, weight, routes=routes),
        "combine": lambda: isobit.combine(x, routes),
    }
    with backends.use(object()):
        for name, call in calls.items():
            with pytest.raises(UnsupportedError, match=f"{name}, which has none"):
                call()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_rows_without_the_batch_s_axes_keep_their_samples(kind):
    """Blocks flatten [B, T]: a batch without padding has the gradients of the same samples with padding."""
    model = isobit.enable(build(kind, torch.float32)).train()
    plain = gradients_of(model, input_ids=IDS, labels=IDS)
    ids, mask = torch.nn.functional.pad(IDS, (3, 0)), torch.ones(2, 10, dtype=torch.long)
    mask[:, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    padded = gradients_of(model, input_ids=ids, attention_mask=mask, labels=labels)
    assert len(plain) > 20
    assert [name for name in plain if not bits.equal(plain[name], padded[name])] == []


def test_a_route_that_depends_on_the_batch_is_counted():
    """The count of routes that differ is not zero where a router looks at other rows."""
    model = isobit.enable(build("qwen3_moe", torch.float32))
    assert differing_routes(model, samples_of()) == 0

    def balance(module, inputs):
        return (inputs[0] - inputs[0].mean(0),)

    isobit.disable(model)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(balance)
    assert differing_routes(model, samples_of()) > 0
