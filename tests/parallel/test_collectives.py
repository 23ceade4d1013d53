"""The sum over 2 and 4 gloo processes has the bits of order.tree.merge: rank r is leaf r.

All checks run in one launch of four processes; pairs of them are the groups of two. Left folds,
arrival order and gloo's own all_reduce must differ, or the inputs could not show a wrong order.
"""

import functools
import multiprocessing
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from isobit import bits
from isobit.errors import ArgumentError, CutError
from isobit.order.tree import merge
from isobit.parallel.collectives import transfers
from isobit.parallel.collectives.communicator import Communicator, communicator_of
from isobit.parallel.collectives.levels import Levels
from isobit.parallel.collectives.tree_collectives import (
    BucketedAllReduce,
    all_gather,
    all_reduce,
    all_reduce_rounded,
    reduce_scatter,
)

# Of 524,287 elements one half is a long message, the other is not.
SIZES = (0, 1, 2, 3, 5, 64, 1001, (1 << 19) - 1, 3 * (1 << 18) + 7)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def leaves(count, size, dtype=torch.float32):
    """A tensor a rank, the same in every process: full mantissas, exponents over 40 powers of two."""
    found = []
    for rank in range(count):
        generator = torch.Generator().manual_seed(1000 * rank + size)
        scale = torch.randint(-20, 20, (size,), generator=generator)
        found.append(torch.ldexp(torch.randn(size, dtype=dtype, generator=generator), scale))
    return found


def same(found, wanted):
    assert bits.equal(found, wanted), bits.first_difference(found, wanted)


def through(values, world):
    """The group's all-reduce of one value a rank."""
    mine = values[dist.get_rank(world)].clone()
    all_reduce(mine, world)
    return mine


@check
def bits_are_the_trees(world, pair):
    for group in (world, pair):
        for size in SIZES:
            for dtype in (torch.float32, torch.float64):
                values = leaves(dist.get_world_size(group), size, dtype)
                same(through(values, group), merge(values, torch.add))


@check
def special_values(world, pair):
    nan, inf = float("nan"), float("inf")
    edges = torch.tensor([0.0, -0.0, nan, inf, -inf, 1e-45, -1e-45, 3e38, 1.0])
    values = [edges.roll(shift).repeat_interleave(len(edges)) for shift in range(4)]
    values[1] = edges.repeat(len(edges))
    wanted = merge(values, torch.add)
    wanted = torch.where(wanted.isnan(), nan, wanted)  # one NaN, whatever the operands
    same(through(values, world), wanted)
    torch.set_flush_denormal(True)
    try:
        found = through(values, world)
    finally:
        torch.set_flush_denormal(False)
    same(found, wanted)
    assert through([torch.tensor([-0.0])] * 4, world).signbit().all()


@check
def wrong_orders_and_gloos_own_differ(world, pair):
    values = leaves(4, 5000)
    tree, mine = merge(values, torch.add), values[world.rank()].clone()
    assert not bits.equal(functools.reduce(torch.add, values), tree)
    assert not bits.equal(merge([values[i] for i in (2, 0, 3, 1)], torch.add), tree)
    dist.all_reduce(mine)
    assert not bits.equal(mine, tree)


@check
def storage_does_not_matter(world, pair):
    values = leaves(4, 600)
    wanted = merge(values, torch.add).view(20, 30)
    mine = values[world.rank()].view(20, 30)
    for stored in (mine.t().contiguous().t(), torch.stack([mine, mine], 2)[:, :, 0]):
        assert not stored.is_contiguous()
        all_reduce(stored)
        same(stored.contiguous(), wanted)
    parameter = torch.nn.Parameter(mine.clone())
    all_reduce(parameter)
    same(parameter, wanted)


@check
def several_at_once(world, pair):
    sizes = (1, 100_003, 7, 300_000)
    values = {size: leaves(4, size) for size in sizes}
    mine = {size: values[size][world.rank()].clone() for size in sizes}
    works = [all_reduce(mine[size], async_op=True) for size in sizes]
    in_thread = Communicator.uses_send_recv(communicator_of(world), mine[1])
    assert all(work._begun == in_thread for work in works)  # on gloo beside the caller
    same(
        through(leaves(4, 99), world), merge(leaves(4, 99), torch.add)
    )  # one that waits, past those that do not
    futures = [work.get_future() for work in works]
    for size, work, future in zip(sizes, works, futures, strict=True):
        same(future.wait(), merge(values[size], torch.add))
        assert work.wait()
        assert work.is_completed()
        assert work.result()[0] is mine[size]


@check
def shares(world, pair):
    for group in (world, pair):
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        for size in (0, 1, 33, 200_001):
            values = leaves(ranks, size * ranks)
            mine, total, whole = values[rank].clone(), torch.empty(size), torch.empty(ranks, size)
            reduce_scatter(total, mine, group)
            same(total, merge(values, torch.add)[rank * size : (rank + 1) * size])
            same(mine, values[rank])
            all_gather(whole, total, group)
            same(whole.view(-1), merge(values, torch.add))
            numbers = torch.empty(ranks, dtype=torch.int64)
            work = all_gather(numbers, torch.tensor([rank]), group, async_op=True)
            work.wait()
            assert numbers.tolist() == list(range(ranks))


