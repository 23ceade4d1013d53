"""A run that leaves its course is stopped by the policy, with the block where it starts; healthy ones are not.

1. Curves of shapes that real runs have: no error on healthy ones, an error within a stated delay on diverging ones.
2. Policies act on a divergence of the loss and of the gradient norm, and on no other number.
3. An explosion that starts in one of six blocks is reported with that block; right twins are silent.
4. Every loss, norm and learning rate is emitted, and `isobit runlog` judges all of them.
5. Hooks on blocks are there during a training forward that is looked at, and at no other time.
"""

import json
import random

import pytest
import torch
from torch import nn

from isobit import GuardError, bits
from isobit.guards import Intervals, sinks, watch
from isobit.guards.live.blocks import BlockCourse, blocks_of
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import Limits, judge_log
from tests.guards.curve_shapes import AT, DIVERGING, HEALTHY, counts
from tests.guards.watch_groups import grouped

START = 120  # of what is planted below


# ---- 1. shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", HEALTHY, ids=lambda shape: shape.__name__)
def test_healthy_shapes_have_no_error(shape):
    assert counts(shape, 8)[0] == 0


@pytest.mark.parametrize("shape", DIVERGING, ids=lambda shape: shape.__name__)
def test_diverging_shapes_are_errors_soon(shape):
    errors, _, delays = counts(shape, 4)
    assert errors == 4
    assert 0 < min(delays) <= max(delays) <= 60


@pytest.mark.full
def test_fifty_runs_of_every_shape():
    for shape in HEALTHY:
        assert counts(shape, 50)[0] == 0, shape
        if "policy" not in shape.__name__:  # a norm is positive
            assert counts(shape, 50, log=True)[0] == 0, shape
    for shape in DIVERGING:
        assert counts(shape, 50)[0] == 50, shape


# ---- 2. policies -------------------------------------------------------------------------------------------


def follow(curve, policy, name="loss"):
    """Give a curve to a watch, one value per step; return the watch."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, policy=policy, sinks=[]) as guard:
        for value in curve:
            optimizer.zero_grad()
            model(torch.ones(2, 1)).square().mean().backward()
            guard.observe(**{name: value})
            optimizer.step()
    return guard


def test_policies_act_on_a_divergence():
    curve = DIVERGING[0](random.Random(0))[AT - 200 : AT + 80]
    with pytest.raises(GuardError, match="divergence-loss") as caught:
        follow(curve, "raise")
    assert caught.value.event.severity == "error"
    assert 200 < caught.value.event.step <= 260
    assert follow(curve, "skip").skipped_steps == 1
    guard = follow(curve, "log")
    assert guard.skipped_steps == 0
    assert [(f.name, f.severity) for f in guard.findings] == [
        ("spike-loss", "warning"),
        ("shift-loss", "warning"),
        ("divergence-loss", "error"),
    ]


def test_one_of_several_ranks_does_not_skip_alone(monkeypatch):
    """Its replicas may not see the divergence of its loss."""
    monkeypatch.setattr("isobit.guards.live.step_checks.is_one_of_many", lambda: True)
    guard = follow(DIVERGING[0](random.Random(0))[AT - 200 : AT + 80], "skip")
    assert guard.findings[-1].name == "divergence-loss"
    assert guard.skipped_steps == 0


def test_a_number_that_may_well_rise_stops_nothing():
    curve = DIVERGING[0](random.Random(0))[AT - 200 : AT + 80]
    guard = follow(curve, "raise", "reward")
    assert {f.severity for f in guard.findings} == {"warning"}
    assert "divergence-reward" in {f.name for f in guard.findings}


# ---- 3. blocks ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width=16, count=6):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(planted="", steps=180, watched=True, sink=None, schedule=None, **options):
    """Train for some steps, with something planted from step START on; return the watch and the model."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    guard = watch(model, optimizer, sinks=sink or [], **grouped(options)) if watched else None
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        late = step >= START
        if late and planted == "weights":
            model.blocks[3].down.weight.data.mul_(1.2)
        if late and planted == "labels":
            y = 1000 * y
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if late and planted == "backward":  # of blocks.3: those before it receive its gradients
            for parameter in model.blocks[:4].parameters():
                parameter.grad.mul_(1e3)
        if guard is not None:
            guard.observe(loss=loss)
        optimizer.step()
        if rates is not None:
            rates.step()
    if guard is not None:
        guard.close()
    return guard, model


