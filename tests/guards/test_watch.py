"""A watch finds what goes wrong in a training loop, names it, and changes nothing else.

1. Programs with a planted bug: each is found under its rule; its right twin is silent.
2. Ranks: replicas that differ, and norms that differ inside a tensor-parallel group, are named by majority.
3. Policies: log, raise, skip and a function.
4. The run is the same, bit for bit, with and without a watch, also when a forward is replayed.
5. Loops of other shapes: outputs with a loss, evaluation, micro-batches, autocast, odd arguments.
"""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from isobit import ArgumentError, GuardError, bits
from isobit.guards import rank_agreement, replicated_tensors, watch
from isobit.simulator import World
from tests.guards.watched_programs import PROGRAMS, batch, logarithm_of_zero, net, train


def quiet(model, optimizer, **options):
    return watch(model, optimizer, sinks=[], **options)


# ---- 1. planted bugs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_planted_bug_is_found_and_its_right_twin_is_silent(program):
    rules, words = PROGRAMS[program]
    guard = program(quiet, True)
    guard.close()
    assert {event.name for event in guard.findings} == rules
    assert any(words in str(event) for event in guard.findings), [*map(str, guard.findings)]
    right = program(quiet, False)
    right.close()
    assert [*map(str, right.findings)] == []
    assert right.steps > 0


# ---- 2. ranks ----------------------------------------------------------------------------------------------


def replicas(wrong):
    def program(rank):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet(model, optimizer, agree_every=2) as guard:
            for step in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(batch(7 * step + rank)[0]), batch(step)[1]).backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                if wrong and rank == 0:  # rank 0 is the one at fault, and must be the one named
                    model[2].bias.grad.mul_(2)
                optimizer.step()
        return [str(event) for event in guard.findings]

    return World(4).run(program).values


def test_replicas_that_differ_are_named_by_majority():
    assert all(found == [] for found in replicas(False))
    for rank, found in enumerate(replicas(True)):
        assert len(found) == 1
        assert found[0].startswith(f"step 1, rank {rank}: replicas-differ: 2.bias: rank 0, 2.bias")
        assert found[0].endswith("as ranks 1–3")


