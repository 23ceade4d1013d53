"""Small training programs with a planted bug each, and their right twins: `program(watch, wrong)`.

`watch(model, optimizer, **options)` returns the watch; a program returns it after its steps.
"""

import torch
from torch import nn
from torch.nn import functional as F


def net(*, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def train(guard, model, optimizer, steps=4, *, zero=True, clip=None, micro=1, late=False):
    for step in range(steps):
        if zero:
            optimizer.zero_grad()
        for at in range(micro):
            x, y = batch(micro * step + at)
            loss = F.mse_loss(model(x), y) / micro
            if late and at == micro - 1:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            loss.backward()
        if clip is not None and not late:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        guard.observe(loss=loss)
        optimizer.step()
    return guard


def missing_zero_grad(watch, wrong):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer), model, optimizer, zero=not wrong)


def replaced_parameters(watch, wrong):
    """accelerate#2665: the optimizer is made before the parameters are replaced."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrong:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(parameter.detach().clone())
    return train(watch(model, optimizer), model, optimizer)


def forgotten_layer(watch, wrong):
    model = net()
    chosen = model[2].parameters() if wrong else model.parameters()
    optimizer = torch.optim.SGD(chosen, lr=0.01)
    return train(watch(model, optimizer), model, optimizer)


class Detached(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.wrong = nn.Linear(8, 16), nn.Linear(16, 4), wrong

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden.detach() if self.wrong else hidden)


def detached_layer(watch, wrong):
    model = Detached(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer, patience=3), model, optimizer)


class Dead(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.bias.fill_(-1000.0 if wrong else 0.1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def dead_layer(watch, wrong):
    model = Dead(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer, patience=3), model, optimizer)


class WithoutDerivative(nn.Linear):
    """A layer whose weight, or bias, has the right value in the forward and a gradient of zero."""

    def __init__(self, wrong):
        super().__init__(8, 16)
        self.wrong = wrong

    def forward(self, x):
        weight, bias = (
            p.detach() + 0 * p if name == self.wrong else p
            for name, p in (("weight", self.weight), ("bias", self.bias))
        )
        return F.linear(x, weight, bias)


def without_derivative(watch, wrong):
    torch.manual_seed(0)
    model = nn.Sequential(WithoutDerivative(wrong), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer, patience=3), model, optimizer)


def weight_without_derivative(watch, wrong):
    return without_derivative(watch, "weight" if wrong else "")


def bias_without_derivative(watch, wrong):
    return without_derivative(watch, "bias" if wrong else "")


def layer_of_zeros(watch, wrong):
    """The weight of a layer whose input is zero has a gradient of zero; its bias learns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(-1000.0 if wrong else 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer, patience=3), model, optimizer)


