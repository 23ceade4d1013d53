"""A failed step leaves nothing behind; an error changes nothing; close() restores the model."""

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isobit import ArgumentError, UnsupportedError
from isobit.errors import AgreementError
from isobit.parallel import GlobalBatch, Gradients
from isobit.parallel.collectives.tree_collectives import BucketedAllReduce
from isobit.parallel.data import reducer
from tests.parallel.gradient_nets import (
    LENGTHS,
    collect,
    differing,
    loss_of,
    make,
    on_ranks,
    plain,
    read,
    sharded,
    step,
    whole,
)

BF16 = torch.bfloat16


def fail_in_forward(loss):
    raise ZeroDivisionError


def fail_in_backward(loss):
    """After the head's gradient has been taken, and before the table's."""

    def wrong(_):
        raise ZeroDivisionError

    node = loss.grad_fn
    while "norm" not in node.name().lower():
        node = next(above for above, _ in node.next_functions if above is not None)
    node.register_prehook(wrong)


@pytest.mark.parametrize(
    ("ranks", "micro", "wrap", "order", "wrong"),
    [
        (1, 4, plain, "rank", fail_in_forward),
        (1, 4, plain, "rank", fail_in_backward),
        (2, 2, plain, "rank", fail_in_backward),
        (2, 2, plain, "micro", fail_in_backward),
        (2, 2, plain, "micro", fail_in_forward),
        (2, 2, DistributedDataParallel, "rank", fail_in_forward),
        (2, 2, DistributedDataParallel, "rank", fail_in_backward),
        (2, 2, sharded, "micro", fail_in_backward),
        (2, 2, sharded, "micro", fail_in_forward),
        (4, 1, sharded, "micro", fail_in_backward),
    ],
)
def test_a_failed_step_leaves_nothing(ranks, micro, wrap, order, wrong, monkeypatch):
    monkeypatch.setattr(
        reducer, "BucketedAllReduce", functools.partial(BucketedAllReduce, bucket_bytes=4)
    )
    expected = whole(make(BF16))

    def run(_):
        net = make(BF16)
        wrapped = wrap(net)
        gradients = Gradients(wrapped, GlobalBatch(len(LENGTHS), ranks, micro, order))
        with pytest.raises(ZeroDivisionError):
            step(gradients, wrapped, wrong)
        assert {(p.grad, p.grad_dtype) for p in net.parameters()} == {(None, BF16)}
        step(gradients, wrapped)
        return read(net)

    for found in on_ranks(ranks, run):
        assert differing(found, expected) == []


def test_a_step_that_failed_on_one_rank_is_not_mixed_with_the_next():
    def run(rank):
        net = make()
        gradients = Gradients(net, GlobalBatch(len(LENGTHS), 2, 2))
        if rank:
            with pytest.raises(ZeroDivisionError):
                step(gradients, net, fail_in_forward)
        with pytest.raises(AgreementError, match="contributed another step"):
            step(gradients, net)
        return read(net)

    assert on_ranks(2, run) == [{}, {}]


def test_refusals_change_nothing():
    net = make(BF16)
    gradients = collect(net, 1, 2)
    before = read(net)
    with pytest.raises(ArgumentError, match="zero_grad"), gradients.micro_batch(0):
        pass
    assert differing(read(net), before) == []
    net.zero_grad()
    with (
        pytest.raises(ArgumentError, match="micro-batch 0: they run"),
        gradients.micro_batch(1),
    ):
        pass
    step(gradients, net)
    assert differing(read(net), before) == []
    net.zero_grad()
    net.idle.requires_grad_(True)
    with pytest.raises(ArgumentError, match="1 others, and 0"), gradients.micro_batch(0):
        pass
    with pytest.raises(ArgumentError, match="a group of 2 ranks"):
        Gradients(net, GlobalBatch(8, 2))


def test_refusals_of_engines():
    def run(_):
        with pytest.raises(UnsupportedError, match="order='rank'"):
            Gradients(DistributedDataParallel(make()), GlobalBatch(8, 2, 2, "micro"))
        with pytest.raises(UnsupportedError, match="tied"):
            Gradients(DistributedDataParallel(make(tied=True)), GlobalBatch(8, 2))
        with pytest.raises(UnsupportedError, match="gradient_as_bucket_view"):
            Gradients(
                DistributedDataParallel(make(), gradient_as_bucket_view=True), GlobalBatch(8, 2)
            )
        net = fully_shard(make())
        with pytest.raises(UnsupportedError, match="order='micro'"):
            Gradients(net, GlobalBatch(8, 2, 2))
        gradients = collect(net, 2, 2, "micro")
        before = read(net)
        with pytest.raises(ArgumentError, match="zero_grad"), gradients.micro_batch(0):
            pass
        return differing(read(net), before)

    assert on_ranks(2, run) == [[], []]