def test_an_explosion_names_the_block_where_it_starts():
    guard, _ = train("weights")
    assert guard.findings
    assert {f.module for f in guard.findings} == {"blocks.3"}
    assert "blocks.3 is the first in the forward" in guard.findings[0].message
    assert guard.findings[-1].severity == "error"
    with pytest.raises(GuardError, match=r"divergence-\S+: blocks\.3"):
        train("weights", policy="raise")
    guard, _ = train("weights", max_norm=50.0)
    assert (guard.findings[0].name, guard.findings[0].module) == ("norm-above-limit", "blocks.3")


def test_an_explosion_of_the_backward_names_its_block():
    guard, _ = train("backward", gradients_every=1)
    first = guard.findings[0]
    assert (first.name, first.module) == ("shift-grad.norm", "blocks.3")
    assert f"at step {START}" in first.message
    assert "all outputs are on their course" in first.message


def test_a_global_cause_names_no_block():
    guard, _ = train("labels", steps=START + 4)
    assert guard.findings[0].module == ""
    assert "all 8 blocks are on their course" in guard.findings[0].message


def test_no_block_is_named_without_outputs():
    """Gradients alone cannot tell a block from those after it."""
    model = torch.compile(Blocks(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, sinks=[], max_norm=50.0) as guard:
        for step in range(40):
            if step >= 20:
                model.blocks[3].down.weight.data.mul_(1.5)
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    assert guard.findings[0].name == "norm-above-limit"
    assert {f.module for f in guard.findings} == {""}
    assert "outputs were not read" in guard.findings[-1].message


def test_a_healthy_run_is_silent_and_has_the_same_bits():
    guard, model = train("", policy="raise", every=10)
    assert guard.findings == []
    _, plain = train("", watched=False)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits.equal(ours.detach(), theirs.detach())


# ---- 4. what is emitted ------------------------------------------------------------------------------------


def test_runlog_judges_every_step_of_a_watched_run(tmp_path):
    path, config = tmp_path / "run.jsonl", {"learning_rate": 1e-3, "max_steps": 300}
    config |= {"lr_scheduler_type": "linear", "warmup_steps": 30}

    def share(step):
        return step / 30 if step < 30 else (300 - step) / 270

    train("", 300, sink=[sinks.JsonLines(path)], schedule=share, policy="raise")
    log = read_log(path)
    assert {name: len(points) for name, points in log.curves.items()} == {
        "loss": 300,
        "grad_norm": 300,
        "lr": 300,
    }
    assert dict(log.curves["lr"])[165] == pytest.approx(0.5e-3)
    verdict = judge_log(log, Limits(max_norm=1e3, config=config))
    assert verdict.findings == ()
    assert {"schedule", "norm-limit", "spikes", "missing-steps"} <= set(verdict.judged)
    wrong = judge_log(log, Limits(max_norm=1e3, config=config | {"warmup_steps": 100}))
    assert [finding.rule for finding in wrong.findings] == ["schedule"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sizes = {line["module"] for line in lines if line.get("name") == "output.rms"}
    assert sizes == {"embed", *(f"blocks.{at}" for at in range(6)), "head"}


def test_an_interval_and_groups_of_other_rates(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [
        {"params": part.parameters(), "lr": rate}
        for part, rate in zip(model, (0.1, 0.2), strict=True)
    ]
    optimizer, path = torch.optim.SGD(groups), tmp_path / "run.jsonl"
    with watch(
        model, optimizer, sinks=[sinks.JsonLines(path)], intervals=Intervals(metrics=5)
    ) as guard:
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            guard.observe(loss=loss)
            optimizer.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name, value in (("lr", 0.1), ("lr.1", 0.2)):
        assert [(e["step"], e["value"]) for e in lines if e["name"] == name] == [
            (step, value) for step in (0, 5, 10, 15)
        ]
    assert len([e for e in lines if e["name"] == "loss"]) == 4


# ---- 5. hooks ----------------------------------------------------------------------------------------------


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules() if module is not model)


def test_hooks_are_on_blocks_during_a_training_forward_only():
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(hooks_on(model)))
    with watch(model, optimizer, sinks=[]):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 8))
        model.train()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        with torch.no_grad():
            model(torch.ones(1, 8))
    assert seen == [8, 0, 0]
    assert hooks_on(model) == 0


def test_blocks_of_models_of_several_forms():
    def names(model):
        return [name for name, _ in blocks_of(model)]

    assert names(Blocks()) == ["embed", "head", *(f"blocks.{at}" for at in range(6))]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert names(nn.Linear(2, 2)) == []
    assert BlockCourse(nn.Linear(2, 2)).blocks == {}
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert names(nn.TransformerEncoder(layer, 2)) == ["layers.0", "layers.1"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(nested) == ["0.0", "0.1", "1"]
