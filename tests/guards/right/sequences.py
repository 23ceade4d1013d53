"""Models of sequences in the plain loop."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.guards.right.program import fit, ids, rand, right


class CharacterModel(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(16, 8), cell, nn.Linear(8, 16)

    def forward(self, tokens, state=None):
        hidden, state = self.cell(self.embed(tokens), state)
        return self.head(hidden), state


@right
def recurrent_network_with_carried_state():
    model = CharacterModel(nn.RNN(8, 8, batch_first=True))
    state = None

    def loss(step):
        nonlocal state
        tokens = ids(step, 2, 7)
        logits, state = model(tokens[:, :-1], None if state is None else state.detach())
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    fit(model, loss)


@right
def tagger_with_packed_sequences():
    model = nn.LSTM(8, 8, bidirectional=True, batch_first=True)
    head = nn.Linear(16, 4)
    both = nn.ModuleList([model, head])

    def loss(step):
        packed = nn.utils.rnn.pack_padded_sequence(rand(step, 3, 5, 8), [5, 3, 2], batch_first=True)
        hidden = model(packed)[0].data
        return F.cross_entropy(head(hidden), ids(step, len(hidden), below=4))

    fit(both, loss)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.encode, self.decode = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
        self.head = nn.Linear(16, 16)

    def forward(self, source, target):
        memory, state = self.encode(self.embed(source))
        state, rows = state[0], []
        for at in range(target.shape[1] - 1):
            state = self.decode(self.embed(target[:, at]), state)
            weights = (memory @ state[:, :, None]).softmax(1)
            rows.append(self.head(torch.cat([state, (weights * memory).sum(1)], 1)))
        return torch.stack(rows, 1)


@right
def translation_with_attention():
    model = Translator()

    def loss(step):
        target = ids(step + 9, 2, 5)
        logits = model(ids(step, 2, 6), target)
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    fit(model, loss)


@right
def text_classification():
    model = nn.Sequential(nn.EmbeddingBag(16, 8), nn.Linear(8, 4))
    fit(model, lambda step: F.cross_entropy(model(ids(step, 4, 5)), ids(step, 4, below=4)))


@right
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 16))

    def loss(step):
        tokens = ids(step, 2, 6)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    fit(model, loss)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(16, 8), nn.Parameter(torch.zeros(6, 8))
        self.norm, self.joined, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        q, k, v = self.joined(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x @ self.embed.weight.T  # tied


@right
def causal_language_model():
    model = Decoder()

    def loss(step):
        tokens = ids(step, 2, 7)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    fit(model, loss)


@right
def speech_with_ctc():
    model = CharacterModel(nn.GRU(8, 8, batch_first=True))

    def loss(step):
        logits, _ = model(ids(step, 2, 12))
        target, lengths = ids(step, 2, 4) % 15 + 1, torch.full((2,), 12)
        log_p = logits.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_p, target, lengths, torch.full((2,), 4))

    fit(model, loss)
