"""Training programs: with a planted bug each (`WRONG`), and correct ones of many shapes (`RIGHT`)."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.guards.watched_programs import Detached, batch, net


def loop(model, optimizer, *, steps=5, zero=True, fixed=False, after=None):
    for step in range(steps):
        if zero:
            optimizer.zero_grad()
        x, y = batch(0 if fixed else step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if after is not None:
            after()


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


# ---- wrong -------------------------------------------------------------------------------------------------


def no_zero_grad():
    model = net()
    loop(model, sgd(model), zero=False)


def all_weights_frozen():
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == "2.bias"
    loop(model, sgd(model))


def optimizer_of_old_parameters():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    loop(model, optimizer)


class AlwaysDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


def dropout_in_eval():
    model = nn.Sequential(net(), AlwaysDropout())
    loop(model, sgd(model))


def frozen_layer_that_moves():
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    loop(model, sgd(model), after=lambda: model[0].weight.data.mul_(0.999))


def one_batch_again_and_again():
    model = net()
    loop(model, sgd(model), fixed=True)


def detached():
    model = Detached(True)
    loop(model, sgd(model))


def infinite_input():
    model = net()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(x / 0), y).backward()
        optimizer.step()


WRONG = {
    no_zero_grad: {"not-zeroed"},
    all_weights_frozen: {"weights-frozen"},
    optimizer_of_old_parameters: {"not-in-optimizer"},
    dropout_in_eval: {"eval-is-random"},
    frozen_layer_that_moves: {"moved-though-frozen"},
    one_batch_again_and_again: {"same-batch"},
    detached: {"no-gradient"},
    infinite_input: {"nonfinite-loss"},  # of which gradients and weights are consequences
}


# ---- right -------------------------------------------------------------------------------------------------


def plain():
    model = net()
    loop(model, sgd(model))


def zero_grad_after_the_step():
    model = net()
    optimizer = sgd(model)
    loop(model, optimizer, zero=False, after=lambda: optimizer.zero_grad(set_to_none=False))


def adam_with_warm_up_and_groups():
    model = net()
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 2))
    loop(model, optimizer, after=schedule.step)


def accumulation_and_clipping():
    model = net()
    optimizer = sgd(model)
    for step in range(5):
        for at in range(2):
            x, y = batch(2 * step + at)
            (F.mse_loss(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def dropout_and_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
    loop(model, sgd(model))


class Adapter(nn.Module):
    """As LoRA: a frozen weight, and two small ones of which one starts at zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Linear(8, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.weight(x) + self.up(self.down(x))


def adapter():
    model = Adapter()
    loop(model, sgd(model))


def adversaries():
    """Two models, two optimizers; gradients of the other model are cleared before its own step."""
    maker, critic = net(seed=1), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = sgd(critic), sgd(maker)
    for step in range(5):
        x, y = batch(step)
        first.zero_grad()
        (critic(maker(x).detach()).mean() - critic(y).mean()).backward()
        first.step()
        second.zero_grad()
        critic(maker(x)).square().mean().backward()
        second.step()


def closures():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for step in range(4):
        x, y = batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def autocast():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def recomputation():
    model = Checkpointed()
    loop(model, sgd(model))


class ByMethod(nn.Module):
    """A loss that is a method: only submodules are called as modules."""

    def __init__(self):
        super().__init__()
        self.body, self.head = net(), nn.Linear(4, 4)

    def compute_loss(self, x, y):
        return F.mse_loss(self.head(self.body(x)), y)


def loss_by_method():
    model = ByMethod()
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        model.compute_loss(*batch(step)).backward()
        optimizer.step()


def tied_weights_and_an_average():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 16, (4, 6), generator=generator)
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)


def evaluation_between_steps():
    model = net()

    def evaluate():
        model.eval()
        with torch.no_grad():
            model(torch.zeros(2, 8))
        model.train()

    loop(model, sgd(model), after=evaluate)


RIGHT = (
    plain,
    zero_grad_after_the_step,
    adam_with_warm_up_and_groups,
    accumulation_and_clipping,
    dropout_and_batch_norm,
    adapter,
    adversaries,
    closures,
    autocast,
    recomputation,
    loss_by_method,
    tied_weights_and_an_average,
    evaluation_between_steps,
)
