"""What a watch reads when: all gradients now and then, a sample in every step, weights at the end.

1. A NaN of the forward is found in its step, also where only a sample is read.
2. One NaN outside of the sample is found by the next step; in its own with gradients_every=1 or a policy that skips.
3. The last step's weights are read when the watch ends.
4. Steps with a closure are judged after the closure, and can be skipped.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isobit import ArgumentError, GuardError
from isobit.guards import Intervals, watch
from isobit.guards.live.optimizer_checks import SAMPLED_ELEMENTS
from tests.guards.watch_groups import grouped
from tests.guards.watched_programs import batch, net

BAD = 13  # past the first 10 steps, and no multiple of 4


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 4))


def run(poison, steps=18, model=None, **options):
    """Take steps; `poison` becomes NaN: the input or a gradient of step BAD, or a weight at the end."""
    model = model or wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, sinks=[], **grouped(options)) as guard:
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            if step == BAD and poison == "input":
                x[0, 0] = math.nan
            F.mse_loss(model(x), y).backward()
            if step == BAD and poison == "element":
                grad = model[0].weight.grad.view(-1)
                assert grad.numel() > SAMPLED_ELEMENTS
                grad[-1] = math.nan
            optimizer.step()
            if step == steps - 1 and poison == "last":
                model[0].weight.data[0, 0] = math.nan
    return guard


def test_a_healthy_run_reads_a_sample():
    guard = run("nothing")
    assert guard.findings == []
    assert guard.norm_steps == 10 + 2  # steps 12 and 16


def test_a_nan_of_the_forward_is_found_in_its_step():
    found = run("input").findings[0]
    assert (found.name, found.step) == ("nonfinite-gradient", BAD)
    assert "4 of 4 gradients in all; the input of the model is not finite" in found.message


def test_one_element_outside_of_the_sample():
    found = run("element").findings[0]
    assert (found.name, found.step) == ("nonfinite-gradient", BAD + 1)  # through the weight
    assert "0 (Linear, its weight is not finite)" in found.message
    for options in ({"gradients_every": 1}, {"policy": "skip"}):
        guard = run("element", **options)
        assert (guard.findings[0].step, guard.norm_steps) == (BAD, 18)
        assert guard.nonfinite_steps == (1 if "policy" in options else 5)


def test_weights_are_read_at_the_end():
    guard = run("last")
    assert [(found.name, found.step) for found in guard.findings] == [("nonfinite-weight", 17)]
    assert guard.nonfinite_steps == 1
    with pytest.raises(GuardError, match="nonfinite-weight"):
        run("last", policy="raise")
    with pytest.raises(KeyError), watch(net(), torch.optim.SGD(net().parameters())):
        raise KeyError  # what fails is not hidden by a finding


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_judged_in_its_step(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=1e-2)
    before = []
    with watch(model, optimizer, sinks=[], policy="skip", max_norm=1e3) as guard:
        for step in range(4):
            x, y = batch(step)

            def closure(x=x, y=y, step=step):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y) * (math.nan if step == 2 else 1.0)
                loss.backward()
                return loss

            before.append(model[0].weight.detach().clone())
            optimizer.step(closure)
    assert [(found.name, found.step) for found in guard.findings] == [
        ("nonfinite-loss", 2),
        ("nonfinite-gradient", 2),
    ]
    assert guard.skipped_steps == 1
    assert torch.equal(before[2], before[3])
    assert not torch.equal(before[1], before[2])
    assert guard.norm_steps == 4


def test_wrong_arguments():
    model = net()
    with pytest.raises(ArgumentError, match=r"received: Intervals\(gradients=0\)"):
        watch(model, torch.optim.SGD(model.parameters()), intervals=Intervals(gradients=0))
