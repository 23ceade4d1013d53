"""What a preflight finds in the order and mode of the first steps, and the right twin of each.

1. Eval mode: training in it is found where it changes what is computed; nothing seen is an error.
2. Gradients that two optimizers read, rates of 0, clipping after the step, a loss that is not divided.
3. Labels that are all ignored are named instead of the NaN that follows from them.
4. One finding per fault, with its steps.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isobit import ArgumentError
from isobit.guards import preflight


def batches(rows=8, count=24):
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(count * rows, 8, generator=draw),
        torch.randn(count * rows, 1, generator=draw),
    )
    return DataLoader(TensorDataset(x, y), rows, shuffle=True)


def fit(model, optimizer, *, before=None, after=None, loss=F.mse_loss):
    for x, y in batches():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        if before is not None:
            before()
        optimizer.step()
        if after is not None:
            after()


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 1))


def sgd(model, **options):
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], **{"lr": 0.01, **options}
    )


# ---- 1. eval mode ------------------------------------------------------------------------------------------


def normed_in_eval():
    model = network(nn.BatchNorm1d(16)).eval()
    fit(model, sgd(model))


def dropout_in_eval():
    model = network(nn.Dropout(0.1)).eval()
    fit(model, sgd(model))


def adapter_in_eval():
    """A frozen layer with a trained one next to it, and dropout before that: from_pretrained leaves eval mode."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.down = nn.Linear(8, 16).requires_grad_(False), nn.Linear(8, 16)
            self.dropout, self.head = nn.ModuleDict({"a": nn.Dropout(0.1)}), nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.frozen(x) + self.down(self.dropout["a"](x)))

    model = Adapted().eval()
    fit(model, sgd(model))


def not_cleared_in_eval():
    model = network().eval()
    optimizer = sgd(model)
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def in_eval_by_closure():
    model = network(nn.BatchNorm1d(16)).eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        (normed_in_eval, "trained-in-eval-mode"),
        (dropout_in_eval, "trained-in-eval-mode"),
        (adapter_in_eval, "trained-in-eval-mode"),
        (in_eval_by_closure, "trained-in-eval-mode"),
        (not_cleared_in_eval, "not-zeroed"),
    ],
)
def test_training_in_eval_mode(program, rule):
    report = preflight(program)
    assert [finding.rule for finding in report.findings] == [rule]
    assert report.models == 1


def without_modes():
    model = network(nn.LayerNorm(16)).eval()  # computes the same in both modes
    fit(model, sgd(model))


