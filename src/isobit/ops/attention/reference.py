"""The definition of isobit.attention in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Return softmax(q @ k.T · scale) @ v per head, for q [B, T, H, D] and k, v [B, S, H_kv, D].

    Query i of T is position S − T + i; causal attention shows it that position's key and all before it.
    """
    group, (tokens, keys) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (t.double().repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        hidden = torch.ones(tokens, keys, device=q.device).triu(keys - tokens + 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def example_attention(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, with x [6, 48] as the values of three heads of 16."""
    rows = draw(6, 48, dtype=x.dtype, seed=0)
    q, k, v = (t.reshape(1, 6, 3, 16) for t in (rows, rows, x))
    return {"q": q, "k": k, "v": v, "is_causal": True}
