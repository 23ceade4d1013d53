"""Learning rates of zero: reported where they stay, silent where a schedule passes through them."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from isobit.guards import Intervals, watch
from tests.guards.watched_programs import batch, net

STEPS = 60
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def train(optimizer, model, schedule=None, **intervals):
    with watch(model, optimizer, sinks=[], intervals=Intervals(**intervals)) as guard:
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return guard


@pytest.mark.parametrize("kind", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("first", [0, 20], ids=["from-the-start", "later"])
def test_a_rate_that_stays_at_zero_is_reported_once(kind, first):
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: float(step < first))
    (found,) = train(optimizer, model, schedule, weights=1).findings
    assert (found.name, found.severity, found.step) == ("rate-zero", "warning", first + 19)
    assert f"every group of {kind.__name__} is 0 in steps {first} to {first + 19}" in found.message


def test_rates_are_only_read_where_they_are_emitted():
    model = net()
    (found,) = train(SGD(model.parameters(), lr=0.0), model, metrics=2).findings
    assert (found.name, found.step) == ("rate-zero", 38)
    assert train(SGD(model.parameters(), lr=0.0), model, metrics=100).findings == []


def two_groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "lr": 0.01},
    ]


RIGHT = {
    "warm-up": lambda o: LambdaLR(o, lambda step: min(1.0, step / 10)),
    "slow-warm-up": lambda o: LambdaLR(o, lambda step: max(0.0, (step - 18) / 10)),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS - 1),
    "linear": lambda o: LambdaLR(o, lambda step: max(0.0, 1 - step / (STEPS - 1))),
    "constant": lambda o: None,
}


@pytest.mark.parametrize("schedule", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("kind", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_schedules_that_pass_zero_are_silent(kind, schedule):
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    assert train(optimizer, model, schedule(optimizer), weights=1).findings == []


def test_one_group_of_zero_is_silent():
    model = net()
    assert train(SGD(two_groups(model)), model, weights=1).findings == []


class OwnRate(torch.optim.Optimizer):
    """An optimizer that computes its rate itself: its groups have None, as those of Adafactor."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad


def test_an_optimizer_without_a_rate_in_its_groups_is_watched():
    model = net()
    guard = train(OwnRate(model.parameters()), model, weights=1)
    assert guard.findings == []
    assert guard.steps == STEPS