def evaluation_mode(watch, wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)).train(not wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(watch(model, optimizer), model, optimizer)


def missing_clip(watch, wrong):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clip = None if wrong else 0.05
    return train(watch(model, optimizer, max_norm=0.05), model, optimizer, clip=clip)


def clip_before_the_last_micro_batch(watch, wrong):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = watch(model, optimizer, max_norm=0.05)
    return train(guard, model, optimizer, clip=0.05, micro=2, late=wrong)


def uninitialised_state(watch, wrong):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        fill = 1e-3 if wrong else 0.0
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.full_like(parameter, fill),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return train(watch(model, optimizer), model, optimizer)


def resumed_without_state(watch, wrong):
    from isobit.guards import state_digest

    model = net()
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(model, first) as guard:
        train(guard, model, first)
    saved, digest = first.state_dict(), state_digest(first)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not wrong:
        second.load_state_dict(saved)
    return train(watch(model, second, first_step=4, resumed_from=digest), model, second)


class Forgetful(torch.optim.SGD):
    """pytorch#115607: a step that is not taken."""

    def step(self, closure=None):
        return None


def overwritten_moments(watch, wrong):
    """Something else writes into the mean of squares."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = watch(model, optimizer, every=4)
    train(guard, model, optimizer)
    if wrong:
        optimizer.state[model[2].weight]["exp_avg_sq"][1, 2] = -1.0
    return train(guard, model, optimizer, steps=1)


def moments_that_are_not_finite(watch, wrong):
    """A gradient whose square overflows, once: every later step of that element is zero."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = watch(model, optimizer, every=4)
    train(guard, model, optimizer)
    if wrong:
        optimizer.state[model[0].bias]["exp_avg_sq"][3] = float("inf")
    return train(guard, model, optimizer, steps=1)


def second_optimizer_by_defaults(watch, wrong):
    """C-HYPERPARAMS-001: the optimizer of another path has a beta2 that is neither configured nor the default."""
    model = net()
    config = {"optimizer": {"lr": 0.01, "adam_beta2": 0.95, "weight_decay": 0.1}}
    first, second = (
        torch.optim.AdamW(part.parameters(), lr=0.01, betas=(0.9, beta2), weight_decay=0.1)
        for part, beta2 in ((model[0], 0.95), (model[2], 0.99 if wrong else 0.95))
    )
    other = watch(model, first, other_optimizers=[second], config=config)
    guard = watch(model, second, other_optimizers=[first], config=config)
    for _ in range(2):
        first.zero_grad()
        train(guard, model, second, steps=1)
        first.step()
    other.close()
    assert other.findings == []
    return guard


def step_that_does_nothing(watch, wrong):
    model = net()
    optimizer = (Forgetful if wrong else torch.optim.SGD)(model.parameters(), lr=0.01)
    return train(watch(model, optimizer), model, optimizer)


def update_below_the_last_place(watch, wrong):
    model = net().to(torch.bfloat16) if wrong else net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0)
    guard = watch(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        x, y = (t.to(next(model.parameters()).dtype) for t in batch(step))
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return guard


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()


def logarithm_of_zero(watch, wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Logarithm(), nn.Linear(16, 4))
    if not wrong:
        model[1] = nn.Softplus()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train(watch(model, optimizer), model, optimizer, steps=2)


def division_by_zero_variance(watch, wrong):
    """Adam without eps divides by zero where a unit is off."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0 if wrong else 1e-8)
    return train(watch(model, optimizer), model, optimizer, steps=1)


def nothing_to_train(watch, wrong):
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad = not wrong
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = watch(model, optimizer)
    return guard if wrong else train(guard, model, optimizer)


def spike_in_the_loss(watch, wrong):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = watch(model, optimizer)
    for step in range(120):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = F.mse_loss(model(x), 1000 * y if wrong and step == 110 else y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        guard.observe(loss=loss)
        optimizer.step()
    return guard


# program -> the rules that its wrong twin breaks, and a word of the message or the module
PROGRAMS = {
    missing_zero_grad: ({"not-zeroed"}, "zero_grad() is missing"),
    replaced_parameters: ({"not-in-optimizer"}, "none of the model's 4"),
    forgotten_layer: ({"not-in-optimizer"}, "2 of 4 trainable parameters"),
    detached_layer: ({"no-gradient"}, "first.weight, first.bias; the graph ends before second"),
    dead_layer: ({"zero-gradient"}, "first.weight, first.bias, second.weight"),
    weight_without_derivative: (
        {"zero-gradient"},
        "1 of 4 trainable parameters in 3 steps: 0.weight",
    ),
    bias_without_derivative: ({"zero-gradient"}, "1 of 4 trainable parameters in 3 steps: 0.bias"),
    layer_of_zeros: (
        {"zero-gradient"},
        "3 of 4 trainable parameters in 3 steps: 0.weight, 0.bias, 2.weight",
    ),
    overwritten_moments: ({"state-negative", "nonfinite-weight"}, "2.weight: exp_avg_sq"),
    moments_that_are_not_finite: ({"state-nonfinite"}, "0.bias: exp_avg_sq"),
    second_optimizer_by_defaults: (
        {"hyperparameter"},
        "beta2 is 0.95 in the configuration and 0.99 in 1",
    ),
    evaluation_mode: ({"eval-mode"}, "model.train() is missing"),
    missing_clip: ({"norm-above-limit"}, "above 0.05"),
    clip_before_the_last_micro_batch: ({"norm-above-limit"}, "above 0.05"),
    uninitialised_state: ({"state-not-zero"}, "exp_avg is not zero"),
    resumed_without_state: ({"state-not-resumed"}, "digest differs"),
    step_that_does_nothing: ({"not-moved"}, "4 parameters"),
    update_below_the_last_place: ({"not-moved"}, "0.weight"),
    logarithm_of_zero: (
        {"nonfinite-loss", "nonfinite-gradient", "nonfinite-weight"},
        "that of 2 (Logarithm, its input is finite)",
    ),
    division_by_zero_variance: ({"nonfinite-weight"}, "elements are not finite"),
    nothing_to_train: ({"nothing-trainable"}, "none of 4"),
    spike_in_the_loss: ({"spike-loss"}, "score"),
}
