"""Each wrong program is named with its culprit, at once, under every seed tried; each right one passes."""

import re
import sys

import pytest
import torch
import torch.distributed as dist

from isobit.errors import (
    DeadlockError,
    MismatchError,
    RankFailedError,
)
from isobit.simulator import World
from tests.simulator.expectations import expect


def test_a_rank_that_skips_a_collective():
    def body(rank):
        if rank != 2:
            dist.all_reduce(torch.ones(1))

    error = expect(
        DeadlockError, [2], body, match="all_reduce number 1 of group .* waiting for rank 2"
    )
    assert set(error.stacks) == {0, 1, 3}
    assert all(
        re.search(r"test_simulator_checkers.py:\d+ in body", lines[0])
        for lines in error.stacks.values()
    )
    assert error.waits == {0: [2], 1: [2], 3: [2]}


def test_a_collective_under_if_rank_is_zero():
    def body(rank):
        if rank == 0:
            dist.barrier()

    expect(DeadlockError, [0], body, match="ranks 1–3 already returned")


def test_collectives_reordered_on_two_groups():
    def body(rank):
        one, two = dist.new_group(), dist.new_group()
        for group in (two, one) if rank == 1 else (one, two):
            dist.all_reduce(torch.ones(1), group=group)

    error = expect(DeadlockError, [1], body, match="a cycle")
    assert 1 in error.cycle


def test_a_rank_that_skips_a_collective_of_a_subgroup():
    """It waits with the majority of all ranks; one wrong rank explains more than three."""

    def body(rank, wrong=6):
        groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
        for step in range(3):
            if (rank, step) != (wrong, 1):
                dist.all_reduce(torch.ones(2), group=groups[rank // 4])
            dist.all_reduce(torch.ones(2))

    expect(DeadlockError, [6], body, count=8, match="ranks 4, 5, 7 in all_reduce number 2")
    World(8).run(body, -1)


def test_cyclic_receives():
    def body(rank):
        x = torch.zeros(1)
        dist.recv(x, (rank + 1) % 3)
        dist.send(x, (rank - 1) % 3)

    error = expect(DeadlockError, [0, 1, 2], body, count=3, match="0 → 1 → 2 → 0")
    assert error.cycle == [0, 1, 2]


def test_sends_that_wait_for_their_receivers():
    """Fine while messages are small enough to be buffered, and a deadlock when they are not."""

    def body(rank):
        x = torch.zeros(1)
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(x, 1 - rank)
        return x.item()

    assert World(2).run(body).values == [1, 1]
    expect(DeadlockError, [0, 1], body, count=2, sends="rendezvous", match="send to rank")


def test_a_receive_from_a_rank_that_never_sends():
    def body(rank):
        if rank == 3:
            dist.recv(torch.zeros(1), 1)

    expect(DeadlockError, [1], body, match="recv from rank 1")


def test_polling_for_what_never_comes():
    def body(rank):
        if rank == 0:
            work = dist.barrier(async_op=True)
            while not work.is_completed():
                pass

    expect(DeadlockError, [0], body)


def test_a_store_key_that_nobody_sets():
    def body(rank):
        if rank == 1:
            dist.distributed_c10d._get_default_store().get("never")

    expect(DeadlockError, [1], body, match="never")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda x: dist.barrier(), "received: rank 3: barrier"),
        (lambda x: dist.all_reduce(x[:2]), r"\(2,\)"),
        (lambda x: dist.all_reduce(x.double()), "float64"),
        (lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), "MAX"),
    ],
    ids=["kind", "shape", "dtype", "op"],
)
@pytest.mark.sweep(2)
def test_a_mismatched_collective(wrong, match):
    def body(rank):
        x = torch.ones(4)
        if rank == 3:
            wrong(x)
        else:
            dist.all_reduce(x)

    error = expect(MismatchError, [3], body, match=match)
    assert re.search(r"test_simulator_checkers.py:\d+", error.stacks[3][0])


def test_a_mismatched_root():
    expect(
        MismatchError,
        [1],
        lambda rank: dist.broadcast(torch.ones(1), 2 if rank == 1 else 0),
        match="root 2",
    )


def test_a_mismatch_that_others_never_reach_is_still_one():
    """Rank 3 calls something else, and rank 0 nothing at all: no longer only a deadlock."""

    def body(rank):
        if rank == 3:
            dist.barrier()
        elif rank:
            dist.all_reduce(torch.ones(4))

    expect(MismatchError, [3], body)


def test_a_group_made_of_other_ranks():
    def body(rank):
        group = dist.new_group([0, 1, 2] if rank == 1 else [0, 1])
        if rank < 2:
            dist.barrier(group)

    error = expect(
        MismatchError, [1], body, match="group '1' of ranks 0, 1\n  received: rank 1 of ranks 0–2"
    )
    assert "in body" in error.stacks[1][0]
    expect(MismatchError, [3], lambda rank: dist.new_group([0, 3] if rank == 3 else [0, 1]))


def test_groups_made_in_another_order():
    def body(rank):
        for members in ([2, 3], [0, 2]) if rank == 2 else ([0, 2], [2, 3]):
            dist.new_group(members)

    expect(MismatchError, [2], body)


def test_messages_and_splits_that_do_not_fit():
    def message(rank):
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            dist.recv(torch.ones(4), 0)

    def splits(rank):
        sizes = [1, 1] if rank == 0 else [2, 0]
        dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], sizes)

    expect(MismatchError, [0, 1], message, match=r"\(3,\) float32\n  received: \(4,\)")
    expect(MismatchError, [0, 1], splits, count=2, match="fit")


def test_a_gather_into_too_short_a_list():
    def body(rank):
        dist.distributed_c10d._get_default_group().allgather(
            [[torch.ones(1)]], [torch.ones(1)]
        ).wait()

    expect(RankFailedError, [0, 1, 2], body, count=3, match="ArgumentError")


def test_the_root_cause_comes_first():
    """Rank 1 raises; the others wait for it, or for those who do."""

    def body(rank):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dist.barrier(halves[rank // 2])
        if rank == 1:
            raise ValueError("disk full")
        dist.all_reduce(torch.ones(1))

    error = expect(RankFailedError, [1], body, match="ValueError: disk full")
    assert isinstance(error.__cause__, ValueError)
    assert re.search(r"test_simulator_checkers.py:\d+ in body", error.stacks[1][0])


def test_a_reduction_that_cannot_be_computed_is_refused_on_every_rank():
    def body(rank):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)

    expect(RankFailedError, [0, 1], body, count=2, match="ArgumentError")


def unlike(rank):
    dist.all_reduce(torch.ones(3 if rank == 1 else 4))


def alone(rank):
    if rank != 1:
        dist.barrier()


@pytest.mark.parametrize("answer", ["nothing", "exit", "another", "again"])
@pytest.mark.parametrize(("body", "kind"), [(unlike, MismatchError), (alone, DeadlockError)])
@pytest.mark.sweep(3)
def test_what_a_program_catches_is_told_all_the_same(answer, body, kind):
    def catching(rank):
        try:
            body(rank)
        except Exception as error:
            if answer == "again":
                catching(rank)
            if answer == "exit":
                sys.exit(1)
            if answer == "another":
                raise KeyError("of the program") from error

    with pytest.raises(kind) as caught:
        World(4).run(catching)
    assert caught.value.ranks == (1,)
