"""Kernels as `isobit check --like` calls them: isobit's own and PyTorch's, with the defaults of the references."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.any_kernel.operators import LAYER_EPS, RMS_EPS
from isobit.library.subjects import Subject
from isobit.ops.attention import op as attention_op
from isobit.ops.layer_norm import op as layer_norm_op
from isobit.ops.rms_norm import op as rms_norm_op


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


def decode_is_prefill(subject: Subject, case: Case, tally: Tally) -> None:
    """The last query alone, over all keys, has the bits that it has among the other queries."""
    q, k, v = case.arguments.values()
    whole = subject(q, k, v)
    for length in {1, q.shape[-2] // 2 + 1, q.shape[-2]}:
        last = subject(
            q[..., length - 1 : length, :], k[..., :length, :], v[..., :length, :], False
        )
        tally.same(last, whole[..., length - 1 : length, :], f"token {length - 1} decoded")


def one_ulp_in_decode(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Planted: decode with another order of keys."""
    if is_causal:
        return attention(q, k, v)
    return attention(q, k.flip(-2), v.flip(-2), False)
