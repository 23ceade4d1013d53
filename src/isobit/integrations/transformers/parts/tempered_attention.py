"""Attention whose queries are multiplied by a factor of their position, in layers without rotary embeddings.

Stock counts positions from the start of the row, padding included; here they are those of the sample. The factor is one
chain of operations per position, so that it does not depend on the tokens of a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.foundation.machine import keeping_subnormals
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.parts.attention import attend
from isobit.integrations.transformers.parts.rotary import rotate
from isobit.ops.portable.elementary import log_positive


def forward_tempered(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Compute the attention block; rotated queries and keys may be normalised per head."""
    rows = hidden_states.shape[:-1]
    q, k, v = (
        layer(hidden_states).view(*rows, -1, module.head_dim)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        q, k = (rotate(t, *position_embeddings, "pairs", 2) for t in (q, k))
    if hasattr(module, "qk_norm"):
        q, k = module.qk_norm(q), module.qk_norm(k)
    if module.attn_temperature_tuning and not module.use_rope:
        factors = factors_of(current_layout().positions, module.floor_scale, module.attn_scale)
        q = (q * factors[..., None, None]).to(q.dtype)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    dropout = module.attention_dropout if module.training else 0.0
    options = {"dropout": dropout, "scaling": module.scaling, **named}
    mixed, _ = attend(module, q, k, v, attention_mask, **options)
    return module.o_proj(mixed.reshape(*rows, -1)), None


@torch.no_grad()
@keeping_subnormals
def factors_of(positions: Tensor, floor_scale: float, attn_scale: float) -> Tensor:
    """Return log(1 + floor((position + 1) / floor_scale)) · attn_scale + 1, [B, T] in fp32."""
    steps = torch.floor((positions.float() + 1.0) / floor_scale)
    return log_positive(steps + 1.0) * attn_scale + 1.0
