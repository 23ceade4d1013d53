"""Programs with a planted bug, `program(True)`, and their right twins, `program(False)`; `TWINS` has the rules."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from tests.guards.bugs.on_one_rank import ForgetsAutocast
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


def autocast_switched_off(wrong):
    model = ForgetsAutocast(wrong)
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
    batch_norm_in_eval: ("eval-depends-on-others", "eval output is batch-independent"),
    samples_mixed: ("eval-depends-on-others", "eval output is batch-independent"),
    first_row_only: ("rows-lost", "as many rows out as in"),
    column_against_row: ("loss-broadcasts", "as many rows out as in"),
    autocast_switched_off: ("autocast-without-effect", "dtypes are as asked"),
    norm_in_float16: ("float16-reduction", "dtypes are as asked"),
    frozen_left_out: ("checkpoint-incomplete", "checkpoint reads back"),
    one_tensor_corrupt: ("checkpoint-differs", "checkpoint reads back"),
    workers_with_one_seed: ("workers-alike", "workers yield different data"),
    epochs_in_one_order: ("epochs-alike", "epochs differ"),
}
