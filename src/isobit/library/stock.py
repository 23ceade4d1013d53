"""What PyTorch computes for each operator: the controls, and in fp64 the references for accuracy.

Keywords that only isobit's operators have (`samples`, `heads`) are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`."""
    return F.linear(x, weight, bias)


def linear_group(x: Tensor, weights: Any, biases: Any = None, **_: Any) -> tuple[Tensor, ...]:
    """Return one `F.linear` per weight; autograd adds their input gradients."""
    each = zip(weights, biases or [None] * len(weights), strict=False)
    return tuple(F.linear(x, weight, bias) for weight, bias in each)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return `torch.softmax`."""
    return torch.softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return `torch.log_softmax`."""
    return torch.log_softmax(x, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Return `F.rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """Return `F.layer_norm`."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu(x: Tensor) -> Tensor:
    """Return `F.silu`."""
    return F.silu(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return `F.gelu`, whose 1 + erf cancels where x is negative."""
    return F.gelu(x, approximate=approximate)


def exact_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU by formulas without cancellation; in fp64 this is the reference."""
    if approximate == "tanh":
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(-x / 2**0.5)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `F.silu(gate) * up`, as models write it: in 16 bits, silu is rounded before the product."""
    return F.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what transformers' apply_rotary_pos_emb computes."""
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat([-high, low], -1) * sin.unsqueeze(-2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` of [..., tokens, heads, depth]; keys of a group are repeated.

    With a soft cap, which that function does not have, by products and softmax, as models compute it.
    """
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    asked, known = q.shape[-2], k.shape[-2]
    positions, keys = torch.arange(asked).unsqueeze(1) + known - asked, torch.arange(known)
    seen = (keys <= positions) | torch.tensor(not is_causal)
    if window:
        seen = seen & ((keys - positions).abs() < window)
    if chunk_size:
        seen = seen & (keys // chunk_size == positions // chunk_size)
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    if softcap is not None:
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap)
        y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return y.transpose(-2, -3)
    plain = is_causal and asked == known and window is None and chunk_size is None
    mask = None if plain or bool(seen.all()) else seen
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, scale=scale)
    return y.transpose(-2, -3)


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, **_: Any) -> Tensor:
    """Return `F.embedding`."""
    return F.embedding(ids, weight, padding_idx)


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, **_: Any
) -> Tensor:
    """Return log-probabilities by `F.linear` and `F.cross_entropy`."""
    logits = (F.linear(hidden, weight) / temperature).reshape(-1, len(weight))
    chosen = targets.reshape(-1).long()
    return -F.cross_entropy(logits, chosen, ignore_index=IGNORED, reduction="none").reshape(
        targets.shape
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    **_: Any,
) -> Tensor:
    """Return the mean loss by `F.linear` and `F.cross_entropy`."""
    logits = (F.linear(hidden, weight).float() / temperature).reshape(-1, len(weight))
    chosen = targets.reshape(-1).long()
    total = F.cross_entropy(logits, chosen, ignore_index=ignore_index, reduction="sum")
    return total / (int((targets != ignore_index).sum()) if num_items is None else num_items)


def exact_sum(x: Tensor) -> Tensor:
    """Return `Tensor.sum` in fp32."""
    return x.sum(dtype=torch.float32)


def total_norm(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return `torch.nn.utils.get_total_norm`: the norm of the norms."""
    return torch.nn.utils.get_total_norm(tensors).float()
