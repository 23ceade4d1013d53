"""Handles that are not waited for, buffers that are touched too early, and tensors that differ are reported."""

import re
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import (
    DivergenceError,
    OrphanError,
    PendingError,
)
from isobit.simulator import World, same_on_all_ranks
from isobit.simulator.rank import memory_of, overlap
from tests.simulator.expectations import expect


def test_a_forgotten_wait():
    def body(rank):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        if rank != 1:
            work.wait()
        return x.sum().item()

    error = expect(OrphanError, [1], body, match="all_reduce number 1")
    assert re.search(r"test_simulator_buffers.py:\d+ in body", error.stacks[1][0])
    values = World(4, strict=False).run(body).values
    assert values[1] != values[1], "what was not waited for reads as NaN"
    assert values[0] == 8


def test_handles_that_torch_itself_drops_are_no_finding():
    """DDP's Join never waits for the signals that it sends."""

    def body(rank):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        with model.join():
            for _ in range(2 + rank):
                model(torch.ones(1, 2)).sum().backward()

    assert not World(3).run(body).findings


def test_a_message_that_nobody_receives():
    def body(rank):
        if rank == 0:
            dist.send(torch.ones(1), 2)

    expect(OrphanError, [0, 2], body, match="rank 2 to receive the message of rank 0")


def test_an_input_changed_before_wait():
    """It depends on the schedule whether the change arrives; where it does, the line is named."""

    def body(rank):
        x, out = torch.ones(1), [torch.empty(1) for _ in range(3)]
        work = dist.all_gather(out, x, async_op=True)
        if rank == 0:
            x.zero_()
        work.wait()

    found = [
        error for seed in range(10) for error in World(3, seed, strict=False).run(body).findings
    ]
    assert found
    assert all(isinstance(error, PendingError) and error.ranks == (0,) for error in found)


def test_a_write_into_a_share_of_a_buffer_in_progress():
    """Shares are watched as the one tensor that they are cut from, whatever the number of ranks."""

    def body(rank, where=None):
        flat, out = torch.arange(16.0), torch.empty(9)[:8]
        x = flat[:8]
        work = dist.all_to_all_single(out, x, async_op=True)
        if rank == 1 and where is not None:
            {"sent": x, "received": out, "beside": flat[8:]}[where][5] = 7.0
        work.wait()

    World(4).run(body)
    World(4).run(body, "beside")
    expect(PendingError, [1], partial(body, where="sent"), match="unchanged until wait")
    named = r"buffer 1 of rank 1 \(\(8,\) float32\)"
    expect(PendingError, [1], partial(body, where="received"), match=named)


def test_a_pending_result_read_is_named_where_it_is_read():
    def body(rank):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        early = x + 1 if rank == 2 else None
        work.wait()
        return early, x * 2

    error = expect(PendingError, [2], body, watch=["reads"], match="read")
    assert re.search(r"test_simulator_buffers.py:\d+ in body", error.stacks[2][0])


def test_memory_is_shared_by_the_byte():
    flat = torch.zeros(12)
    quarter = [memory_of([flat[at : at + 4]]) for at in range(9)]
    shared = {(a, b): overlap(quarter[a], quarter[b]) for a in (0, 4) for b in range(9)}
    assert shared == {(a, b): abs(a - b) < 4 for a in (0, 4) for b in range(9)}
    assert overlap(memory_of(flat.chunk(3)), memory_of([flat.view(3, 4).t()[1:2]]))
    assert not overlap(memory_of([flat[:0]]), memory_of([flat]))


def test_parameters_that_diverge():
    def body(rank):
        named = {"bias": torch.ones(3), "weight": torch.zeros(2, 3)}
        if rank in (1, 2):
            named["weight"][1, 2] = -0.0
        same_on_all_ranks(named)

    error = expect(DivergenceError, [1, 2], body, count=5, match=r"weight.*index \[1, 2\]")
    assert "0x80000000" in str(error)


def test_parameters_that_agree():
    World(3).run(lambda rank: same_on_all_ranks(torch.nn.LayerNorm(4)))


def test_results_of_one_call_in_the_same_memory():
    def body(rank, outputs):
        dist.all_gather(outputs(rank, dist.get_world_size()), torch.full((2,), float(rank)))

    def repeated_on_rank_1(rank, size):
        return [torch.empty(2)] * size if rank == 1 else [torch.empty(2) for _ in range(size)]

    wrong = partial(body, outputs=repeated_on_rank_1)
    expect(PendingError, [1], wrong, match="results 0 and 1 in the same memory")
    for right in (
        lambda _, size: [torch.empty(2) for _ in range(size)],
        lambda _, size: list(torch.empty(size, 2).unbind()),
    ):
        assert not World(3).run(partial(body, outputs=right)).findings
    empty = World(3).run(lambda rank: dist.all_gather([torch.empty(0)] * 3, torch.empty(0)))
    assert not empty.findings
