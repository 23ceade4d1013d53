"""Theorem: ranks that FSDP shards over, and that train on one stream of batches, are named; ranks that may share a
batch, since they exchange activations of it, are not, and the result says that their data was not judged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from isobit.errors import TrainingError
from isobit.simulator import World
from tests.simulator.clean_programs import WIDTH, build, train

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def fsdp2(rank, share):
    train(fully_shard(build(0), mesh=init_device_mesh("cpu", (4,))), 0, share)


def fsdp1(rank, share):
    train(FullyShardedDataParallel(build(0), device_id=torch.device("cpu")), 0, share)


def hybrid(rank, share):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train(fully_shard(build(0), mesh=mesh), 0, share)


def data_and_tensor(rank, share):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(build(0), mesh["tensor"], PLAN)
    train(fully_shard(model, mesh=mesh["data"]), 0, share)


class Ulysses(nn.Module):
    """Every rank gets the batch of its group, computes on its part, and all exchange activations."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.group = nn.Linear(WIDTH, WIDTH), group

    def forward(self, x):
        mine = x.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        y = self.inner(mine).contiguous()
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, y.detach(), group=self.group)
        return torch.cat([y, *parts])[: x.shape[0]]


def data_and_sequence(rank, share):
    """FSDP shards over all ranks, as over a flattened mesh of data and sequence."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Ulysses(groups[rank // 2])
    train(fully_shard(model, mesh=init_device_mesh("cpu", (4,))), 0, share)


def watched(program, share):
    return World(4, watch=("training",), strict=False).run(lambda rank: program(rank, share(rank)))


@pytest.mark.parametrize("program", [fsdp2, fsdp1, hybrid])
def test_one_stream_of_batches_for_all_shards_is_named(program):
    with pytest.raises(TrainingError, match=r"the same batch on ranks \[0 1 2 3\] at step 1") as e:
        World(4, watch=("training",)).run(lambda rank: program(rank, 0))
    assert (e.value.kind, e.value.ranks) == ("data alike", (0, 1, 2, 3))
    right = watched(program, lambda rank: rank)
    assert right.findings == []
    assert "data alike" not in right.not_judged
    assert "ranks 0–3" in right.not_judged["start, gradients and updates"]


def test_two_ranks_of_four_with_one_stream_are_named_at_once():
    found = watched(fsdp2, lambda rank: max(rank, 1)).findings
    assert [(each.kind, each.ranks) for each in found] == [("data alike", (0, 1))]
    assert "at step 0" in found[0].received


@pytest.mark.parametrize("program", [data_and_tensor, data_and_sequence])
def test_ranks_that_exchange_activations_may_share_a_batch(program):
    right = watched(program, lambda rank: rank // 2)
    assert right.findings == []
    wrong = watched(program, lambda rank: 0).findings
    assert [(each.kind, each.ranks) for each in wrong] == [("data alike", (0, 1, 2, 3))]


def test_tensor_parallel_ranks_share_batches_beside_replicated_parameters():
    """The embedding is no DTensor: it starts with equal bits on all ranks, as that of replicas does."""

    def program(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, WIDTH), *build(0))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
        update = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            tokens = torch.randint(16, (4,), generator=torch.Generator().manual_seed(step))
            update.zero_grad()
            model(tokens).square().mean().backward()
            update.step()

    result = World(4, watch=("training",), strict=False).run(program)
    assert result.findings == []
    assert "exchange activations" in result.not_judged["data alike"]


def test_habits_of_shards_are_judged():
    def program(rank, forgets, spoils):
        model = fully_shard(build(0), mesh=init_device_mesh("cpu", (4,)))
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            if not forgets:
                update.zero_grad()
            model(x / (0.0 if spoils and rank == 2 else 1.0)).square().mean().backward()
            update.step()

    def found(*planted):
        errors = World(4, watch=("training",), strict=False).run(program, *planted).findings
        return [(error.kind, error.ranks) for error in errors]

    assert found(False, False) == []
    assert found(True, False) == [("gradients kept", (0, 1, 2, 3))]
    assert ("not finite", (2,)) in found(False, True)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("forgotten", ["", "maker", "judge"])
def test_adversaries_clear_their_own_gradients(forgotten, to_none):
    """The judge still has its gradient when the maker's backward begins, and clears it before its own next step."""

    def program(rank):
        models = {"maker": build(0), "judge": build(1)}
        updates = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in models.items()}

        def step(name, loss):
            if name != forgotten:
                updates[name].zero_grad(set_to_none=to_none)
            loss.backward()
            for parameter in models[name].parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            updates[name].step()

        for at in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * at + rank))
            made = models["maker"](x)
            step("judge", models["judge"](made.detach()).square().mean())
            step("maker", models["judge"](made).square().mean())

    found = World(2, watch=("training",), strict=False).run(program).findings
    kept = {error.ranks for error in found if error.kind == "gradients kept"}
    assert kept == ({(0, 1)} if forgotten else set())
    assert forgotten or not found


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        (lambda rank: dist.barrier(), {"training"}),
        (lambda rank: train(build(rank), 0, rank, steps=1), {"data alike"}),
        (
            lambda rank: train(build(0), 0, 0, steps=1),
            {"data alike", "gradients kept, not updated"},
        ),
    ],
)
def test_what_was_not_judged_is_said(body, missing):
    result = World(2, watch=("training",), ignore=["gradients differ"]).run(body)
    assert missing <= set(result.not_judged)
    assert World(2).run(body).not_judged == {}
