"""A Qwen3 split over tensor-parallel ranks has the bits of the whole one: loss, log-probabilities, gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isobit
from isobit import CutError, UnsupportedError, bits
from isobit.integrations.transformers.strictness import observe
from isobit.integrations.transformers.tensor_parallel import shard, unshard
from isobit.ops.share import Share, collecting
from isobit.parallel.tensor import head_norm
from isobit.parallel.tensor.shard import shard_table, take_shard
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World
from tests.parallel import split_models as models

BF16 = torch.bfloat16


def on_ranks(count, check):
    """The value of check(ranks) on each rank."""

    def run(_):
        return check(
            TensorParallelGroup.of(
                init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
            )
        )

    return World(count).run(run).values


@pytest.fixture(
    scope="module", params=[(torch.float32, False), (BF16, True)], ids=["fp32", "bf16 tied"]
)
def whole(request):
    dtype, tied = request.param
    model = models.build(dtype, tied)
    isobit.enable(model)
    return dtype, tied, models.measure(model)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.sweep(2)
def test_a_split_model_has_the_bits_of_the_whole_one(whole, count):
    assert on_ranks(count, lambda ranks: models.differing(ranks, *whole)) == [[]] * count


def test_a_norm_that_merges_samples_before_heads_is_seen(monkeypatch):
    def samples_first(totals, samples, ranks):
        total = head_norm.partial.merge_samples(totals, samples.total)
        ranks.all_reduce(total)
        return total

    model = models.build(torch.float32)
    isobit.enable(model)
    expected = models.measure(model)
    monkeypatch.setattr(head_norm, "merge_weight_grad", samples_first)
    for wrong in on_ranks(2, lambda ranks: models.differing(ranks, torch.float32, False, expected)):
        assert wrong
        assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in wrong)


def share_gradients(model, first):
    """Of samples `first` and the next of the batch: unrounded."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    inputs = {
        name: value[first : first + 2] if name != "use_cache" else value
        for name, value in models.batch().items()
    }
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with collecting(Share(first, len(models.LENGTHS), 2)):
        loss = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(22)).loss
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}


@pytest.mark.parametrize("first", [0, 2])
def test_a_share_of_the_batch(first):
    model = models.build(BF16)
    isobit.enable(model)
    expected = share_gradients(model, first)
    assert {value.dtype for value in expected.values()} == {torch.float32}

    def check(ranks):
        split = models.build(BF16)
        isobit.enable(split)
        shard(split, ranks)
        shards, found = shard_table(split), share_gradients(split, first)
        return [
            name
            for name, value in found.items()
            if not bits.equal(
                value,
                take_shard(expected[name], shards[name]) if name in shards else expected[name],
            )
        ]

    assert on_ranks(2, check) == [[], []]


def test_unsharded_again_it_is_whole():
    def check(ranks):
        model = models.build(BF16, tied=True)
        before = bits.digest(model)
        isobit.enable(model)
        shard(model, ranks)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with pytest.raises(UnsupportedError, match="unshard"):
            isobit.disable(model)
        unshard(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        isobit.disable(model)
        return bits.digest(model) == before

    assert on_ranks(2, check) == [True, True]


def test_a_stock_sum_over_ranks_carries_an_order():
    """What strict mode looks for: floats that a transport adds. Bytes moved and whole numbers added have no order."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with observe() as added:
            dist.all_reduce(torch.ones(3))
        with observe() as moved:
            dist.all_reduce(torch.ones(3, dtype=torch.int32))
            dist.all_gather([torch.empty(3)], torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert [use.operator for use in added.coverage().order_dependent] == ["c10d::allreduce_"]
    assert {"c10d::allreduce_", "c10d::allgather_"} <= {
        use.operator for use in moved.coverage().operators
    }
    assert moved.coverage().kept


def test_refusals():
    model = models.build(BF16, tied=True)
    named = r"^isobit\.integrations\.transformers\.shard: (?s:.*)enable"
    with pytest.raises(UnsupportedError, match=named):
        shard(model, TensorParallelGroup("tp", None, 0, 2))
    isobit.enable(model)
    before = bits.digest(model)
    with pytest.raises(CutError, match="8 parts"):
        shard(model, TensorParallelGroup("tp", None, 0, 8))
    assert bits.digest(model) == before
    with pytest.raises(UnsupportedError, match="a leaf for each use"):
        share_gradients(model, 0)
