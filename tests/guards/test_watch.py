"""A watch finds what goes wrong in a training loop, names it, and changes nothing else.

1. Programs with a planted bug: each is found under its rule; its right twin is silent.
2. Policies: log, raise, skip and a function.
3. The run is the same, bit for bit, with and without a watch, also when a forward is replayed.
4. Loops of other shapes: outputs with a loss, evaluation, micro-batches, autocast, odd arguments.
Several ranks are in test_watch_ranks.py.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isobit import ArgumentError, GuardError, bits
from isobit.guards import watch
from tests.guards.watch_groups import FIELDS, grouped
from tests.guards.watched_programs import PROGRAMS, batch, logarithm_of_zero, net, train


def quiet(model, optimizer, **options):
    return watch(model, optimizer, sinks=[], **grouped(options))


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


class Keys(nn.Module):
    """Attention whose key bias the softmax does not see."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).T, -1) @ x[:, :4]


def zeroed(model, name, loss):
    """Train with the gradient of one parameter set to exact zeros, as rounding may leave it; return the findings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with quiet(model, optimizer, patience=3) as guard:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, *batch(step)).backward()
            model.get_parameter(name).grad.zero_()
            optimizer.step()
    return [*map(str, guard.findings)]


def test_a_bias_that_is_cancelled_is_exempt_and_a_weight_is_not():
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    critic = nn.Linear(8, 1)

    def plain(model, x, y):
        return F.mse_loss(model(x), y)

    def difference(model, x, y):
        return (model(x) - model(x.flip(0) ** 2)).mean()

    for model, bias, weight, loss in (
        (normed, "0.bias", "0.weight", plain),
        (Keys(), "key.bias", "key.weight", plain),
        (critic, "bias", "weight", difference),
    ):
        assert zeroed(model, bias, loss) == []
        assert any(f"zero-gradient: {weight}" in each for each in zeroed(model, weight, loss))


def test_an_empty_parameter_has_no_gradient_to_report():
    """The shard of a small parameter is empty on some ranks."""
    model = nn.Linear(8, 4)
    model.empty = nn.Parameter(torch.empty(0, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer, patience=2) as guard:
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + model.empty.sum()).backward()
            optimizer.step()
    assert guard.findings == []


# ---- 2. policies -------------------------------------------------------------------------------------------


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


# ---- 3. nothing else changes -------------------------------------------------------------------------------


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


# ---- 4. other loops ----------------------------------------------------------------------------------------


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
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), **grouped(wrong))


@pytest.mark.parametrize("keyword", FIELDS)
def test_keywords_of_the_last_release(keyword):
    """They are fields of three arguments now, and work for one more release with a warning."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = {
        "resumed_from": "x",
        "weights_from": {},
        "sharded": ["a"],
        "group": None,
        "tensor_group": None,
    }
    old = {keyword: values.get(keyword, 3)}
    kind, field = FIELDS[keyword]
    said = rf"{keyword}= of watch is now {kind.__name__.lower()}={kind.__name__}\({field}=\)"
    with pytest.warns(DeprecationWarning, match=said) as seen:
        first = watch(model, optimizer, sinks=[], **old)
    assert seen[0].filename == __file__
    first.close()
    second = watch(model, optimizer, sinks=[], **grouped(old))
    second.close()
    assert first.options == second.options


def test_unknown_keywords_and_groups_of_another_type_are_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        watch(model, optimizer, evry=3)
    with pytest.raises(ArgumentError, match=r"intervals=isobit\.guards\.Intervals"):
        watch(model, optimizer, intervals=100)


def test_what_is_no_optimizer():
    with pytest.raises(ArgumentError, match=r"a torch\.optim\.Optimizer"):
        watch(net(), "adam")


def test_several_optimizers_share_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    first, second, third = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)

    def found(optimizer, *others):
        with watch(model, optimizer, sinks=[], other_optimizers=others) as guard:
            return [(event.name, event.severity) for event in guard.findings]

    assert found(first, second, third) == []
    assert found(first, second) == [("not-in-optimizer", "warning")]
    stranger = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    assert found(stranger, first, second, third) == [("not-in-optimizer", "error")]
