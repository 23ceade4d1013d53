"""Programs with a planted bug, `program(True)`, and their right twins, `program(False)`; `TWINS` has the rules.

`MORE_RIGHT` are right programs of other shapes.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from tests.guards.preflight_programs import loop, sgd
from tests.guards.watched_programs import batch, net

LENGTHS = ((1, 7), (3, 5), (2, 6), (4, 8))  # tokens of the rows of each micro-batch


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))


def sentences(lengths, step):
    """Ids, and targets that are ignored after each row's length."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 16, (len(lengths), 9), generator=generator)
    ends = torch.tensor(lengths)[:, None]
    return ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(8) >= ends, -100)


def accumulate(loss_of):
    model = words()
    optimizer = sgd(model)
    for step in range(4):
        parts = [sentences(each, 10 * step + at) for at, each in enumerate(LENGTHS)]
        tokens = sum(int((y != -100).sum()) for _, y in parts)
        optimizer.zero_grad()
        for x, y in parts:
            loss_of(model(x).flatten(0, 1), y.flatten(), tokens, len(parts)).backward()
        optimizer.step()


def mean_per_micro_batch(wrong):
    """October 2024: every micro-batch is divided by its own tokens."""

    def loss(logits, y, tokens, parts):
        if wrong:
            return F.cross_entropy(logits, y) / parts
        return F.cross_entropy(logits, y, reduction="sum") / tokens

    accumulate(loss)


def masked_mean_per_micro_batch(wrong):
    def loss(logits, y, tokens, parts):
        each = nn.CrossEntropyLoss(reduction="none")(logits, y.clamp(min=0)) * (y != -100)
        return each.sum() / ((y != -100).sum() * parts if wrong else tokens)

    accumulate(loss)


class StaysInTraining(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(True)


def batch_norm_in_eval(wrong):
    torch.manual_seed(0)
    norm = StaysInTraining(16) if wrong else nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4))
    loop(model, sgd(model))


class Centred(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        return x - x.mean(self.axis, keepdim=True)


def samples_mixed(wrong):
    model = nn.Sequential(net(), Centred(0 if wrong else 1))
    loop(model, sgd(model))


class FirstRow(nn.Module):
    def forward(self, x):
        return x[:1]


def first_row_only(wrong):
    model = nn.Sequential(net(), FirstRow()) if wrong else net()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)[0]).square().sum().backward()
        optimizer.step()


def column_against_row(wrong):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = sgd(model)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x) if wrong else model(x)[:, 0], y[:, 0]).backward()
        optimizer.step()


class OwnAutocast(nn.Module):
    """A model that computes in float32 whatever its caller asks for."""

    def __init__(self, wrong):
        super().__init__()
        self.net, self.wrong = net(), wrong

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.wrong):
            return self.net(x).float()


def autocast_switched_off(wrong):
    model = OwnAutocast(wrong)
    optimizer = sgd(model)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


class NormInFloat32(nn.LayerNorm):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def norm_in_float16(wrong):
    torch.manual_seed(0)
    norm = nn.LayerNorm(16) if wrong else NormInFloat32(16)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4))
    optimizer = sgd(model)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()


def save_after_steps(folder, state_of):
    model = net()
    model[0].bias.requires_grad = False
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)

    def save():
        state = {"model": state_of(model), "optimizer": optimizer.state_dict(), "step": 1}
        torch.save(state, folder / "checkpoint.pt")

    loop(model, optimizer, after=save)


def frozen_left_out(wrong, folder):
    """DS-5489."""

    def state_of(model):
        return {
            name: t
            for name, t in model.state_dict().items()
            if not wrong or dict(model.named_parameters())[name].requires_grad
        }

    save_after_steps(folder, state_of)


def one_tensor_corrupt(wrong, folder):
    """TF-29903."""

    def state_of(model):
        state = {name: t.clone() for name, t in model.state_dict().items()}
        state["2.weight"][0, 0] += float(wrong)
        return state

    save_after_steps(folder, state_of)


class Stream(IterableDataset):
    def __init__(self, wrong):
        self.wrong = wrong

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(0 if self.wrong else worker.id)
        while True:
            yield torch.randn(8, generator=generator)


def workers_with_one_seed(wrong):
    """SO-67180955."""
    model = net()
    optimizer = sgd(model)
    for x in DataLoader(Stream(wrong), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class Numbered(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, at):
        return torch.full((8,), float(at))


def epochs_in_one_order(wrong):
    sampler = DistributedSampler(Numbered(), num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(Numbered(), batch_size=4, sampler=sampler)
    model = net()
    optimizer = sgd(model)
    for epoch in range(3):
        if not wrong:
            sampler.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


TWINS = {
    mean_per_micro_batch: ("per-micro-batch-mean", "micro-batches are parts of one batch"),
    masked_mean_per_micro_batch: ("per-micro-batch-mean", "micro-batches are parts of one batch"),
    batch_norm_in_eval: ("eval-depends-on-others", "a sample alone is as among others"),
    samples_mixed: ("eval-depends-on-others", "a sample alone is as among others"),
    first_row_only: ("rows-lost", "as many rows out as in"),
    column_against_row: ("loss-broadcasts", "as many rows out as in"),
    autocast_switched_off: ("autocast-without-effect", "dtypes are as asked"),
    norm_in_float16: ("float16-reduction", "dtypes are as asked"),
    frozen_left_out: ("checkpoint-incomplete", "checkpoint reads back"),
    one_tensor_corrupt: ("checkpoint-differs", "checkpoint reads back"),
    workers_with_one_seed: ("workers-alike", "workers yield different data"),
    epochs_in_one_order: ("epochs-alike", "epochs differ"),
}


# ---- right programs of other shapes ------------------------------------------------------------------------


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
    import copy

    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    def save():
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.5)
        torch.save(average.state_dict(), folder / "average.pt")

    loop(model, sgd(model), after=save)


def half_saved(folder):
    from safetensors.torch import save_file

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
