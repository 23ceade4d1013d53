"""Bugs of a loop on one rank: the optimizer, gradients, modes, precision, accumulation."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional as F

from tests.guards.bugs.bug import Found, declares, planted, quiet
from tests.guards.watched_programs import Forgetful, batch, net, train


def replace_parameters(model):
    """Put copies into a model, as a conversion of dtype or device may do."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())


def loop(model, optimizer, steps=5, after=None):
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if after is not None:
            after(step)


def sgd(model, rate=0.01):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


@planted("pytorch-115607", "20", "the step is not taken", "watch", Found("not-moved", 0))
def skipped_step(wrong):
    model = net()
    optimizer = (Forgetful if wrong else torch.optim.SGD)(model.parameters(), lr=0.01)
    return train(quiet(model, optimizer), model, optimizer)


@planted("SO-60335387", "20", "zero_grad is missing", "watch", Found("not-zeroed", 1))
def no_zero_grad(wrong):
    model = net()
    optimizer = sgd(model)
    return train(quiet(model, optimizer), model, optimizer, zero=not wrong)


@planted("forum-84911", "20", "nearly all is frozen", "preflight", Found("weights-frozen"))
def nearly_all_frozen(wrong):
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == "2.bias" or not wrong
    loop(model, sgd(model))


class LateDropout(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        return F.dropout(x, 0.5, training=self.training or self.wrong)


@planted("transformers-33844", "20", "dropout in eval", "preflight", Found("eval-is-random"))
def dropout_in_eval(wrong):
    model = nn.Sequential(net(), LateDropout(wrong))
    loop(model, sgd(model))


class ForgetsAutocast(nn.Module):
    """A compiled graph that was traced outside of autocast."""

    def __init__(self, wrong):
        super().__init__()
        self.net, self.wrong = net(), wrong

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.wrong):
            return self.net(x).float()


@planted(
    "lightning-thunder-725",
    "20",
    "autocast is not applied",
    "preflight",
    Found("autocast-without-effect"),
)
def autocast_not_applied(wrong):
    model = ForgetsAutocast(wrong)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


@planted(
    "mmpretrain-702",
    "20",
    "frozen_stages is ignored",
    "preflight --declare",
    Found("not-frozen"),
)
@declares(frozen=["0.*"])
def frozen_stages_ignored(wrong):
    model = net()
    frozen_stages = 1
    if not wrong:
        for parameter in model[:frozen_stages].parameters():
            parameter.requires_grad = False
    loop(model, sgd(model))


class LazyNorm(nn.Module):
    """As spectral norm: the scale is computed in training only, so the first evaluation has none."""

    def __init__(self, wrong):
        super().__init__()
        self.net = net()
        self.register_buffer("scale", torch.ones(()))
        if not wrong:
            self.scale = self.net[0].weight.detach().norm()

    def forward(self, x):
        if self.training:
            self.scale = self.net[0].weight.detach().norm()
        return self.net(x / self.scale)


@planted(
    "pytorch-51800",
    "20",
    "spectral norm is not set before the first training forward",
    "preflight",
    Found("eval-before-training"),
)
def evaluation_before_training(wrong):
    model = LazyNorm(wrong)
    model.eval()
    with torch.no_grad():
        model(batch(99)[0])
    model.train()
    loop(model, sgd(model))


@planted(
    "transformers-29903",
    "20",
    "the saved state dict is corrupt",
    "preflight",
    Found("checkpoint-differs"),
)
def corrupt_checkpoint(wrong):
    model = net()

    def save(step):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if wrong:
            state["0.weight"].zero_()  # gathered too early, say
        torch.save(state, Path(folder, "model.pt"))

    with TemporaryDirectory() as folder:
        loop(model, sgd(model), after=save)


@planted(
    "deepspeed-5489",
    "new",
    "frozen parameters are missing in the checkpoint",
    "preflight",
    Found("checkpoint-incomplete"),
)
def frozen_missing_in_checkpoint(wrong):
    model = net()
    model[2].requires_grad_(False)

    def save(step):
        kept = {n for n, p in model.named_parameters() if p.requires_grad or not wrong}
        state = {n: t for n, t in model.state_dict().items() if n in kept}
        torch.save(state, Path(folder, "model.pt"))

    with TemporaryDirectory() as folder:
        loop(model, sgd(model), after=save)


@planted(
    "accelerate-2665",
    "new",
    "the optimizer has the parameters of before",
    "watch",
    Found("not-in-optimizer", 0),
)
def optimizer_of_old_parameters(wrong):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrong:
        replace_parameters(model)
    return train(quiet(model, optimizer), model, optimizer)


@planted(
    "deepspeed-6770",
    "new",
    "one group of the optimizer has other tensors",
    "watch",
    Found("not-in-optimizer", 0),
)
def one_group_of_old_parameters(wrong):
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    if wrong:
        model[2] = nn.Linear(16, 4)
    return train(quiet(model, optimizer), model, optimizer)


@planted(
    "October 2024",
    "more",
    "a mean per micro-batch of unequal token counts",
    "preflight",
    Found("per-micro-batch-mean"),
)
def mean_per_micro_batch(wrong):
    model = net()
    optimizer = sgd(model)
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        for part in (slice(0, 1), slice(1, 4)):
            if wrong:
                loss = F.mse_loss(model(x[part]), y[part]) / 2
            else:
                loss = F.mse_loss(model(x[part]), y[part], reduction="sum") / y.numel()
            loss.backward()
        optimizer.step()
