"""Faults happen where they are planted, and what they break is named with its rank."""

import pytest
import torch
import torch.distributed as dist

from isobit import bits
from isobit.errors import (
    ArgumentError,
    CorruptionError,
    DeadlockError,
    DivergenceError,
    NonFiniteError,
    RankLostError,
)
from isobit.simulator import (
    Die,
    Drop,
    Flip,
    PlantNaN,
    Stall,
    Straggle,
    World,
    draw_faults,
    same_on_all_ranks,
)


def steps(rank, count=4):
    x = torch.full((3,), 1.0 + rank)
    for _ in range(count):
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


@pytest.mark.parametrize("fault", [Die(2, 3), Stall(2, 3)], ids=lambda f: type(f).__name__)
def test_a_rank_that_is_gone(fault):
    with pytest.raises(RankLostError) as caught:
        World(4, faults=[fault]).run(steps)
    assert caught.value.ranks == (2,)


def test_a_program_cannot_swallow_its_own_death():
    def body(rank):
        try:
            dist.barrier()
        except Exception:
            return "lived on"

    with pytest.raises(RankLostError) as caught:
        World(2, faults=[Die(1)]).run(body)
    assert caught.value.ranks == (1,)
    assert caught.value.result.values == ["lived on", None], "the others may handle their loss"


def test_a_stall_longer_than_the_timeout():
    with pytest.raises(RankLostError, match=r"(?s)rank 1 .* s after") as caught:
        World(3, faults=[Stall(1, 2, seconds=4000)]).run(steps)
    assert caught.value.ranks == (1,)
    World(3, faults=[Stall(1, 2, seconds=1000)]).run(steps)


def test_a_straggler_costs_time_and_nothing_else():
    plain, slow = World(3).run(steps, 20), World(3, faults=[Straggle(1, 1, 50.0)]).run(steps, 20)
    assert all(map(bits.equal, plain.values, slow.values))
    assert min(slow.clocks) > 2 * max(plain.clocks)


def test_the_dead_make_no_further_call_whatever_their_program_catches():
    def insists(rank, leave):
        try:
            steps(rank)
        except BaseException:
            if leave:
                raise SystemExit(1)  # noqa: B904 -- as scripts do
        finally:
            dist.barrier()

    for leave in (False, True):
        with pytest.raises(RankLostError, match="its crash at call 2") as caught:
            World(3, faults=[Die(1, 2)]).run(insists, leave)
        assert caught.value.ranks == (1,)
        assert " in steps" in caught.value.stacks[1][0]  # not where its program tried again


def test_a_dropped_part_and_a_dropped_message():
    def message(rank):
        if rank == 0:
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 0)

    for body, fault in ((steps, Drop(2, 2)), (message, Drop(0))):
        with pytest.raises(DeadlockError, match="was dropped") as caught:
            World(3, faults=[fault]).run(body)
        assert caught.value.ranks == (fault.rank,)


def test_a_flipped_bit_in_a_sum_reaches_all_and_is_named_by_its_bits():
    flip = Flip(1, 2, element=2, bit=22)
    wrong = World(3, faults=[flip]).run(steps).values
    right = World(3).run(steps).values
    assert not bits.equal(wrong[0], right[0])
    assert all(bits.equal(value, wrong[0]) for value in wrong)
    with pytest.raises(CorruptionError) as caught:
        World(3, faults=[flip], watch=["bits"]).run(steps)
    assert caught.value.ranks == (1,)


def test_a_flipped_bit_to_one_rank_makes_it_diverge():
    def body(rank):
        weight = torch.arange(6.0).reshape(2, 3)
        dist.broadcast(weight, 0)
        same_on_all_ranks({"weight": weight})

    flip = Flip(0, 1, element=4, bit=0, to=2)
    with pytest.raises(DivergenceError, match=r"(?s)weight.*index \[1, 1\]") as caught:
        World(4, faults=[flip]).run(body)
    assert caught.value.ranks == (2,)
    with pytest.raises(CorruptionError) as corrupted:
        World(4, faults=[flip], watch=["bits"]).run(body)
    assert corrupted.value.ranks == (0,)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_a_flipped_message_of_any_dtype(dtype):
    def body(rank):
        x = torch.tensor([0, 1, 0]).to(dtype)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return x

    sent, got = World(2, faults=[Flip(0, 1, element=1, bit=0)]).run(body).values
    part = bits.first_difference(sent, got)
    assert (part.index, part.count) == ((1,), 1)


def test_faults_reach_any_layout_and_spare_what_cannot_hold_them():
    def body(rank):
        x = torch.ones(2, 3).t()
        dist.all_reduce(x)
        whole, nothing = torch.ones(2, dtype=torch.int64), torch.empty(0)
        dist.all_reduce(whole)
        dist.all_reduce(nothing)
        dist.barrier()
        return x.isnan().sum().item(), x.eq(2).sum().item(), whole.tolist()

    assert World(2, faults=[PlantNaN(0, 1, 4)]).run(body).values == [(1, 5, [2, 2])] * 2
    assert World(2, faults=[Flip(0, 1, 4, 22)]).run(body).values == [(0, 5, [2, 2])] * 2
    for fault in (PlantNaN(1, 2), PlantNaN(1, 3), PlantNaN(1, 4), Flip(1, 3), Flip(1, 4)):
        assert World(2, faults=[fault]).run(body).values == [(0, 6, [2, 2])] * 2


def test_the_first_nan_is_named():
    with pytest.raises(NonFiniteError, match="element 1") as caught:
        World(3, faults=[PlantNaN(2, 3, element=1)], watch=["finite"]).run(steps)
    assert caught.value.ranks == (2,)
    assert all(
        value.isnan()[1] for value in World(3, faults=[PlantNaN(2, 3, element=1)]).run(steps).values
    )


def test_faults_of_ranks_that_do_not_exist_are_refused():
    with pytest.raises(ArgumentError):
        World(2, faults=[Die(2)])
    with pytest.raises(ArgumentError):
        World(2, watch=["everything"]).run(steps)


def test_drawn_faults_of_a_lethal_kind_name_their_rank():
    for seed in range(10):
        (fault,) = draw_faults(seed, 4, 4, kinds=["Die", "Stall", "Drop"])
        with pytest.raises((RankLostError, DeadlockError)) as caught:
            World(4, seed, faults=[fault]).run(steps)
        assert caught.value.ranks == (fault.rank,)
