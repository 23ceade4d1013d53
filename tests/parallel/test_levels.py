"""Levels (rank, host, rack) have the bits, the bytes and the messages that they promise.

1. Sums, norms and gradients over two and three levels are those of the flat group, with each carrier.
2. A level that adds in arrival order, and stock's hierarchical all-reduce, are another sum.
3. Meshes and groups that are no hierarchy of consecutive ranks, and DTensors, are refused by name.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import isobit
from benchmarks import levels as measured
from isobit import ArgumentError, CutError, UnsupportedError, bits
from isobit.errors import IsobitError
from isobit.guards import rank_agreement
from isobit.order.tree import merge
from isobit.parallel import GlobalBatch, Gradients, Levels, LossMeter, all_reduce
from isobit.parallel.collectives import levels, transfers
from isobit.parallel.collectives.levels import check_same_hosts
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World
from tests.parallel.gradient_nets import LENGTHS, differing, make, read, step, whole

NAMES = ("rack", "host", "rank")


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


@pytest.mark.parametrize("ranks", [8, 64, pytest.param(512, marks=pytest.mark.full)])
def test_one_digest_and_the_messages_of_the_model(ranks):
    found = list(measured.simulated(ranks))
    assert [f["shape"] for f in found] == list(measured.SHAPES[ranks])
    assert len({f["digest"] for f in found}) == 1
    assert [f["messages"] for f in found] == [f["model"] for f in found]
    assert len({f["model"] for f in found}) == 3  # the count tells them apart
    assert {f["bytes"] for f in found} == {found[0]["whole"]}
    assert len({f["stock"] for f in found}) == 3  # the control: another sum for each


@pytest.mark.full
@pytest.mark.parametrize("ranks", [4, 8])
def test_on_gloo(ranks):
    found = list(measured.on_gloo(ranks))
    assert len(found) == len(measured.SHAPES[ranks])
    assert all(measured.agrees(f) for f in found)
    assert {f["digest"] for f in found} == {
        f["digest"] for f in (measured.simulated(ranks) if ranks == 8 else found[:1])
    }
    assert len({f["stock"] for f in found}) > 1


def wrapped(kind, net):
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp2":
        fully_shard(net.block)
        return fully_shard(net)
    return net


def train(kind, rank):
    """One step on four ranks in two levels, with two micro-batches; and small sums of a step."""
    made = Levels(mesh_of(2, 2))
    net = make()
    model = wrapped(kind, net)
    batch = GlobalBatch(len(LENGTHS), 4, 2, "micro" if kind == "fsdp2" else "rank")
    step(Gradients(model, batch, group=made), model)
    norm = isobit.parallel.clip_grad_norm_(model, 1e9, group=made)
    meter = LossMeter()
    meter.add(torch.tensor([1.0, 2.0**-rank]))
    agreed = rank_agreement({"norm": norm}, made)
    wrong = rank_agreement({"rank": norm * (rank == 2)}, made, on_difference="report")
    named = [d.rank for d in wrong.differences]
    return read(net), norm, meter.value(made), agreed.ranks, named


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
def test_carriers_norm_loss_and_agreement(kind):
    expected = whole(make())
    norm = isobit.optim.get_total_norm(expected.values())
    for grads, found, loss, ranks, named in World(4).run(partial(train, kind)).values:
        assert differing(grads, expected) == []
        assert bits.equal(found, norm)
        assert loss == (4 + sum(2.0**-r for r in range(4))) / 8
        assert ranks == (0, 1, 2, 3)
        assert named == [2]


def test_nested_groups_and_uneven_sizes():
    def add(rank):
        mesh = mesh_of(2, 2, 2)
        inner = Levels(mesh["host", "rank"])
        nested = Levels.from_groups(inner, mesh.get_group("rack"))
        assert nested.groups == Levels(mesh).groups
        assert (nested.rank, nested.size, inner.size) == (rank, 8, 4)
        sums = [measured.values(rank, n) for n in (0, 1, 7, 8, 1001)]
        works = [all_reduce(x, nested, async_op=True) for x in sums]
        assert all(work.wait() for work in works)
        half = measured.values(rank, 9)
        all_reduce(half, inner)  # each rack by itself
        return [*sums, half]

    for rank, found in enumerate(World(8).run(add).values):
        for got in found[:-1]:
            wanted = [measured.values(r, len(got)) for r in range(8)]
            assert bits.equal(got, merge(wanted, torch.add))
        rack = range(rank // 4 * 4, rank // 4 * 4 + 4)
        assert bits.equal(found[-1], merge([measured.values(r, 9) for r in rack], torch.add))


def test_a_level_in_arrival_order_is_caught(monkeypatch):
    arrivals = []

    def as_they_arrive(rows, total):
        arrivals.append(len(rows))
        turn = len(arrivals) % len(rows)  # by who came first, as on a network
        total.copy_(sum([*rows[turn:], *rows[:turn]][1:], [*rows[turn:], *rows[:turn]][0]))

    def add(rank):
        x = measured.values(rank, 1024)
        all_reduce(x, Levels(mesh_of(2, 4)))
        return bits.digest(x)

    right = set(World(8).run(add).values)
    monkeypatch.setattr(transfers, "add_rows", as_they_arrive)
    assert set(World(8).run(add).values) != right
    assert len(right) == 1
    assert arrivals


def refused(make_levels, ranks=4):
    """The error that every rank gets, or none."""

    def run(rank):
        with pytest.raises(IsobitError) as caught:
            make_levels()
        return f"{type(caught.value).__name__}: {caught.value}"

    found = set(World(ranks).run(run).values)
    assert len(found) == 1, found
    return found.pop()


def test_usual_mistakes():
    turned = init_device_mesh
    assert "axes from the outermost to the innermost" in refused(
        lambda: Levels(turned("cpu", (2, 2), mesh_dim_names=("rank", "host")))
    )
    assert "a mesh of all 4 ranks" in refused(lambda: Levels(mesh_of(1, 2)))
    assert "levels of (3, 2) ranks" in refused(lambda: Levels(mesh_of(2, 3)), 6)
    assert "inner group of consecutive ranks" in refused(
        lambda: Levels.from_groups(*reversed(Levels(mesh_of(2, 2)).groups))
    )
    assert "process groups that this rank is part of" in refused(Levels.from_groups)
    assert "a group of 4 ranks, as the batch is cut" in refused(
        lambda: Gradients(make(), GlobalBatch(8, 4), group=Levels(mesh_of(2, 2)["rank"]))
    )
    assert "one process group for tensor" in refused(
        lambda: TensorParallelGroup.of(Levels(mesh_of(2, 2)))
    )
    assert "one process group" in refused(lambda: isobit.guards.check_links(Levels(mesh_of(2, 2))))


def test_hosts(monkeypatch):
    check_same_hosts(["a", "a", "b", "b"], 2)
    check_same_hosts(["a", "b"], 1)
    check_same_hosts(["a"] * 8, 4)
    for hosts, inner, said in (
        (["a"] * 5 + ["b"] * 3, 4, "unequal hosts: 5 on a, 3 on b"),
        (["a"] * 6 + ["b"] * 2, 2, "unequal hosts"),
        (["a", "b"] * 4, 4, "alternate between hosts"),
        (["a", "a", "b", "b", "c", "c", "d", "d"], 4, "4 ranks of 2 hosts"),
    ):
        with pytest.raises(CutError, match=said):
            check_same_hosts(hosts, inner)
    # The names come from the ranks themselves.
    monkeypatch.setattr(levels, "host_name", lambda: "ab"[dist.get_rank() == 3])
    assert "unequal hosts: 3 on a, 1 on b" in refused(lambda: Levels(mesh_of(2, 2)))
    made = World(4).run(lambda rank: Levels(mesh_of(2, 2), check_hosts=False).size).values
    assert made == [4] * 4


def test_dtensors_are_refused_with_the_numbers():
    """DTensor completes sums by stock reductions, which is why no rule is registered for it."""

    def run(rank):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        weight = distribute_tensor(torch.ones(8, 64), mesh, [Shard(1)])
        layer = isobit.nn.Linear(64, 8)
        layer.weight = torch.nn.Parameter(weight)
        for call in (
            lambda: isobit.linear(torch.ones(2, 64), weight),
            lambda: isobit.softmax(distribute_tensor(torch.ones(4), mesh, [Replicate()])),
            lambda: layer(torch.ones(2, 64)),
            lambda: Gradients(layer, GlobalBatch(8, 4)),
            lambda: all_reduce(weight),
        ):
            with pytest.raises(UnsupportedError, match=r"DTensor .* of 4 ranks, .* this rank has"):
                call()
        isobit.linear(torch.ones(2, 16), weight.to_local())  # the remedy
        mine = measured.values(rank, 1000)
        stock = torch.distributed.tensor.DTensor.from_local(mine.clone(), mesh, [Partial()])
        all_reduce(mine)
        return int((stock.full_tensor() != mine).sum())

    assert all(count > 100 for count in World(4).run(run).values)  # of 1000 sums


def test_outside_the_mesh():
    def run(rank):
        pair = dist.new_group([0, 1])
        if rank < 2:
            return Levels.from_groups(pair).size
        with pytest.raises(ArgumentError, match="part of"):
            Levels.from_groups(pair)
        return 2

    assert World(4).run(run).values == [2] * 4
