"""The model of the example project."""

import torch
from torch import nn

import isobit


class Classifier(nn.Module):
    """Two layers of isobit's over a mean of embeddings; with torch.nn.Linear, the audit fails."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.first, self.second = isobit.nn.Linear(16, 32), isobit.nn.Linear(32, 4)

    def forward(self, tokens):
        """Return logits [samples, 4] of tokens [samples, 6]."""
        return self.second(self.first(self.embed(tokens).mean(1)).relu())


def with_batch():
    """Return the model and a batch: what `isobit audit` calls."""
    torch.manual_seed(0)
    return Classifier().eval(), torch.randint(0, 50, (8, 6))
