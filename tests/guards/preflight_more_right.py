"""Right programs of many shapes, on which a check of a preflight must not raise an alarm: `MORE_RIGHT`."""

import copy

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.guards.preflight_programs import loop, sgd
from tests.guards.preflight_twins import accumulate
from tests.guards.watched_programs import net


def mean_weighted_by_tokens():
    accumulate(lambda z, y, tokens, parts: F.cross_entropy(z, y) * ((y != -100).sum() / tokens))


def mean_per_row():
    """Each row counts the same, whatever its length: a choice, not a bug."""

    def loss(logits, y, tokens, parts):
        each = F.cross_entropy(logits, y, reduction="none").view(-1, 8)
        return (each.sum(1) / (y.view(-1, 8) != -100).sum(1)).sum() / 8

    accumulate(loss)


def time_first():
    """A recurrent model whose first dimension is time: rows along it depend on each other."""
    torch.manual_seed(0)
    layer, head = nn.LSTM(8, 8, bidirectional=True), nn.Linear(16, 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x):
            return self.head(self.layer(x)[0])

    model = Model()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 3, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def shuffled_loader():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 8), torch.randn(8, 4))
    model = net()
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def average_saved(folder):
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    def save():
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.5)
        torch.save(average.state_dict(), folder / "average.pt")

    loop(model, sgd(model), after=save)


def half_saved(folder):
    model = nn.parallel.DataParallel(net())

    def save():
        save_file(
            {n: t.bfloat16() for n, t in model.state_dict().items()}, folder / "m.safetensors"
        )

    loop(model, sgd(model), after=save)


class Layer(nn.Module):
    """A linear layer, and how its inputs and outputs are used."""

    def __init__(self, inner, forward):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.use = inner, forward

    def forward(self, *given):
        return self.use(self.inner, *given)


def train_on(model, loss_of):
    optimizer = sgd(model)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def bags_with_offsets():
    model = Layer(nn.EmbeddingBag(20, 3), lambda bag, ids, offsets: bag(ids, offsets))
    starts, y = torch.tensor([0, 2, 5, 7]), torch.tensor([0, 1, 2, 0])
    train_on(model, lambda m: F.cross_entropy(m(torch.randint(0, 20, (9,)), starts), y))


def one_state_at_a_time():
    model = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
    train_on(model, lambda m: torch.stack([m(torch.randn(4)).log()[0] for _ in range(3)]).sum())


def graph():
    """Nodes depend on each other: rows are not samples."""
    edges = torch.full((10, 10), 0.1)
    model = Layer(nn.Linear(4, 3), lambda linear, x, edges: edges @ linear(x))
    y = torch.arange(10) % 3
    train_on(model, lambda m: F.cross_entropy(m(torch.randn(10, 4), edges), y))


def pairs_in_a_batch():
    model = nn.Linear(8, 4)

    def loss(m):
        return F.cross_entropy(m(torch.randn(6, 8)) @ m(torch.randn(6, 8)).T, torch.arange(6))

    train_on(model, loss)


def pooled_rows():
    model = Layer(nn.Linear(8, 1), lambda linear, x: linear(x).mean(0))
    train_on(
        model, lambda m: F.binary_cross_entropy_with_logits(m(torch.randn(5, 8)), torch.ones(1))
    )


def real_and_fake():
    """A critic with two losses, of unequal batches, each with a backward of its own."""
    maker, critic = nn.Linear(2, 8), nn.Linear(8, 1)
    first, second = sgd(critic), sgd(maker)
    for step in range(4):
        torch.manual_seed(step)
        first.zero_grad()
        for x, y in ((torch.randn(4, 8), 1.0), (maker(torch.randn(6, 2)).detach(), 0.0)):
            z = critic(x)
            F.binary_cross_entropy_with_logits(z, torch.full_like(z, y)).backward()
        first.step()
        second.zero_grad()
        critic(maker(torch.randn(6, 2))).mean().backward()
        second.step()


def two_heads_in_turn():
    """Two tasks with a backward each: their counts have nothing to do with each other."""
    model = nn.Linear(8, 7)
    optimizer = sgd(model)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 8))[:, :3], torch.arange(4) % 3).backward()
        F.cross_entropy(model(torch.randn(6, 8))[:, 3:], torch.arange(6) % 4).backward()
        optimizer.step()


MORE_RIGHT = (
    real_and_fake,
    two_heads_in_turn,
    bags_with_offsets,
    one_state_at_a_time,
    graph,
    pairs_in_a_batch,
    pooled_rows,
    mean_weighted_by_tokens,
    mean_per_row,
    time_first,
    shuffled_loader,
    average_saved,
    half_saved,
)
