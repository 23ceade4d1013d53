"""Kernels as `isobit check --like` calls them: isobit's own and PyTorch's, with the defaults of the references."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from isobit.library import stock
from isobit.library.any_kernel.operators import LAYER_EPS, RMS_EPS
from isobit.ops.attention import op as attention_op
from isobit.ops.layer_norm import op as layer_norm_op
from isobit.ops.log_softmax import op as log_softmax_op
from isobit.ops.rms_norm import op as rms_norm_op
from isobit.ops.rotary import op as rotary_op


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `isobit.rms_norm`."""
    return rms_norm_op.rms_norm(x, weight, RMS_EPS)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `isobit.layer_norm`."""
    return layer_norm_op.layer_norm(x, weight, bias, LAYER_EPS)


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Return `isobit.attention`, whose heads are after the tokens."""
    moved = (t.transpose(-2, -3) for t in (q, k, v))
    return attention_op.attention(*moved, is_causal=is_causal).transpose(-2, -3)


def stock_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `F.rms_norm`."""
    return stock.rms_norm(x, weight, RMS_EPS)


def stock_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `F.layer_norm`."""
    return stock.layer_norm(x, weight, bias, LAYER_EPS)


def stock_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Return `F.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def stock_gqa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Return `F.scaled_dot_product_attention` of shared key heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `isobit.rotary`, whose heads are after the tokens."""
    return rotary_op.rotary(x.transpose(-2, -3), cos, sin).transpose(-2, -3)


def stock_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the formula of transformers, by torch."""
    return stock.rotary(x.transpose(-2, -3), cos, sin).transpose(-2, -3)


def stock_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return `F.embedding`."""
    return stock.embedding(ids, weight)


def stock_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return `F.linear` and `F.cross_entropy`."""
    return stock.linear_logprob(hidden, weight, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `isobit.log_softmax` at the targets."""
    found = log_softmax_op.log_softmax(logits.float())
    at = targets.clamp(min=0).unsqueeze(-1)
    return -found.gather(-1, at).squeeze(-1).masked_fill(targets == stock.IGNORED, 0)


def stock_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `F.cross_entropy` without a mean."""
    return F.cross_entropy(logits, targets, reduction="none")
