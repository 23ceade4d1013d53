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
def generator_and_discriminator():
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1)
    of_maker, of_judge = adam(maker), adam(judge)
    real, fake = torch.ones(4, 1), torch.zeros(4, 1)
    for step in range(4):
        judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(rand(step, 4, 8)), real).backward()
        made = maker(rand(step + 50, 4, 4))
        F.binary_cross_entropy_with_logits(judge(made.detach()), fake).backward()
        of_judge.step()
        maker.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), real).backward()
        of_maker.step()


@right
def gradient_penalty():
    critic = mlp(8, 16, 1)

    def loss(step):
        x = rand(step, 4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return critic(rand(step + 50, 4, 8)).mean() - critic(x).mean() + 10 * penalty

    fit(critic, loss)


@right
def policy_gradient():
    policy = mlp(8, 16, 4)

    def loss(step):
        choice = torch.distributions.Categorical(logits=policy(rand(step, 8, 8)))
        action = choice.sample()
        return -(choice.log_prob(action) * (action.float() - 1.5)).mean()

    fit(policy, loss)


@right
def value_learning_with_a_target():
    model = mlp(8, 16, 4)
    target = copy.deepcopy(model)

    def loss(step):
        with torch.no_grad():
            wanted = 1 + 0.9 * target(rand(step + 50, 4, 8)).max(1).values
        return F.smooth_l1_loss(model(rand(step, 4, 8))[:, 0], wanted)

    def synchronise(step):
        if step % 2:
            target.load_state_dict(model.state_dict())

    fit(model, loss, after=synchronise)


@right
def actor_and_critic():
    body, actor, critic = mlp(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)
    model = nn.ModuleList([body, actor, critic])

    def loss(step):
        hidden = body(rand(step, 8, 8))
        choice, value = torch.distributions.Categorical(logits=actor(hidden)), critic(hidden)[:, 0]
        action = choice.sample()
        gain = action.float() - value
        return gain.square().mean() - (choice.log_prob(action) * gain.detach()).mean()

    fit(model, loss)


@right
def clipped_policy_over_one_buffer():
    """PPO: several steps on the same observations."""
    policy = mlp(8, 16, 4)
    optimizer = adam(policy)
    for round_ in range(2):
        seen, action = rand(round_, 8, 8), ids(round_, 8, below=4)
        with torch.no_grad():
            old = policy(seen).log_softmax(1)[torch.arange(8), action]
        for _ in range(3):
            optimizer.zero_grad()
            ratio = (policy(seen).log_softmax(1)[torch.arange(8), action] - old).exp()
            gain = action.float() - 1.5
            (-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()).backward()
            optimizer.step()


@right
def triplets():
    model = mlp(8, 16, 4)
    fit(
        model,
        lambda step: F.triplet_margin_loss(*(model(rand(step + k, 4, 8)) for k in (0, 50, 90))),
    )


@right
def contrast_of_two_views():
    model = mlp(8, 16, 4)

    def loss(step):
        x = rand(step, 4, 8)
        a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(4))

    fit(model, loss)


@right
def distillation():
    teacher, model = mlp(8, 32, 4).eval(), mlp(8, 8, 4)

    def loss(step):
        x = rand(step, 4, 8)
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        return F.kl_div(model(x).log_softmax(1), wanted, reduction="batchmean")

    fit(model, loss)


@right
def preference_against_a_reference():
    """DPO: a frozen copy of the policy."""
    model = mlp(8, 16, 4)
    reference = copy.deepcopy(model).requires_grad_(False)

    def loss(step):
        better, worse = rand(step, 4, 8), rand(step + 50, 4, 8)
        a, b = (model(x).log_softmax(1)[:, 0] for x in (better, worse))
        c, d = (reference(x).log_softmax(1)[:, 0] for x in (better, worse))
        return -F.logsigmoid((a - c) - (b - d)).mean()

    fit(model, loss)


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
def two_tasks():
    body, heads = mlp(8, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])

    def loss(step):
        hidden = body(rand(step, 4, 8))
        first = F.cross_entropy(heads[0](hidden), ids(step, 4, below=4), label_smoothing=0.1)
        return first + 0.5 * F.mse_loss(heads[1](hidden), rand(step + 50, 4, 1))

    fit(nn.ModuleList([body, heads]), loss)


@right
def mixed_examples():
    model = mlp(8, 16, 4)

    def loss(step):
        x, y = rand(step, 4, 8), ids(step, 4, below=4)
        share, order = float(torch.rand(())), torch.randperm(4)
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    fit(model, loss)


@right
def many_labels_with_weights():
    model = mlp(8, 16, 4)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss(step):
        target = ids(step, 4, 4, below=2).float()
        return F.binary_cross_entropy_with_logits(
            model(rand(step, 4, 8)), target, pos_weight=weight
        )

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
