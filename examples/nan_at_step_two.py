"""A run that is NaN within three steps, found before it starts and while it runs.

24 blocks from a random start. Two mistakes: the optimizer of the embedding, which was moved off the device, reads
gradients that nobody clips; and AdamW is created without the betas of the configuration.

    python examples/nan_at_step_two.py
"""

import torch
from torch import nn
from torch.nn import functional as F

from isobit.guards import preflight, watch

CONFIG = {"betas": [0.9, 0.95], "max_grad_norm": 1.0}
SIZE, WORDS, BLOCKS = 32, 64, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + 0.1 * self.down(F.gelu(self.up(x)) ** 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(SIZE, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(right):
    torch.manual_seed(0)
    model = Model()
    rest = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
    betas = {"betas": (0.9, 0.95)} if right else {}
    embedding = torch.optim.SGD(model.embedding.parameters(), lr=100.0)
    return model, torch.optim.AdamW(rest, lr=3e-4, **betas), embedding


def train(right, guarded=False, steps=6):
    model, blocks, embedding = build(right)
    guards = [watch(model, o, sinks=[], max_norm=1.0) for o in (embedding, blocks) if guarded]
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (8, 17))
        blocks.zero_grad()
        embedding.zero_grad()
        loss = F.cross_entropy(50 * model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        clipped = model.parameters() if right else blocks.param_groups[0]["params"]  # the mistake
        nn.utils.clip_grad_norm_(clipped, 1.0)
        embedding.step()
        blocks.step()
    for guard in guards:
        guard.close()
    return guards


def main():
    assert preflight(lambda: train(True), config=CONFIG).is_clean
    print("before:")
    found = preflight(lambda: train(False), config=CONFIG).findings
    for finding in found:
        print(f"  {finding.rule}, step {finding.step}: {finding.message}"[:140])
    assert {"norm-above-limit", "hyperparameter"} <= {finding.rule for finding in found}
    print("while it runs:")
    events = [event for guard in train(False, guarded=True) for event in guard.findings]
    first = min((e for e in events if "nonfinite" in e.name), key=lambda event: event.step)
    print(f"  {first}")
    assert "the first output that is not finite is that of blocks." in first.message


if __name__ == "__main__":
    main()