@check
def two_levels_are_the_flat_tree(world, pair):
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][world.rank() % 2]
    levels = Levels.from_groups(pair, outer)
    for size in (1, 6, 1001, 500_000):
        values = leaves(4, size)
        mine = values[world.rank()].clone()
        all_reduce(mine, levels)
        same(mine, merge(values, torch.add))
        mine = values[world.rank()].clone()
        all_reduce(mine, levels, async_op=True).wait()
        same(mine, merge(values, torch.add))
    with pytest.raises(CutError, match="consecutive"):
        Levels.from_groups(outer, pair)


@check
def sums_are_rounded_before_they_return(world, pair):
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][world.rank() % 2]
    for group in (world, Levels.from_groups(pair, outer)):
        for size in (0, 1, 6, 1001, (1 << 19) - 1):
            values = leaves(4, size)
            rounded = torch.empty(size, dtype=torch.bfloat16)
            all_reduce_rounded(values[world.rank()].clone(), rounded, group).wait()
            same(rounded, merge(values, torch.add).bfloat16())


@check
def buckets_launch_in_one_order(world, pair):
    sizes = (5, 70_000, 3, 40_000, 80_000)
    exchange = BucketedAllReduce(sizes, world, bucket_bytes=4 * 75_000)
    held = []
    for step in range(
        2
    ):  # the second use must not see the first, nor write to what the first has handed out
        values = [leaves(4, size + step)[:] for size in sizes]
        order = torch.randperm(
            len(sizes), generator=torch.Generator().manual_seed(world.rank() + step)
        ).tolist()
        for index in order:
            exchange.ready(index, values[index][world.rank()][: sizes[index]])
        sums = [
            merge([v[:size] for v in value], torch.add)
            for size, value in zip(sizes, values, strict=True)
        ]
        held += zip(exchange.finish(), sums, strict=True)
    for total, wanted in held:
        same(total, wanted)
    with pytest.raises(ArgumentError, match="none for"):
        exchange.finish()
    exchange.ready(0, torch.zeros(5))
    with pytest.raises(ArgumentError, match="tensor 0 again"):
        exchange.ready(0, torch.zeros(5))


@check
def bytes_on_the_wire(world, pair):
    """Counted where each message is posted: the payload, without TCP's and gloo's own headers."""
    sent = []
    post = Communicator.send

    def counted(line, tensor, peer, tag):
        sent.append(tensor.numel() * tensor.element_size())
        return post(line, tensor, peer, tag)

    Communicator.send = counted
    try:
        for size in (8, 1001, 3 * (1 << 18)):
            sent.clear()
            all_reduce(torch.ones(size))
            everyones = torch.tensor([sum(sent)])
            dist.all_reduce(everyones)  # whole numbers: any order
            assert (
                everyones.item() == 2 * 3 * size * 4
            )  # of all four ranks: P times 2(P−1)/P of the data
            assert size % 4 or sum(sent) == 2 * 3 * size
    finally:
        Communicator.send = post


@check
def collectives_have_the_same_bits(world, pair):
    """The path of other transports, here over gloo's own collectives."""
    Communicator.uses_send_recv, kept = lambda line, tensor: False, Communicator.uses_send_recv
    transfers.CHUNK_BYTES, piece = 1 << 16, transfers.CHUNK_BYTES
    try:
        bits_are_the_trees(world, pair)
        special_values(world, pair)
        several_at_once(world, pair)
        shares(world, pair)
    finally:
        Communicator.uses_send_recv, transfers.CHUNK_BYTES = kept, piece


@check
def messages_do_not_matter(world, pair):
    """Many short messages both ways, as a long tensor has."""
    transfers.MESSAGE_BYTES, message = 1 << 14, transfers.MESSAGE_BYTES
    try:
        bits_are_the_trees(world, pair)
        several_at_once(world, pair)
    finally:
        transfers.MESSAGE_BYTES = message


@check
def refusals(world, pair):
    three = dist.new_group([0, 1, 2])
    if world.rank() < 3:
        with pytest.raises(CutError, match="3 ranks\n  remedy: form groups of 2"):
            all_reduce(torch.ones(3), three)
    else:
        with pytest.raises(ArgumentError, match="part of"):
            all_reduce(torch.ones(3), three)
    for dtype, remedy in ((torch.bfloat16, "round the sum"), (torch.int64, "has no order")):
        with pytest.raises(ArgumentError, match=remedy):
            all_reduce(torch.ones(3, dtype=dtype))
    with pytest.raises(ArgumentError, match="pad"):
        reduce_scatter(torch.ones(2), torch.ones(7))


def serve(store, rank, line):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, 4), rank=rank, world_size=4)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for name, function in CHECKS.items():
        try:
            function(dist.group.WORLD, pair)
            line.send((name, ""))
        except BaseException as error:  # also what pytest.raises raises
            line.send((name, f"rank {rank}: {error!r}"))
            return
    line.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes():
    context = multiprocessing.get_context("spawn")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = [], []
        for rank in range(4):
            ours, theirs = context.Pipe()
            processes.append(
                context.Process(target=serve, args=(str(Path(folder) / "store"), rank, theirs))
            )
            processes[-1].start()
            theirs.close()
            lines.append(ours)
        for line in lines:
            while line.poll(240):
                try:
                    name, said = line.recv()
                except EOFError:
                    break
                found.setdefault(name, []).append(said)
        for process in processes:
            process.join(30)
            process.kill()
        codes = [process.exitcode for process in processes]
    return found, codes


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(outcomes, name):
    assert outcomes[0].get(name) == [""] * 4


def test_processes_end_by_themselves(outcomes):
    assert outcomes[1] == [0] * 4