def tensor_parallel(wrong):
    """DeepSpeed#1801: a clipping that only rank 0 applies to what all ranks replicate."""

    def program(rank):
        torch.manual_seed(0)
        norm = nn.LayerNorm(8)
        torch.manual_seed(10 + rank)
        model = nn.ModuleDict({"norm": norm, "shard": nn.Linear(8, 4, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = dist.group.WORLD
        options = {"agree_every": 1, "tensor_group": group, "sharded": ["shard.*"]}
        with quiet(model, optimizer, **options) as guard:
            for step in range(2):
                optimizer.zero_grad()
                model["shard"](norm(batch(step)[0])).square().sum().backward()
                for p in norm.parameters():
                    dist.all_reduce(p.grad)
                    if rank == 0 or not wrong:
                        p.grad.mul_(0.01)
                optimizer.step()
        return [str(event) for event in guard.findings]

    return World(4).run(program).values


def test_norms_that_differ_inside_a_tensor_parallel_group():
    assert all(found == [] for found in tensor_parallel(False))
    for found in tensor_parallel(True):
        assert len(found) >= 2
        assert all("rank 0, norm." in each and "as ranks 1–3" in each for each in found)


def test_replicated_tensors():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    assert len(replicated_tensors(model)) == 4
    assert rank_agreement(replicated_tensors(model, sharded=["1.*"])).parameters == 2
    with pytest.raises(ArgumentError, match="does not shard"):
        replicated_tensors(model, sharded=["*"])


# ---- 3. policies -------------------------------------------------------------------------------------------


def test_raise_stops_before_the_weights_change():
    with pytest.raises(GuardError, match="nonfinite-loss") as caught:
        logarithm_of_zero(lambda m, o: quiet(m, o, policy="raise"), True)
    assert caught.value.event.step == 0
    model = net()
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(GuardError, match="not-in-optimizer"):
        quiet(model, stranger, policy="raise")
    assert not model._forward_hooks
    assert not stranger._optimizer_step_pre_hooks


def poisoned(policy):
    """Three steps, the second with a NaN."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = []
    with quiet(model, optimizer, policy=policy) as guard:
        for step in range(3):
            x, y = batch(step)
            x[0, 0] = float("nan") if step == 1 else 0.0
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            before.append(copy.deepcopy(model.state_dict()))
            optimizer.step()
    return guard, before, optimizer


def test_skip_leaves_the_weights_and_the_state_as_they_are():
    guard, before, optimizer = poisoned("skip")
    assert (guard.steps, guard.skipped_steps, guard.nonfinite_steps) == (3, 1, 1)
    assert all(bits.equal(before[1][name], before[2][name]) for name in before[1])
    assert not any(bits.equal(before[0][name], before[1][name]) for name in before[0])
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert {event.name for event in guard.findings} == {"nonfinite-gradient"}


def test_a_function_decides():
    seen = []
    guard, _, _ = poisoned(lambda event: seen.append(event) or "skip")
    assert seen == guard.findings
    assert guard.skipped_steps == 1
    guard, _, _ = poisoned(lambda event: None)
    assert guard.skipped_steps == 0
    assert {event.name for event in guard.findings} >= {"nonfinite-gradient", "nonfinite-weight"}


# ---- 4. nothing else changes -------------------------------------------------------------------------------


def stochastic_run(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = quiet(model, optimizer, every=2) if watched else None
    for step in range(6):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y * (float("inf") if step == 3 else 1.0))
        loss.backward()
        if watched and step == 3:
            guard.observe(loss=loss)  # replays the forward
        if step == 3:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict(), torch.get_rng_state(), guard


def test_a_watched_run_has_the_same_bits():
    plain, state, _ = stochastic_run(False)
    watched, state_watched, guard = stochastic_run(True)
    assert [event.name for event in guard.findings] == ["nonfinite-loss"]
    assert "the forward is finite when it is run again" in guard.findings[0].message
    assert all(bits.equal(plain[name], watched[name]) for name in plain)
    assert bits.equal(state, state_watched)


def test_close_removes_everything_and_may_be_called_twice():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = train(quiet(model, optimizer), model, optimizer)
    guard.close()
    guard.close()
    hooks = (model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert not any(hooks)
    train(guard, model, optimizer)  # observe() after close() is harmless
    assert guard.steps == 4


def test_a_watched_model_can_be_copied_and_pickled():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer) as guard:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.full((1, 8), float("nan")))
            train(guard, model, optimizer, steps=1)
    assert guard.findings == []
    assert guard.steps == 2


def sharded(wrong):
    """FSDP2: one rank has a NaN in its shard, and all skip the step."""

    def program(rank):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = []
        with quiet(model, optimizer, policy="skip", group=dist.group.WORLD) as guard:
            for step in range(3):
                optimizer.zero_grad()
                F.mse_loss(model(batch(2 * step + rank)[0]), batch(step)[1]).backward()
                if wrong and (rank, step) == (1, 1):
                    next(model.parameters()).grad.to_local()[0] = float("nan")
                before.append(next(model.parameters()).detach().to_local().clone())
                optimizer.step()
        same = [bits.equal(a, b) for a, b in pairwise(before)]
        return same, guard.skipped_steps, [event.name for event in guard.findings]

    return World(2).run(program).values


def test_ranks_with_shards_skip_together():
    assert all(found == ([False, False], 0, []) for found in sharded(False))
    first, second = sharded(True)
    assert first == ([False, True], 1, [])
    assert second == ([False, True], 1, ["nonfinite-gradient"])


def test_shards_need_a_group_to_skip():
    def program(rank):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ArgumentError, match="skip a step together"):
            quiet(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="skip")
        return "refused"

    assert all(value == "refused" for value in World(2).run(program).values)


# ---- 5. other loops ----------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """As models of transformers: a dictionary with the loss."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None, **_):
        logits = self.net(x)
        return {"loss": F.mse_loss(logits, labels), "logits": logits}


def test_a_loss_in_the_output_is_seen_with_its_micro_batch():
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer) as guard:
        for step in range(2):
            optimizer.zero_grad()
            for at in range(3):
                x, y = batch(3 * step + at)
                y[0, 0] = float("nan") if (step, at) == (1, 2) else 0.0
                model(x, labels=y)["loss"].backward()
            optimizer.step()
    first = guard.findings[0]
    assert (first.name, first.step, first.micro_batch) == ("nonfinite-loss", 1, 2)
    assert guard.nonfinite_steps == 1


def test_evaluation_is_not_training():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer) as guard:
        for _ in range(3):
            train(guard, model, optimizer, steps=1)
            model.eval()
            model(torch.full((2, 8), float("nan")))
            model.train()
            with torch.no_grad():
                model(torch.full((2, 8), float("nan")))
    assert guard.findings == []
    assert guard.steps == 3


def test_zero_grad_between_forward_and_backward_and_in_place():
    for set_to_none in (True, False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with quiet(model, optimizer) as guard:
            for step in range(3):
                loss = model(batch(step)[0]).square().mean()
                optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
                optimizer.step()
        assert guard.findings == []


def test_autocast_sparse_and_unused_parameters():
    model = nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True, mode="sum"), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer, max_norm=1e6) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randint(0, 10, (4, 3))).float().square().mean()
            loss.backward()
            optimizer.step()
    assert [*map(str, guard.findings)] == []


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "stop"}, {"every": 0}, {"patience": 0}, {"max_norm": 0.0}, {"agree_every": 0}],
)
def test_wrong_arguments(wrong):
    model = net()
    with pytest.raises(ArgumentError):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def test_what_is_no_optimizer():
    with pytest.raises(ArgumentError, match=r"a torch\.optim\.Optimizer"):
        watch(net(), "adam")
