"""Small programs of many kinds against the simulator: right ones run through with right values, wrong ones are found.

Theorem: with every seed, a right program returns what torchrun would give, and a wrong one raises a SimulationError.
"""

import os
import queue
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from isobit.errors import SimulationError
from isobit.simulator import World

SEEDS = range(3)
RIGHT, WRONG = {}, {}


def right(expected):
    """Adds a program and what its ranks return."""
    return lambda program: RIGHT.setdefault(program.__name__, (program, expected)) and program


def wrong(program):
    WRONG[program.__name__] = program
    return program


@right([[3.0, 2.0], [0.0, 2.0], [1.0, 2.0], [2.0, 2.0]])
def ring_of_batches(rank):
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % 4),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % 4),
        ]
    )
    for work in works:
        work.wait()
    mine.fill_(2.0)  # after wait, as one may
    return [theirs[0].item(), mine[0].item()]


@right([(1.0, 2.0)] * 4)
def messages_by_tag(rank):
    if rank % 2 == 0:
        works = [dist.isend(torch.tensor([float(tag - 4)]), rank + 1, tag=tag) for tag in (5, 6)]
        for work in works:
            work.wait()
        return 1.0, 2.0
    first, second = torch.empty(1), torch.empty(1)
    dist.recv(second, rank - 1, tag=6)
    dist.recv(first, rank - 1, tag=5)
    return first.item(), second.item()


@right([6.0] * 4)
def writes_beside_what_is_sent(rank):
    """Other bytes of one storage, and a read of what is sent."""
    flat = torch.zeros(8)
    flat[:4] = rank
    every = torch.empty(16)
    work = dist.all_gather_into_tensor(every, flat[:4], async_op=True)
    flat[4:] = flat[:4].sum()
    work.wait()
    flat[:4] = 9.0
    return every.view(4, 4)[:, 0].sum().item()


@right([6.0] * 4)
def thread_per_step(rank):
    x = torch.tensor([float(rank)])
    thread = threading.Thread(target=lambda: dist.all_reduce(x))
    thread.start()
    thread.join()
    return x.item()


@right([10] * 4)
def prefetches_on_a_thread(rank):
    batches = queue.Queue(maxsize=2)

    def load():
        for batch in (1, 2, 3, 4, None):
            time.sleep(0.1)
            batches.put(batch)

    threading.Thread(target=load, daemon=True).start()
    total = torch.zeros(1, dtype=torch.int64)
    while (batch := batches.get()) is not None:
        share = torch.tensor([batch])
        dist.all_reduce(share)
        total += share // 4
    return total.item()


@right([4] * 4)
def counts_through_the_store(rank):
    store = c10d._get_default_store()
    time.sleep(0.01 * rank)
    store.add("arrived", 1)
    while store.add("arrived", 0) < 4:
        time.sleep(0.001)
    return store.add("arrived", 0)


@right([True] * 4)
def waits_for_a_time(rank):
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.2 * rank:
        pass
    dist.barrier()
    return time.perf_counter() - begun >= 0.2 * rank


@right([4.0] * 4)
def polls_a_handle(rank):
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0)
    return x[0].item()


@wrong
def writes_before_wait(rank):
    x = torch.ones(8)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


@wrong
def source_of_a_broadcast_is_overwritten(rank):
    x = torch.ones(8)
    work = dist.broadcast(x, 0, async_op=True)
    if rank == 0:
        x.zero_()
    work.wait()


@wrong
def sent_view_is_overwritten_through_its_base(rank):
    base, theirs = torch.ones(8), torch.empty(4)
    work = dist.isend(base[2:6], (rank + 1) % 4)
    base.data[5] = 3.0
    dist.recv(theirs, (rank - 1) % 4)
    work.wait()


@wrong
def one_rank_exits_early(rank):
    if rank == 1:
        sys.exit(3)
    dist.barrier()


@wrong
def thread_of_one_rank_calls_another_collective(rank):
    x = torch.ones(1)
    thread = threading.Thread(
        target=(dist.all_reduce if rank else dist.broadcast), args=(x, *(() if rank else (0,)))
    )
    thread.start()
    thread.join()


@wrong
def two_threads_race_on_one_group(rank):
    """Which of them comes first differs from rank to rank: the collectives meet in another order."""

    def call(collective, delay):
        time.sleep(delay)
        collective()

    delays = (0.1, 0.2) if rank % 2 else (0.2, 0.1)
    threads = [
        threading.Thread(target=call, args=(dist.barrier, delays[0])),
        threading.Thread(target=call, args=(lambda: dist.all_reduce(torch.ones(1)), delays[1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@wrong
def a_file_that_never_comes(rank):
    while rank == 3 and not os.path.exists("/nowhere/ready"):
        pass
    dist.barrier()


@pytest.mark.parametrize("name", RIGHT)
def test_right_program_returns_what_it_should(name):
    program, expected = RIGHT[name]
    for seed in SEEDS:
        assert World(4, seed, watch=("bits", "reads", "training")).run(program).values == expected


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sweep(1)
def test_wrong_program_is_found_with_every_seed(name):
    for seed in SEEDS:
        with pytest.raises(SimulationError) as caught:
            # Little patience: processes that other tests left running might still change what a rank polls for.
            World(4, seed, patience=3).run(WRONG[name])
        assert caught.value.ranks
