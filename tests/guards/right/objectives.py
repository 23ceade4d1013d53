"""Losses of many kinds around small models: adversaries, reinforcement, contrast, distillation, several tasks."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.guards.right.loops import adam
from tests.guards.right.networks import mlp
from tests.guards.right.program import fit, ids, rand, right


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
