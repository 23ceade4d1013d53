"""Probes check tensors on every rank; the comparison with one worker passes and fails where it should."""

import doctest

import pytest
import torch
import torch.distributed as dist

from isobit.errors import ArgumentError, TrainingError
from isobit.foundation import majority
from isobit.foundation.majority import count_votes
from isobit.simulator import World, compare_with_one, probe
from isobit.simulator.checkers.replicas import find_replicas
from isobit.simulator.checkers.step_record import Start

WATCH = ("training",)


def speak(rank, odd, say):
    say("weights", torch.tensor([1.5, float(rank) if rank in odd else -1.0]))
    dist.barrier()


def test_same_names_the_odd_rank_and_the_index():
    World(4, watch=WATCH).run(speak, (), probe.same)
    with pytest.raises(TrainingError, match=r"first at \[1\]") as told:
        World(4, watch=WATCH).run(speak, (2,), probe.same)
    assert (told.value.kind, told.value.ranks) == ("tensors differ", (2,))


def test_distinct_names_the_ranks_that_are_alike():
    World(4, watch=WATCH).run(speak, (0, 1, 2, 3), probe.distinct)
    with pytest.raises(TrainingError) as told:
        World(4, watch=WATCH).run(speak, (1, 2), probe.distinct)
    assert (told.value.kind, told.value.ranks) == ("tensors alike", (0, 3))


def test_groups_are_held_to_apart():
    def halves(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        probe.same("half", torch.tensor([rank // 2]), groups[rank // 2])

    World(4, watch=WATCH).run(halves)


def test_outside_a_world_a_probe_says_nothing():
    probe.same("x", torch.ones(1))
    probe.distinct("x", torch.ones(1))


def test_examples_run():
    for module in (probe, majority):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed


def test_the_minority_is_odd_and_without_one_all_are():
    assert count_votes({0: "a", 1: "a", 2: "b"}).suspects == (2,)
    assert count_votes({0: "a", 1: "b"}).suspects == (0, 1)
    assert count_votes({3: "a", 1: "b", 2: "a"}).groups == ((2, 3), (1,))


def test_replicas_begin_alike_in_more_than_constants_and_send_no_messages():
    alike, other, constant = (
        Start(("d",), ("s",), True),
        Start(("e",), ("s",), True),
        Start(("z",), ("s",), False),
    )
    assert find_replicas({0: alike, 1: alike, 2: other}) == [(0, 1)]
    assert find_replicas({0: constant, 1: constant}) == []
    assert find_replicas({0: alike, 1: alike}, [frozenset((0, 1))]) == []


def scaled(rank, factor):
    """Whole and right on one rank; on more, `factor` times the gradient."""
    torch.manual_seed(0)
    model, ranks = torch.nn.Linear(3, 3), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 3).chunk(ranks)[rank]).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        parameter.grad *= factor if ranks > 1 else 1
    optimizer.step()


def test_one_worker_agrees_within_the_tolerance_only():
    world = World(2, watch=WATCH)
    compare_with_one(world, scaled, 1.0)
    compare_with_one(world, scaled, 1.00001)
    with pytest.raises(TrainingError, match="gradients of step 0") as told:
        compare_with_one(world, scaled, 1.00001, tolerance=1e-6)
    with pytest.raises(TrainingError) as told:
        compare_with_one(world, scaled, 1.01)
    assert (told.value.kind, told.value.ranks) == ("weights differ", (0, 1))


def test_a_comparison_of_nothing_is_refused():
    with pytest.raises(ArgumentError, match="nothing to compare"):
        compare_with_one(World(2, watch=WATCH), lambda rank: dist.barrier())
    with pytest.raises(ArgumentError, match='"training" in watch'):
        compare_with_one(World(2), scaled, 1.0)


def test_not_strict_returns_the_findings():
    result = World(4, watch=WATCH, strict=False).run(speak, (2,), probe.same)
    assert [(finding.kind, finding.ranks) for finding in result.findings] == [
        ("tensors differ", (2,))
    ]
