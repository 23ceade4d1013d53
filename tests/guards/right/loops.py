"""Loops of many shapes around small models: several optimizers, losses, schedules, averages, reinforcement."""

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from tests.guards.right.networks import mlp
from tests.guards.right.program import classify, fit, ids, rand, right


def adam(model):
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@right
def transfer_learning():
    model = nn.Sequential(mlp(8, 16, 8).requires_grad_(False), nn.Linear(8, 4))
    classify(model, 4, 8, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.01))


@right
def gradual_unfreezing():
    model = nn.Sequential(mlp(8, 16, 8).requires_grad_(False), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def unfreeze(step):
        model[0].requires_grad_(step >= 1)

    classify(model, 4, 8, optimizer=optimizer, after=unfreeze)


@right
def accumulation_with_one_cycle():
    model = mlp(8, 16, 4)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    for at in range(8):
        F.cross_entropy(model(rand(at, 4, 8)), ids(at, 4, below=4)).div(2).backward()
        if at % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@right
def clipping_by_value_and_noise():
    model = mlp(8, 16, 4)
    optimizer = adam(model)
    for step in range(4):
        optimizer.zero_grad()
        model(rand(step, 4, 8)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
        optimizer.step()


@right
def scaled_gradients():
    model = mlp(8, 16, 4)
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu")
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(rand(step, 4, 8)), ids(step, 4, below=4))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@right
def master_weights():
    model = mlp(8, 16, 4)
    half = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = adam(model)
    for step in range(4):
        half.zero_grad()
        half(rand(step, 4, 8).bfloat16()).float().square().mean().backward()
        for wide, narrow in zip(model.parameters(), half.parameters(), strict=True):
            wide.grad = narrow.grad.float()
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(model.parameters(), half.parameters(), strict=True):
                narrow.copy_(wide)


@right
def averaged_weights():
    model = mlp(8, 16, 4)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    classify(model, 4, 8, after=lambda step: average.update_parameters(model))


@right
def data_loader_with_evaluation():
    data = TensorDataset(rand(0, 40, 8), ids(0, 40, below=4))
    training, rest = random_split(data, [32, 8])
    model = mlp(8, 16, 4)
    optimizer = adam(model)
    for _ in range(2):
        model.train()
        for x, y in DataLoader(training, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            sum(float(F.cross_entropy(model(x), y)) for x, y in DataLoader(rest, batch_size=4))


class Stream(IterableDataset):
    def __iter__(self):
        return (rand(at, 8) for at in range(32))


@right
def stream_of_data():
    model = mlp(8, 16, 8)
    optimizer = adam(model)
    for x in DataLoader(Stream(), batch_size=4):
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()


@right
def meta_learning():
    model = mlp(8, 16, 4)

    def loss(step):
        named = dict(model.named_parameters())
        inner = functional_call(model, named, rand(step, 4, 8)).square().mean()
        slopes = torch.autograd.grad(inner, named.values(), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(named.items(), slopes, strict=True)}
        return (functional_call(model, moved, rand(step + 50, 4, 8)) - 1).square().mean()

    fit(model, loss)


@right
def sparse_and_dense_optimizers():
    embed, head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)
    optimizers = torch.optim.SparseAdam(embed.parameters()), adam(head)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(head(embed(ids(step, 4, 3)).mean(1)), ids(step, 4, below=4)).backward()
        for optimizer in optimizers:
            optimizer.step()


class Signed(torch.optim.Optimizer):
    """An optimizer of one's own, as Lion."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.sub_(group["lr"] * mean.sign())


@right
def own_optimizer():
    model = mlp(8, 16, 4)
    classify(model, 4, 8, optimizer=Signed(model.parameters()))


@right
def sharpness_aware_steps():
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        x, y = rand(step, 4, 8), ids(step, 4, below=4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        moves = [0.05 * F.normalize(p.grad.flatten(), dim=0).view_as(p) for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


@right
def optimizer_inside_of_the_backward():
    """The tutorial's way to save memory: each parameter has an optimizer, which steps when its gradient is there."""
    model = mlp(8, 16, 4)
    of = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}

    def step_at_once(parameter):
        of[parameter].step()
        of[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(6):
        F.cross_entropy(model(rand(step, 4, 8)), ids(step, 4, below=4)).backward()


@right
def muon_for_matrices_and_adamw_for_the_rest():
    model = nn.Sequential(nn.Embedding(16, 8), mlp(8, 16, 8), nn.Linear(8, 16))
    matrices = [p for p in model[1].parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    pair = (torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3))
    for step in range(4):
        F.cross_entropy(model(ids(step, 8)), ids(step + 9, 8)).backward()
        for optimizer in pair:
            optimizer.step()
        model.zero_grad(set_to_none=True)


@right
def plateaus_and_early_stopping():
    model = mlp(8, 16, 4)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    best = float("inf")
    for step in range(4):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(rand(step, 4, 8)), ids(step, 4, below=4)).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            checked = F.cross_entropy(model(rand(99, 4, 8)), ids(99, 4, below=4)).item()
        schedule.step(checked)
        best = min(best, checked)


@right
def compiled_model():
    model = torch.compile(mlp(8, 16, 4), backend="aot_eager")
    classify(model, 4, 8)


@right
def quasi_newton_steps():
    """All the data in every step, without a loader."""
    model = mlp(4, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x, y = rand(0, 16, 4), rand(1, 16, 1)
    for _ in range(4):

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@right
def style_by_optimising_an_image():
    """The image is what is trained; the network is frozen."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    image = nn.Parameter(rand(0, 1, 3, 8, 8))
    optimizer = torch.optim.Adam([image], lr=0.1)
    aim = network(rand(1, 1, 3, 8, 8))
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(network(image), aim).backward()
        optimizer.step()
