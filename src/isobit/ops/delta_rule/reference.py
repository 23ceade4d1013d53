"""The definition of isobit.delta_rule in fp64, token by token, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw
from isobit.order.samples import Samples

GATES = ((-1.0, -0.01), (0.1, 0.9))  # from the first to the last of the decays, and of the rates


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, samples: Samples | None = None
) -> Tensor:
    """Return o: S ← e^g S, S ← S + k ⊗ β (v − k S), o = q S, for each token of each sample."""
    repeats = v.shape[-2] // q.shape[-2]
    heads = [t.double().reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
    q, k = (t.repeat_interleave(repeats, 1) for t in heads[:2])
    decay, rate = (t.double().reshape(-1, t.shape[-1]) for t in (g, beta))
    width = v.shape[-3]
    spans = [(i, width) for i in range(0, len(q), width)] if samples is None else samples.spans
    o = [torch.zeros_like(heads[2][0])] * len(q)
    for start, length in spans:
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[-1])
        for t in range(start, start + length):
            state = state * decay[t].exp()[:, None, None]
            wrong = heads[2][t] - (k[t][:, :, None] * state).sum(1)
            state = state + k[t][:, :, None] * (rate[t][:, None] * wrong)[:, None]
            o[t] = (q[t][:, :, None] * state).sum(1)
    return torch.stack(o).reshape(v.shape)


def example_delta_rule(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]; once, since torch would add two gradients."""
    queries, keys = (draw(6, 2, 24, dtype=x.dtype, seed=seed) for seed in (1, 2))
    steps = [torch.linspace(a, b, 24, dtype=torch.float32, device="cpu") for a, b in GATES]
    decay, rate = (step.reshape(6, 4).to(x.dtype) for step in steps)
    values, samples = x.reshape(6, 4, 12), Samples.packed([2, 4])
    return {"q": queries, "k": keys, "v": values, "g": decay, "beta": rate, "samples": samples}