def classifier_on_frozen_features():
    """The protocol of linear classification: eval mode, so that no statistic of the features moves."""
    model = nn.Sequential(network(nn.BatchNorm1d(16), nn.Dropout(0.1)), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    model.eval()
    fit(model, sgd(model))


def frozen_statistics():
    model = network(nn.BatchNorm1d(16)).train()
    model[1].eval()  # trained, with the statistics of before
    fit(model, sgd(model))


def head_in_training_mode():
    model = network(nn.BatchNorm1d(16)).eval()
    model[3].train()
    fit(model, sgd(model))


def loss_of_a_network():
    """A network in eval mode that measures a distance; nobody has frozen it, and no optimizer has it."""
    measure, model = network(nn.BatchNorm1d(16)).eval(), nn.Linear(8, 8)
    fit(model, sgd(model), loss=lambda x, y: F.mse_loss(measure(x), y))


def evaluated_with_gradients():
    model = network(nn.BatchNorm1d(16), nn.Dropout(0.1))
    optimizer = sgd(model)

    def evaluate():
        model.eval()
        model(torch.randn(100, 8)).square().mean().item()
        model.train()

    fit(model, optimizer, after=evaluate)


def judged_in_eval_mode():
    """A discriminator that is trained in training mode, and judges in eval mode."""
    maker, judge = nn.Linear(4, 8), network(nn.BatchNorm1d(16))
    ours, theirs = sgd(maker), sgd(judge)
    for x, _ in batches():
        theirs.zero_grad()
        (
            F.softplus(-judge.train()(x)) + F.softplus(judge(maker(x[:, :4]).detach()))
        ).mean().backward()
        theirs.step()
        ours.zero_grad()
        F.softplus(-judge.eval()(maker(x[:, :4]))).mean().backward()
        ours.step()


def average_in_eval_mode():
    model = network(nn.BatchNorm1d(16))
    average = copy.deepcopy(model).eval()
    fit(model, sgd(model), after=lambda: average(torch.randn(4, 8)))


EVAL_TWINS = (
    without_modes,
    classifier_on_frozen_features,
    frozen_statistics,
    head_in_training_mode,
    loss_of_a_network,
    evaluated_with_gradients,
    judged_in_eval_mode,
    average_in_eval_mode,
)


@pytest.mark.parametrize("program", EVAL_TWINS)
def test_right_uses_of_eval_mode(program):
    report = preflight(program)
    assert report.findings == ()
    assert "models train in training mode" in report.judged


def test_the_model_is_left_in_its_mode():
    model = network(nn.BatchNorm1d(16), nn.Dropout(0.1)).eval()
    before = model[1].running_mean.clone()
    preflight(lambda: fit(model, sgd(model)))
    assert not any(module.training for module in model.modules())
    assert torch.equal(model[1].running_mean, before)


def test_nothing_seen_is_an_error():
    def without_a_module():
        weight = torch.randn(8, 1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            F.mse_loss(x @ weight, y).backward()
            optimizer.step()

    with pytest.raises(ArgumentError, match="no call of a model"):
        preflight(without_a_module)


# ---- 2. the order of a step --------------------------------------------------------------------------------


def two_optimizers():
    model = network()
    first, second = sgd(model), torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(model, first, after=second.step)


def rate_zero():
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    fit(model, optimizer, after=schedule.step)


def clipped_late():
    model = network()
    fit(model, sgd(model), after=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def values_clipped_late():
    model = network()
    fit(model, sgd(model), after=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1))


def accumulated(factor, count=4, reduction="mean"):
    model = network()
    optimizer = sgd(model)
    for at, (x, y) in enumerate(batches()):
        (F.mse_loss(model(x), y, reduction=reduction) * factor).backward()
        if at % count == count - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("program", "rule", "words"),
    [
        (two_optimizers, "stepped-twice", "4 parameters are updated by SGD and again by Adam"),
        (rate_zero, "rate-zero", "of SGD is 0 in steps 1 to 2"),
        (clipped_late, "clipped-after-step", "the gradients of 4 parameters"),
        (values_clipped_late, "clipped-after-step", "0.weight, 0.bias, 2.weight, 2.bias"),
        (lambda: accumulated(1.0), "loss-not-divided", "the mean losses of 4 micro-batches"),
    ],
    ids=["stepped-twice", "rate-zero", "norm", "values", "not-divided"],
)
def test_the_order_of_a_step(program, rule, words):
    (found,) = preflight(program).findings
    assert found.rule == rule
    assert words in found.message


def optimizers_of_two_parts():
    model = network()
    first, second = sgd(model[0]), sgd(model[2])

    def step_the_second():
        second.step()
        second.zero_grad()

    fit(model, first, after=step_the_second)


def two_losses_of_shared_weights():
    """Both optimizers have the weights, and each reads gradients of its own."""
    model = network()
    first, second = sgd(model), torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches():
        for optimizer in (first, second):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


class Wrapping(torch.optim.Optimizer):
    """An optimizer that steps by another one with the same groups, as SAM and Lookahead do."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step()


def wrapped():
    model = network()
    fit(model, Wrapping(sgd(model)))


def warm_up_from_zero():
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    fit(model, optimizer, after=schedule.step)


def decay_to_zero_in_the_last_step():
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    fit(model, optimizer, after=schedule.step)


def one_group_at_zero():
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "lr": 0.01},
    ]
    fit(model, torch.optim.SGD(groups))


def clipped_and_measured():
    model = network()
    fit(
        model,
        sgd(model),
        before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        after=lambda: nn.utils.clip_grad_norm_(model.parameters(), float("inf")),
    )


def clipped_and_clipped_again_to_log():
    model = network()

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    fit(model, sgd(model), before=clip, after=clip)


def two_backwards_of_one_batch():
    """A loss of its own each, as of real and of made samples: no accumulation."""
    model = network()
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        F.mse_loss(model(x.flip(0)), -y).backward()
        optimizer.step()


STEP_TWINS = {
    "parts": optimizers_of_two_parts,
    "losses": two_losses_of_shared_weights,
    "wrapped": wrapped,
    "warm-up": warm_up_from_zero,
    "decay": decay_to_zero_in_the_last_step,
    "group": one_group_at_zero,
    "measured": clipped_and_measured,
    "logged": clipped_and_clipped_again_to_log,
    "divided": lambda: accumulated(0.25),
    "summed": lambda: accumulated(1 / 32, reduction="sum"),
    "sum of sums": lambda: accumulated(1.0, reduction="sum"),
    "two losses": two_backwards_of_one_batch,
}


@pytest.mark.parametrize("name", STEP_TWINS)
def test_right_orders_of_a_step(name):
    assert preflight(STEP_TWINS[name]).findings == ()


def test_functions_that_clip_are_put_back():
    before = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_
    preflight(clipped_and_measured)
    assert (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_) == before


# ---- 3. labels ---------------------------------------------------------------------------------------------


def labelled(*ignored, reduction="mean", micro=1):
    """Train a classifier; in the steps named, every label is ignored in the first micro-batch or in all."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(micro):
            y = torch.randint(0, 4, (8,))
            if step in ignored and (part == 0 or reduction == "mean"):
                y.fill_(-100)
            (F.cross_entropy(model(torch.randn(8, 8)), y, reduction=reduction) / 8).backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [(0, 1, 2), (1,)])
def test_labels_that_are_all_ignored(steps):
    (found,) = preflight(lambda: labelled(*steps)).findings
    assert found.rule == "no-targets"
    assert found.steps == steps
    assert "-100" in found.message


def test_a_sum_over_no_target_is_right_for_one_of_several_micro_batches():
    assert preflight(lambda: labelled(1, reduction="sum", micro=2)).findings == ()
    (found,) = preflight(lambda: labelled(1, reduction="sum")).findings
    assert (found.rule, found.steps) == ("no-targets", (1,))


# ---- 4. one finding per fault ------------------------------------------------------------------------------


def test_a_fault_of_several_steps_is_one_finding():
    model = network()
    config = {"max_grad_norm": 1e-3}
    (found,) = preflight(lambda: fit(model, sgd(model)), config=config).findings
    assert (found.rule, found.step, found.steps) == ("norm-above-limit", 0, (0, 1, 2))


def test_what_is_not_finite_is_one_finding():
    def program():
        model = network()
        optimizer = sgd(model)
        for step, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            F.mse_loss(model(x / 0 if step else x), y).backward()
            optimizer.step()

    (found,) = preflight(program).findings
    assert (found.rule, found.steps) == ("nonfinite-loss", (1,))  # from then on the weights are
