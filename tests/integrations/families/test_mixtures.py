"""Mixtures of experts in enabled models: what is not computed is named, and a plain batch has its samples."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import isobit
from benchmarks.families import (
    TYPES,
    build,
    differing,
    differing_routes,
    gradients_of,
    labelled,
    packed,
    padded,
    places_of,
    samples_of,
)
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.ops import registration
from isobit.ops.experts import portable
from isobit.parallel import GlobalBatch, Gradients
from isobit.simulator import World

IDS = torch.randint(2, 96, (2, 7), generator=torch.Generator().manual_seed(3))


def test_what_is_not_computed_is_named(monkeypatch):
    model = isobit.enable(build("mixtral", torch.float32))
    model.model.layers[0].mlp.jitter_noise = 0.1
    model(IDS)
    with pytest.raises(UnsupportedError, match=r"router_jitter_noise of 0\.1"):
        model.train()(IDS)
    monkeypatch.setitem(TYPES, "olmoe", {**TYPES["olmoe"], "clip_qkv": 8.0})
    with pytest.raises(UnsupportedError, match=r"clip_qkv=8\.0"):
        isobit.enable(build("olmoe", torch.float32))


def balanced(model, **inputs):
    """Loss, auxiliary loss and gradients of a call that balances experts."""
    model.zero_grad(set_to_none=True)
    made = model(use_cache=False, output_router_logits=True, **inputs)
    made.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return made, grads


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_loss_of_routers_is_that_of_fp64_in_every_layout(kind, monkeypatch):
    monkeypatch.setitem(TYPES, kind, {**TYPES[kind], "router_aux_loss_coef": 0.7})
    samples = samples_of()
    model = build(kind, torch.float32).train()
    inputs = {}
    for side in ("left", "right"):
        ids, mask = padded(samples, side)
        inputs[side] = {"input_ids": ids, "attention_mask": mask, "labels": labelled(ids, mask)}
    ids, places = packed(samples)
    inputs["packed"] = {"input_ids": ids, "position_ids": places, "labels": ids}
    # transformers counts positions of a right-padded batch from its start too.
    twin = copy.deepcopy(model).double()
    twin.set_experts_implementation("eager")  # torch's grouped product has no fp64
    exact, wanted = balanced(twin, **inputs["right"])
    stock = [
        balanced(model, **given, position_ids=places_of(given["attention_mask"]))[1].values()
        for given in inputs.values()
        if "attention_mask" in given
    ]
    assert differing([*stock[0]], [*stock[1]]) > 0  # the comparison below finds what differs
    isobit.enable(model)
    plain = model(use_cache=False, **inputs["left"]).loss
    found = {name: balanced(model, **given) for name, given in inputs.items()}
    made, grads = found["left"]
    assert abs(made.aux_loss.double() - exact.aux_loss) <= 1e-6 * exact.aux_loss
    assert abs(made.loss.double() - exact.loss) <= 1e-6 * exact.loss
    assert bits.equal(made.loss.detach(), (plain + 0.7 * made.aux_loss).detach())
    assert len(made.router_logits) == 2
    for name, grad in grads.items():
        assert (grad.double() - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max()
    for other in ("right", "packed"):
        assert bits.equal(found[other][0].aux_loss.detach(), made.aux_loss.detach())
        assert differing([*grads.values()], [*found[other][1].values()]) == 0
    # The gate has a gradient of the auxiliary loss: without it the gradients are others.
    gate = next(name for name in grads if name.endswith("gate.weight"))
    assert not bits.equal(gradients_of(model, **inputs["left"])[gate], grads[gate])


def test_the_loss_of_routers_in_a_share_is_named():
    model = build("qwen3_moe", torch.float32).train()
    model.config.output_router_logits = True
    isobit.enable(model)
    assert model(IDS, labels=IDS).aux_loss > 0
    assert isobit.logprobs(model, IDS).shape == IDS.shape
    batch = GlobalBatch(total=2, micro_batches=2)
    gradients = Gradients(model, batch)
    said = (
        r"(?s)auxiliary loss of routers.*a share of 1 of 2 samples.*output_router_logits to False"
    )
    with pytest.raises(UnsupportedError, match=said), gradients.micro_batch(0):
        model(IDS[:1], labels=IDS[:1], num_items_in_batch=12)
    other = isobit.enable(build("deepseek_v3", torch.float32))
    with pytest.raises(UnsupportedError, match=r"(?s)output_router_logits=True.*plain"):
        other(IDS, output_router_logits=True)


def test_routers_without_a_gradient_are_named():
    model = build("mixtral", torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    isobit.enable(model)
    with pytest.raises(UnsupportedError, match="reentrant checkpoint"):
        model(IDS, labels=IDS, output_router_logits=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    once = balanced(model, input_ids=IDS, labels=IDS)[1]
    model.gradient_checkpointing_disable()
    again = balanced(model, input_ids=IDS, labels=IDS)[1]
    assert differing([*once.values()], [*again.values()]) == 0


def test_tensor_parallelism_next_to_experts_is_named():
    enabled = isobit.enable(build("qwen3_moe", torch.float32))

    def program(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        model = copy.deepcopy(enabled)
        before = {name: p.shape for name, p in model.named_parameters()}
        with pytest.raises(UnsupportedError, match=r"(?s)a mixture of experts.*data parallelism"):
            isobit.integrations.transformers.shard(model, mesh["tp"])
        assert {name: p.shape for name, p in model.named_parameters()} == before
        isobit.integrations.transformers.shard_experts(model, mesh["ep"])
        with pytest.raises(UnsupportedError, match="a mixture of experts"):
            isobit.integrations.transformers.shard(model, mesh["tp"])
        isobit.integrations.transformers.unshard(model)
        assert {name: p.shape for name, p in model.named_parameters()} == before
        return True

    assert World(4).run(program).values == [True] * 4


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


def routes_and_gradients(model, sample):
    """The experts of each token and layer, and the gradients, of one sample."""
    found = []
    names = [name for name, _ in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, __, out: found.append(out[2]))
        for name in names
    ]
    made = gradients_of(model, input_ids=sample, labels=sample)
    for hook in hooks:
        hook.remove()
    return found, made


def test_bf16_gradients_are_far_from_stock_s_only_where_routes_are_others(monkeypatch):
    """Routes that nearly tie fall otherwise than stock's; with stock's routes, gradients are as near as dense ones."""
    # The portable executor, whose choice can be replaced.
    monkeypatch.setattr(registration, "_without_kernel", {*registration._without_kernel, "route"})
    stock, choose = build("mixtral", torch.bfloat16).train(), portable.choose
    model = isobit.enable(copy.deepcopy(stock), strict=False)
    moved, free, forced = 0, 0.0, 0.0

    def apart(left, right):
        return max(float((left[n] - right[n]).abs().max() / right[n].abs().max()) for n in right)

    for sample in samples_of():
        theirs, wanted = routes_and_gradients(stock, sample)
        ours, made = routes_and_gradients(model, sample)
        for left, right in zip(theirs, ours, strict=True):
            moved += int((left.sort(1).values != right.sort(1).values).any(1).sum())
        free = max(free, apart(made, wanted))
        queue = list(theirs)
        monkeypatch.setattr(portable, "choose", lambda scores, k, queue=queue: queue.pop(0))
        forced = max(forced, apart(routes_and_gradients(model, sample)[1], wanted))
        monkeypatch.setattr(portable, "choose", choose)
        assert not queue
    assert forced < 0.05
    assert (free > 0.1) == (moved > 0)
