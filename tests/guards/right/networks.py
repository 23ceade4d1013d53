"""Models of many shapes in the plain loop."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint_sequential

from tests.guards.right.program import classify, fit, ids, rand, right


def mlp(*widths):
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@right
def regression():
    model = mlp(8, 16, 1)
    fit(model, lambda step: F.mse_loss(model(rand(step, 4, 8)), rand(step + 50, 4, 1)))


@right
def polynomial():
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0, 1))
    x = torch.linspace(-3, 3, 50)
    powers, optimizer = x[:, None] ** torch.arange(1, 4), torch.optim.RMSprop(model.parameters())

    def loss(step):
        part = powers[step * 10 : step * 10 + 10]
        return F.mse_loss(model(part), part[:, 0].sin(), reduction="sum")

    fit(model, loss, optimizer=optimizer)


@right
def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4)
    )
    classify(model, 4, 3, 8, 8, optimizer=torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.b(self.a(x)).relu()).mean((2, 3)))


@right
def residual_network():
    classify(Residual(), 4, 3, 6, 6)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        skip = self.down(x).relu()
        return self.out(torch.cat([self.up(self.mid(F.max_pool2d(skip, 2)).relu()), skip], 1))


@right
def segmentation_with_ignored_pixels():
    model = Unet()

    def loss(step):
        target = ids(step, 2, 8, 8, below=6) - 1
        return F.cross_entropy(model(rand(step, 2, 3, 8, 8)), target, ignore_index=-1)

    fit(model, loss)


@right
def autoencoder():
    model = nn.Sequential(mlp(8, 3), mlp(3, 8))
    fit(model, lambda step: F.mse_loss(model(x := rand(step, 4, 8)), x))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return self.decode(z), kl


@right
def variational_autoencoder():
    model = Variational()

    def loss(step):
        x = rand(step, 4, 8).sigmoid()
        shown, kl = model(x)
        return F.binary_cross_entropy_with_logits(shown, x, reduction="sum") + kl

    fit(model, loss)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x):
        weights, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 4)
        for at, expert in enumerate(self.experts):
            mine = chosen == at
            out[mine] = expert(x[mine]) * weights[mine, None]
        return out


@right
def mixture_of_experts():
    classify(Experts(), 16, 8)


@right
def graph_convolution():
    model, edges = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]), (rand(0, 6, 6) > 0).float()

    def loss(step):
        hidden = (edges @ model[0](rand(step, 6, 8))).relu()
        return F.cross_entropy(edges @ model[1](hidden), ids(step, 6, below=4))

    fit(model, loss)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.ModuleList(nn.Embedding(4, 3) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(5), mlp(11, 8, 1)

    def forward(self, kinds, numbers):
        parts = [embed(kinds[:, at]) for at, embed in enumerate(self.kinds)]
        return self.head(torch.cat([*parts, self.norm(numbers)], 1))


@right
def table_of_kinds_and_numbers():
    model = Table()
    fit(
        model,
        lambda step: F.mse_loss(
            model(ids(step, 8, 2, below=4), rand(step, 8, 5)), rand(step, 8, 1)
        ),
    )


@right
def neural_differential_equation():
    model = mlp(4, 8, 4)

    def loss(step):
        state = rand(step, 4, 4)
        for _ in range(4):
            state = state + 0.1 * model(state)
        return (state - 1).square().mean()

    fit(model, loss)


@right
def physics_informed():
    model = mlp(1, 8, 8, 1)

    def loss(step):
        t = rand(step, 8, 1).requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().sum()

    fit(model, loss)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(mlp(2, 8, 4) for _ in range(2))

    def forward(self, x):
        total = x.new_zeros(len(x))
        for net in self.nets:
            left, right_half = x.chunk(2, 1)
            scale, shift = net(left).chunk(2, 1)
            x = torch.cat([right_half * scale.tanh().exp() + shift, left], 1)
            total = total + scale.tanh().sum(1)
        return x, total


@right
def normalising_flow():
    model = Flow()

    def loss(step):
        z, volume = model(rand(step, 8, 4))
        return (z.square().sum(1) / 2 - volume).mean()

    fit(model, loss)


@right
def diffusion():
    model = mlp(9, 16, 8)

    def loss(step):
        time, noise = torch.rand(4, 1), torch.randn(4, 8)
        noisy = (1 - time).sqrt() * rand(step, 4, 8) + time.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time], 1)), noise)

    fit(model, loss)


@right
def spectral_and_weight_norm():
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.weight_norm(nn.Linear(8, 4)),
    )
    classify(model, 4, 8)


@right
def orthogonal_weights():
    classify(nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 4)), 4, 8)


@right
def pruned():
    model = mlp(8, 16, 4)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    classify(model, 4, 8)


@right
def checkpoint_in_segments():
    model = nn.Sequential(*(mlp(8, 8) for _ in range(4)))
    fit(
        model,
        lambda step: (
            checkpoint_sequential(model, 2, rand(step, 4, 8), use_reentrant=False).square().mean()
        ),
    )


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad  # straight through


@right
def straight_through_estimator():
    model = mlp(8, 8, 4)
    fit(model, lambda step: (Clamped.apply(model(rand(step, 4, 8))) - 1).square().mean())


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(mlp(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            keep = torch.rand(len(x), 1) < 0.8 if self.training else torch.ones(len(x), 1)
            x = x + block(x) * keep
        return self.head(x)


@right
def stochastic_depth():
    classify(StochasticDepth(), 8, 8)
