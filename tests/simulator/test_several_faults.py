"""Theorem: of several faults in one script, each is named, once, with its ranks; what may follow from another says so;
and where ranks came apart before a mismatch or a deadlock is a note of it, never a finding."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isobit.errors import DeadlockError, MismatchError, TrainingError
from isobit.simulator import World
from isobit.simulator.checkers.training import STEPS_AFTER

EVERY = (0, 1, 2, 3)
PLANTS = {  # plant: what it is found as, and on which ranks
    "start": ("start differs", EVERY),
    "rate": ("update differs", (1,)),
    "head": ("not updated", EVERY),
    "zero": ("gradients kept", EVERY),
    "reduce": ("gradients differ", EVERY),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))


def program(rank, plants, steps=3):
    torch.manual_seed(rank if "start" in plants else 0)
    model = Net()
    trained = [*model.body.parameters(), *model.middle.parameters()]
    trained += [] if "head" in plants else model.head.parameters()
    rate = 0.2 if rank == 1 and "rate" in plants else 0.1
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        if "zero" not in plants:
            model.zero_grad()
        model(x).square().mean().backward()
        for name, parameter in model.named_parameters():
            if name != "middle.weight" or "reduce" not in plants:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()


def findings(plants, **options):
    world = World(4, watch=("training",), strict=False)
    return world.run(program, plants, **options).findings


@pytest.mark.parametrize("count", range(6))
@pytest.mark.sweep(2)
def test_every_fault_is_named_once(count):
    for plants in itertools.combinations(PLANTS, count):
        found = findings(plants)
        assert sorted((each.kind, each.ranks) for each in found) == sorted(
            PLANTS[plant] for plant in plants
        ), plants
        assert [each.follows for each in found] == [""] * count


def test_a_strict_world_raises_the_first_and_lists_all():
    with pytest.raises(TrainingError) as raised:
        World(4, watch=("training",)).run(program, tuple(PLANTS))
    assert raised.value.kind == "start differs"
    assert {each.kind for each in raised.value.result.findings} == {k for k, _ in PLANTS.values()}


def test_the_text_names_the_number_that_differs():
    (found,) = findings(("rate",))
    assert "lr 0.1 on ranks 0, 2, 3, lr 0.2 on rank 1" in found.received
    assert "so do" in found.received  # and the other parameters


def test_what_may_follow_from_an_earlier_finding_says_so():
    def late(rank):
        program(rank, ("rate",), steps=1)
        if rank == 0:
            dist.barrier()

    found = World(4, watch=("training",), strict=False)
    with pytest.raises(DeadlockError) as raised:
        found.run(late)
    assert raised.value.follows == "update differs"
    kinds = [(each.kind, each.follows) for each in raised.value.result.findings]
    assert kinds == [("update differs", "")]
    with pytest.raises(TrainingError) as raised:
        World(4, watch=("training",)).run(late)
    kinds = [(each.kind, each.follows) for each in raised.value.result.findings]
    assert kinds == [("update differs", ""), ("deadlock", "update differs")]


def test_ranks_that_do_the_same_later_are_added():
    def forgets(rank):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if rank != step - 1:
                optimizer.zero_grad()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            optimizer.step()

    (found,) = World(4, watch=("training",), strict=False).run(forgets).findings
    assert (found.kind, found.ranks) == ("gradients kept", (0, 1, 2))
    assert "; rank 2: the gradient of" in found.received


def test_a_wrong_run_ends_though_its_loop_does_not():
    """Wrong numbers may keep a loop from ending, so a strict run goes on for some steps only."""
    made = []

    def endless(rank):
        torch.manual_seed(rank)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10 * STEPS_AFTER):
            optimizer.zero_grad()
            x = torch.randn(2, 2, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            optimizer.step()
            made.append(rank)

    with pytest.raises(TrainingError, match="was not equal before the first step"):
        World(2, watch=("training",)).run(endless)
    assert 2 * STEPS_AFTER <= len(made) <= 2 * STEPS_AFTER + 4


def test_faults_of_a_step_with_a_closure_are_named():
    """The gradients of a closure's step are those after it, and the batches are those in it."""

    def body(rank, clears, share):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(step):
            if clears:
                optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank // share)
            loss = model(torch.randn(2, 4, generator=generator)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            return loss

        for step in range(3):
            optimizer.step(closure=lambda step=step: closure(step))

    def found(*planted):
        errors = World(4, watch=("training",), strict=False).run(body, *planted).findings
        return [(error.kind, error.ranks) for error in errors]

    assert found(True, 1) == []
    assert found(False, 1) == [("gradients kept", EVERY)]
    assert found(True, 2) == [("data alike", EVERY)]


def log(x):
    dist.all_reduce(x)


def test_a_mismatch_names_where_ranks_came_apart():
    """Rank 1's extra call is paired with the next one of the others, of the same shape: the one after it differs."""

    def body(rank):
        log(torch.ones(()))
        if rank == 1:
            log(torch.ones(()))  # the cause
        log(torch.ones(()))
        dist.all_reduce(torch.ones(3))

    with pytest.raises(MismatchError, match="call number 3") as raised:
        World(4).run(body)
    line = body.__code__.co_firstlineno + 3
    assert "first in all_reduce number 2 of group" in raised.value.note
    assert f"rank 1 at {__file__}:{line} in body" in raised.value.note
    assert f"ranks 0, 2, 3 at {__file__}:{line + 1} in body" in raised.value.note
    assert f"\n  note: {raised.value.note}" in str(raised.value)


def test_a_deadlock_names_where_ranks_came_apart():
    def body(rank):
        for step in range(3):
            if rank == 0 and step == 1:
                log(torch.ones(()))
            log(torch.ones(()))

    with pytest.raises(DeadlockError, match="all_reduce number 4") as raised:
        World(2).run(body)
    assert "first in all_reduce number 2 of group" in raised.value.note


def broadcasts(rank):
    x = torch.ones(2)
    if rank == 0:
        dist.broadcast(x, src=0)
    else:
        dist.broadcast(x, src=0)


def test_a_right_call_from_two_lines_is_no_finding():
    assert World(4).run(broadcasts).findings == []

    def body(rank):  # ranks meet again after it: both places are named
        broadcasts(rank)
        dist.all_reduce(torch.ones(()))
        if rank == 1:
            log(torch.ones(()))
        log(torch.ones(()))
        dist.all_reduce(torch.ones(3))

    with pytest.raises(MismatchError, match="call number 4") as raised:
        World(2).run(body)
    assert "first in broadcast number 1 of group" in raised.value.note
    assert "; again from all_reduce number 3 of group" in raised.value.note

    def at_once(rank):  # the lines of the mismatch itself are in its stacks
        dist.all_reduce(torch.ones(rank + 1))

    with pytest.raises(MismatchError) as raised:
        World(2).run(at_once)
    assert raised.value.note == ""
