"""Twins of what only a whole run shows: losses without a name, several optimizers, what comes before training."""

import torch
from torch import nn

from tests.guards.bugs.on_one_rank import loop
from tests.guards.watched_programs import batch, net

LENGTHS = torch.tensor([1, 7, 3, 5, 2, 6, 4, 8])
MASK = (torch.arange(8) < LENGTHS[:, None]).float()


def in_two_parts(model, loss_of, steps=4):
    """Accumulate a loss of three rows and of five."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, 8, 8)
        optimizer.zero_grad()
        for part in (slice(0, 3), slice(3, 8)):
            loss_of(model(x[part]), part).backward()
        optimizer.step()


def own_loss_per_micro_batch(wrong):
    def loss(made, part):
        squares = (made - 1).square()
        return squares.mean() / 2 if wrong else squares.sum() / (8 * 8 * 4)

    in_two_parts(nn.Linear(8, 4), loss)


def own_masked_loss_per_micro_batch(wrong):
    def loss(made, part):
        counted = MASK[part].sum() if wrong else MASK.sum()
        total = (made.square().sum(-1) * MASK[part]).sum() / counted
        return total / 2 if wrong else total

    in_two_parts(nn.Linear(8, 4), loss)


def own_loss_that_is_not_finite(wrong):
    """Its gradient is finite: only the number itself shows it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        penalty = torch.tensor(0.0 if wrong and step == 1 else 1.0).log()
        (model(batch(step)[0]).square().mean() - penalty).backward()
        optimizer.step()


def adversaries(critic_steps, steps, trains_maker=True, optimizer=torch.optim.RMSprop):
    """A critic that steps more often than what it criticises."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 8), nn.Linear(8, 1)
    first, second = (optimizer(m.parameters(), lr=1e-3) for m in (critic, maker))
    for step in range(steps):
        torch.manual_seed(step)
        first.zero_grad()
        real, made = torch.randn(4, 8), maker(torch.randn(4, 2)).detach()
        (critic(made).mean() - critic(real).mean()).backward()
        first.step()
        if step % critic_steps == critic_steps - 1:
            second.zero_grad()
            (-critic(maker(torch.randn(4, 2))).mean()).backward()
            if trains_maker:
                second.step()


def maker_never_steps(wrong):
    adversaries(1, 40, trains_maker=not wrong)


def evaluated_first(model):
    """Evaluate before training, as a sanity check does."""
    model.eval()
    with torch.no_grad():
        model(batch(99)[0])
    model.train()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.01))


def spectral_norm_evaluated_first(wrong):
    """The older function starts from random vectors; the newer one iterates when it is applied."""
    torch.manual_seed(0)
    norm = nn.utils.spectral_norm if wrong else nn.utils.parametrizations.spectral_norm
    evaluated_first(nn.Sequential(norm(nn.Linear(8, 16)), nn.Linear(16, 4)))


class Generates(nn.Module):
    """Stops after a number of tokens, or one too late."""

    def __init__(self, late):
        super().__init__()
        self.net, self.late = net(), late

    def forward(self, x):
        return self.net(x)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens + self.late):
            idx = torch.cat([idx, idx[:, -1:]], 1)
        return idx


def one_token_too_many(wrong):
    model = Generates(int(wrong))
    ids = torch.ones(2, 3, dtype=torch.int64)
    loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), after=lambda _: model.generate(ids, 4)
    )


MICRO_BATCHES = "micro-batches are parts of one batch"
WHOLE_RUN_TWINS = {
    own_loss_per_micro_batch: ("per-micro-batch-mean", MICRO_BATCHES),
    own_masked_loss_per_micro_batch: ("per-micro-batch-mean", MICRO_BATCHES),
    own_loss_that_is_not_finite: ("nonfinite-loss", "losses, gradients and weights"),
    maker_never_steps: ("optimizer-not-stepped", "every optimizer steps"),
    spectral_norm_evaluated_first: ("eval-before-training", "evaluation before training"),
    one_token_too_many: ("generated-too-much", "generation keeps to its limit"),
}


class FirstBatch(nn.Module):
    """Sets its scale from the first batch, as normalising flows do: a choice, not a bug."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.is_set = False

    def forward(self, x):
        if self.training and not self.is_set:
            self.scale, self.is_set = x.detach().std(), True
        return x / self.scale


def batch_norm_evaluated_first():
    evaluated_first(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))


def batch_norm_of_all_batches_evaluated_first():
    norm = nn.BatchNorm1d(16, momentum=None)
    evaluated_first(nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4)))


def scale_of_the_first_batch_evaluated_first():
    evaluated_first(nn.Sequential(FirstBatch(), nn.Linear(8, 4)))


def dropout_evaluated_first():
    evaluated_first(nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 4)))


def critic_with_five_steps():
    adversaries(5, 100)


def own_losses_of_two_tasks_in_turn():
    """Equal operators on unequal rows, for two heads: neither is a part of the other."""
    torch.manual_seed(0)
    body, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
    model = nn.ModuleList([body, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for head, rows in zip(heads, (4, 6), strict=True):
            head(body(torch.randn(rows, 8))).square().mean().backward()
        optimizer.step()


def episodes_of_unequal_length():
    """A mean per episode, and one backward per episode, is what the author wants."""
    model = nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for length in (3, 5):
            logs = torch.stack([model(torch.randn(1, 4))[0, 0] for _ in range(length)])
            (logs * torch.randn(length)).mean().neg().backward()
        optimizer.step()


WHOLE_RUN_RIGHT = (
    batch_norm_evaluated_first,
    batch_norm_of_all_batches_evaluated_first,
    scale_of_the_first_batch_evaluated_first,
    dropout_evaluated_first,
    critic_with_five_steps,
    own_losses_of_two_tasks_in_turn,
    episodes_of_unequal_length,
)
