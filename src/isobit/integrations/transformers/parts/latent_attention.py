"""Multi-head latent attention: keys and values are expanded from a latent row, which the cache holds.

The latent rows of all keys are expanded at each call, as transformers does: a row of the expansion does not depend on
others, so that a decoded token has the bits of a prefill. The absorbed form would be another order of addition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from isobit.integrations.transformers.layout import current_layout, in_force
from isobit.integrations.transformers.parts.attention import attend
from isobit.integrations.transformers.parts.rotary import rotate
from isobit.ops.portable.sums import round_once, widen
from isobit.order.plan import FEATURE_CAP, LANES
from isobit.order.tree import merge_items


def forward_latent(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Compute the attention block; queries may have a latent row too."""
    rows, nope, rope = hidden_states.shape[:-1], module.qk_nope_head_dim, module.qk_rope_head_dim
    if module.q_lora_rank is None:
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    q = q.view(*rows, -1, nope + rope).transpose(1, 2)
    q_pass, q_turned = torch.split(q, [nope, rope], dim=-1)
    both = module.kv_a_proj_with_mqa(hidden_states)
    latent, k_turned = torch.split(both, [module.kv_lora_rank, rope], dim=-1)
    latent = module.kv_a_layernorm(latent).unsqueeze(1)
    style = "pairs to halves" if module.config.rope_interleave else "halves"
    q_turned = rotate(q_turned, *position_embeddings, style, 1)
    k_turned = rotate(k_turned.unsqueeze(1), *position_embeddings, style, 1)
    if past_key_values is not None:
        latent, k_turned = past_key_values.update(latent, k_turned, module.layer_idx)
    key, value = expand(module, latent, k_turned)
    # isobit.attention has one depth for all: zeros add nothing to a score, and their outputs are cut off.
    depth = -(-max(nope + rope, value.shape[-1]) // LANES) * LANES
    q, key, values = (
        pad(t, (0, depth - t.shape[-1])) for t in (torch.cat((q_pass, q_turned), -1), key, value)
    )
    dropout = module.attention_dropout if module.training else 0.0
    options = {"dropout": dropout, "scaling": module.scaling, **named}
    mixed, _ = attend(module, q, key, values, attention_mask, **options)
    mixed = mixed[..., : value.shape[-1]]
    return module.o_proj(mixed.reshape(*rows, -1)), None


def expand(module: Any, latent: Tensor, k_turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, [B, H, S, D], of latent rows and rotated keys [B, 1, S, …], cached ones included."""
    layout, nope = current_layout(), module.qk_nope_head_dim
    with in_force(replace(layout, samples=layout.keys)):
        both = module.kv_b_proj(latent.squeeze(1))
    both = both.view(*both.shape[:2], -1, nope + module.v_head_dim).transpose(1, 2)
    key, value = torch.split(both, [nope, module.v_head_dim], dim=-1)
    turned: Tensor = Spread.apply(k_turned, key.shape[1])  # type: ignore[no-untyped-call]
    return torch.cat((key, turned), -1), value


class Spread(torch.autograd.Function):
    """Give one head to all heads; its gradient adds theirs in the order of heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        return x.expand(-1, heads, -1, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        items = list(widen(grad).unbind(1))
        total = merge_items(items, FEATURE_CAP, torch.add)
        return round_once(total, grad.dtype).unsqueeze(1), None
