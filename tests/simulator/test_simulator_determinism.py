"""One seed is one run: schedule, trace, random numbers; seeds differ; a replay follows its trace or names the event."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from isobit.errors import ReplayError, TrainingError
from isobit.simulator import Flip, Straggle, Trace, World, draw_faults, replay
from isobit.simulator.program.process_state import follows_header


def traffic(rank, rounds=3):
    """Return the order in which rank 0 receives from the others, which depends on the schedule."""
    ranks, heard = dist.get_world_size(), []
    for _ in range(rounds):
        x = torch.ones(4) * rank
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            got = torch.zeros(1)
            heard.extend(dist.recv(got) for _ in range(ranks - 1))
        else:
            dist.send(torch.tensor([float(rank)]), 0)
        work.wait()
        dist.barrier()
    return heard


def test_a_seed_is_a_run():
    first, again = World(5, seed=11).run(traffic), World(5, seed=11).run(traffic)
    assert first.digest == again.digest
    assert first.values == again.values
    assert first.clocks == again.clocks


def test_seeds_differ_in_schedule_and_in_what_races_show():
    runs = [World(5, seed).run(traffic) for seed in range(8)]
    assert len({run.digest for run in runs}) == 8
    assert len({tuple(run.values[0]) for run in runs}) > 1


def test_without_delays_clocks_stand_still_and_seeds_still_differ():
    runs = [World(5, seed, delays=False).run(traffic) for seed in range(4)]
    assert all(set(run.clocks) == {0} for run in runs)
    assert len({run.digest for run in runs}) > 1


def test_a_trace_replays_also_from_a_file(tmp_path):
    trace = World(4, seed=5, faults=[Straggle(1, 2, 3.0)]).run(traffic).trace
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded == trace
    assert replay(loaded, traffic).digest == trace.digest


def test_a_replay_says_where_it_departs():
    trace = World(4, seed=5).run(traffic).trace

    def changed(rank):
        out = traffic(rank)
        if rank == 2:
            dist.send(torch.zeros(1), 3)
        elif rank == 3:
            dist.recv(torch.zeros(1), 2)
        return out

    with pytest.raises(ReplayError, match=r"send 0 2>3|recv 0 2>3") as caught:
        replay(trace, changed)
    assert {2, 3} & set(caught.value.ranks)
    with pytest.raises(ReplayError):
        replay(trace, traffic, 2)


def test_seeded_faults_are_drawn_alike():
    assert draw_faults(3, 8, 10, count=4) == draw_faults(3, 8, 10, count=4)
    assert draw_faults(3, 8, 10, count=4) != draw_faults(4, 8, 10, count=4)
    assert all(isinstance(fault, Flip) for fault in draw_faults(0, 4, 4, count=3, kinds=["Flip"]))


def draws(rank, seed_all):
    seed_all(rank)
    out = []
    for _ in range(3):
        out.append((torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand()))
        dist.barrier()
    return out


def seed_all(rank):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def test_random_numbers_are_those_of_a_process_of_ones_own():
    values = World(3, seed=1).run(draws, seed_all).values
    for rank in range(3):
        seed_all(rank)
        alone = [
            (torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand())
            for _ in range(3)
        ]
        assert values[rank] == alone


def test_unseeded_ranks_start_as_processes_do():
    """Every generator differs between ranks, as `torch.initial_seed()` does; and is the same again for one seed."""
    runs = [World(3, seed).run(draws, lambda rank: None).values for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    for kind in range(4):
        assert len({value[0][kind] for value in runs[0]}) == 3


def train_replicas(rank, seed):
    if seed is not None:
        torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((1, 4), 1.0 + rank)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def test_replicas_that_nobody_seeds_start_differently():
    with pytest.raises(TrainingError) as error:
        World(2, watch=("training",)).run(train_replicas, None)
    assert error.value.kind == "start differs"
    World(2, watch=("training",)).run(train_replicas, 0)


def test_the_callers_random_numbers_go_on_where_they_were():
    seed_all(4)
    World(2).run(draws, seed_all)
    after = torch.rand(1).item(), random.random(), np.random.rand()
    seed_all(4)
    assert after == (torch.rand(1).item(), random.random(), np.random.rand())


def test_pythons_state_by_both_ways(monkeypatch):
    assert follows_header()
    fast = World(3).run(draws, seed_all).values
    monkeypatch.setattr("isobit.simulator.program.process_state.follows_header", lambda: False)
    assert World(3).run(draws, seed_all).values == fast