def test_another_group_than_the_wrappers_is_refused():
    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
        wrapped = DistributedDataParallel(make(), process_group=mesh["data"].get_group())
        with pytest.raises(ArgumentError, match="the group of DistributedDataParallel"):
            Gradients(wrapped, GlobalBatch(8, 2), group=mesh["tensor"].get_group())

    on_ranks(4, run)


def test_fully_shard_is_refused_where_it_would_divide_or_add_by_itself():
    def run(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "data"))
        group = mesh["data"].get_group()
        with pytest.raises(UnsupportedError, match="no replicas"):
            Gradients(fully_shard(make(), mesh=mesh), GlobalBatch(8, 2), group=group)
        with pytest.raises(UnsupportedError, match="the batch's ranks"):
            Gradients(fully_shard(make(), mesh=mesh["replicas"]), GlobalBatch(8, 2), group=group)
        double, forced = (
            fully_shard(make(dtype), mesh=mesh["data"]) for dtype in (torch.float64, torch.float32)
        )
        forced.set_force_sum_reduction_for_comms(True)
        for net in (double, forced):
            gradients = Gradients(net, GlobalBatch(8, 2), group=group)
            with pytest.raises(UnsupportedError, match="divide factor"):
                step(gradients, net)
        net = fully_shard(make(), mesh=mesh["data"])
        gradients = Gradients(net, GlobalBatch(8, 2), group=group)
        with pytest.raises(UnsupportedError, match="a second gradient of head"):
            step(gradients, net, lambda loss: loss.backward(retain_graph=True))
        return read(net)

    assert on_ranks(4, run) == [{}] * 4


def test_tied_weights_that_part_are_refused():
    net = make(tied=True)
    gradients = Gradients(net, GlobalBatch(8))
    net.bfloat16()
    with pytest.raises(ArgumentError, match="memory of their own"), gradients.micro_batch(0):
        pass


def test_two_backwards_of_a_share_are_refused():
    net = make()
    gradients = Gradients(net, GlobalBatch(8, 1, 2))

    def twice(share):
        for _ in range(2):
            loss_of(net, range(4), share).backward()

    with (
        pytest.raises(UnsupportedError, match="a second gradient of head"),
        gradients.micro_batch(0) as share,
    ):
        twice(share)
    assert read(net) == {}


@pytest.mark.parametrize(
    ("ranks", "wrap"), [(1, plain), (2, plain), (2, DistributedDataParallel), (2, sharded)]
)
def test_a_backward_after_the_block_is_refused(ranks, wrap):
    def run(_):
        net = wrap(make())
        gradients = Gradients(net, GlobalBatch(len(LENGTHS), ranks))
        with (
            pytest.raises(UnsupportedError, match="backward in"),
            gradients.micro_batch(0) as share,
        ):
            loss_of(net, gradients.batch.samples(gradients.rank), share)
        return read(net)

    assert on_ranks(ranks, run) == [{}] * ranks


def test_closed_the_model_is_as_it_was():
    net = make(BF16, tied=True)
    expected = whole(copy.deepcopy(net))
    names = list(net.state_dict())
    gradients = collect(net, 1, 4)
    gradients.close()
    gradients.close()
    assert differing(read(net), expected) == []
    assert net.head.weight is net.table.weight
    assert list(net.state_dict()) == names
    assert {p.grad_dtype for p in net.parameters()} == {BF16}
    net.zero_grad()
    assert differing(whole(net), expected) == []
    with pytest.raises(ArgumentError, match="make a new Gradients"), gradients.micro_batch(0):
        pass


def test_closed_engines():
    """fully_shard reduces by itself again; DistributedDataParallel keeps a hook once set, which refuses."""

    def run(_):
        net = fully_shard(make())
        gradients = collect(net, 2, 2, "micro")
        gradients.close()
        net.zero_grad()
        loss_of(net, range(8)).backward()
        averaged = read(net)
        wrapped = DistributedDataParallel(make())
        collect(wrapped, 2, 2).close()
        wrapped.zero_grad()
        with pytest.raises(UnsupportedError, match="no_sync"):
            loss_of(wrapped, range(8)).backward()
        return averaged

    expected = whole(make())
    for found in on_ranks(2, run):
        assert differing(found, expected) == []  # the mean of two equal values
