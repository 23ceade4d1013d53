"""Forward functions of the modules of a Qwen or Llama decoder, computed with isobit's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isobit.comparing.checkpoints.weight_digests import warn_of_rounded_frequencies
from isobit.errors import UnsupportedError
from isobit.integrations.transformers.head import logits_of
from isobit.integrations.transformers.layout import Layout, current_layout, in_force
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import check_embedding
from isobit.integrations.transformers.residual import add, fork
from isobit.nn.linear import read_weight
from isobit.ops.arguments import cast_for_autocast
from isobit.ops.attention.op import attention_in
from isobit.ops.embedding.op import embedding
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear_with_packed
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.rotary.op import rotary
from isobit.ops.swiglu.op import swiglu
from isobit.order.plan import FEATURE_CAP
from isobit.order.samples import Samples
from isobit.parallel.tensor.head_norm import head_norm
from isobit.parallel.tensor.linear import column_linear_group, row_linear
from isobit.parallel.tensor.shard import tp_group_of
from isobit.parallel.tensor.vocab import vocab_embedding

ATTENTION = "isobit"  # our name in transformers' registry of attention functions
LAYOUT = "isobit_layout"  # the keyword that takes a layout through transformers' own forwards
ANGLES = (
    "_isobit_angles"  # on a rotary embedding: frequencies and scaling, and the table made of them
)
POSITIONS_AT_ONCE = 16


def forward_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute RMSNorm over the hidden size."""
    samples = current_layout().samples
    return rms_norm(hidden_states, module.weight, module.variance_epsilon, samples=samples)


def forward_head_norm(module: Any, heads: Tensor) -> Tensor:
    """Compute RMSNorm of each head, [B, T, H, D]; the weight's gradient also sums over heads."""
    samples, tp_group = current_layout().samples, tp_group_of(module)
    if tp_group is not None:
        return head_norm(
            heads, module.weight, module.variance_epsilon, tp_group=tp_group, samples=samples
        )
    return rms_norm(heads, module.weight, module.variance_epsilon, samples=samples, heads=True)


def forward_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer that shares its input with no other; if it is split over ranks, x is a rank's part."""
    samples, tp_group = current_layout().samples, tp_group_of(module)
    if tp_group is not None:
        return row_linear(x, module.weight, module.bias, tp_group=tp_group, samples=samples)
    read = read_weight(module)
    return linear_with_packed(x, read.weight, module.bias, samples, read.packed)


def forward_logits(module: nn.Linear, hidden: Tensor, samples: Samples | None = None) -> Tensor:
    """Compute the language-model head in fp32."""
    return logits_of(hidden, module, samples)


def forward_embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up rows of the table; their gradient is a sum over the samples' tokens."""
    check_embedding("the embedding", module)
    samples, tp_group = current_layout().samples, tp_group_of(module)
    if tp_group is not None:
        return vocab_embedding(
            ids, module.weight, tp_group=tp_group, samples=samples, padding_idx=module.padding_idx
        )
    read = read_weight(module)
    return embedding(ids, read.weight, samples=samples, padding_idx=module.padding_idx)


def forward_mlp(module: Any, x: Tensor) -> Tensor:
    """Compute the gated MLP; gate and up share their input, so they are one operator."""
    layers = (module.gate_proj, module.up_proj)
    gate, up = share_input(x, layers, share_count(module.gate_proj.out_features))
    return module.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


def forward_layer(module: Any, hidden_states: Tensor, **inputs: Any) -> Tensor:
    """Compute attention and MLP on the residual stream.

    A checkpointed layer runs again in backward, where only its keywords know the layout.
    """
    layout = inputs.get(LAYOUT)
    with in_force(current_layout() if layout is None else layout):
        stream, entering = fork(hidden_states)
        mixed, _ = module.self_attn(hidden_states=module.input_layernorm(entering), **inputs)
        stream, entering = fork(add(stream, mixed))
        return add(stream, module.mlp(module.post_attention_layernorm(entering)))


def forward_attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **inputs: Any,
) -> tuple[Tensor, None]:
    """Compute Q, K and V, the norms of Q and K if the model has them, rotary, attention and the output layer."""
    layers = (module.q_proj, module.k_proj, module.v_proj)
    groups = module.k_proj.out_features // module.head_dim
    query, key, value = (
        part.view(*part.shape[:-1], -1, module.head_dim)
        for part in share_input(hidden_states, layers, groups)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = position_embeddings
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    # Under autocast a norm of heads gives fp32, while values have the product's dtype.
    query, key, value = cast_for_autocast(query, key, value)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    mixed, _ = registered_attention(module)(
        module,
        query.transpose(1, 2),
        key,
        value,
        None,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        **inputs,
    )
    return module.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **inputs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' registry calls it: [B, H, T, D] and [B, Hkv, S, D] to [B, T, H, D]."""
    layout: Layout = inputs.get(LAYOUT) or current_layout()
    if dropout:
        raise UnsupportedError(
            expected="attention without dropout",
            received=f"dropout of {dropout} in training",
            remedy="set config.attention_dropout to 0",
        )
    if attention_mask is not None or key.shape[2] != layout.key_rows:
        raise UnsupportedError(
            expected=f"all {layout.key_rows} keys of the samples, and no mask besides the layout",
            received=f"{key.shape[2]} keys" + ("" if attention_mask is None else " and a mask"),
            remedy="use a cache that keeps every key and only those: transformers.DynamicCache() without a config",
        )
    if inputs.get("output_attentions"):
        raise UnsupportedError(
            expected="attention whose weights are not held",
            received="output_attentions=True",
            remedy="disable isobit for the call that looks at attention weights",
        )
    mixed = attention_in(
        layout.places,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=module.is_causal,
        scale=scaling,
        window=sliding_window,
    )
    return mixed, None


def no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the layout has all that a mask would say."""


def registered_attention(module: Any) -> Any:
    """Return our attention function from transformers' registry, or raise if another was set meanwhile."""
    chosen = module.config._attn_implementation
    if chosen != ATTENTION:
        raise UnsupportedError(
            expected=f"attention implementation {ATTENTION!r} while the model is enabled",
            received=repr(chosen),
            remedy="disable isobit before setting another, and give each enabled model a config of its own",
        )
    found = library("modeling_utils").ALL_ATTENTION_FUNCTIONS[chosen]
    if found is not attend:
        raise UnsupportedError(
            expected=f"isobit's attention under the name {ATTENTION!r} in transformers' registry",
            received=f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__name__)}",
            remedy=f"register other attention functions under other names than {ATTENTION!r}",
        )
    return found


@torch.no_grad()
def forward_rotary(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Look up cos and sin [B, T, D] in fp32 by position, so that no batch changes the bits of a row."""
    rows = int(position_ids.max()) + 1 if position_ids.numel() else 1
    frequencies, scaling, angles = module.__dict__.get(ANGLES, (None, None, None))
    if (
        frequencies is None
        or scaling != module.attention_scaling
        or frequencies.device != module.inv_freq.device
        or not torch.equal(frequencies, module.inv_freq)
    ):
        if module.inv_freq.dtype != torch.float32:  # the model was cast after it was enabled
            warn_of_rounded_frequencies(module, "rotary_emb")
        frequencies, scaling = module.inv_freq.clone(), module.attention_scaling
        angles = torch.empty(2, 0, 2 * len(frequencies), device=frequencies.device)
    if angles.shape[1] < rows:
        angles = extend_angles(angles.cpu(), frequencies.cpu().float(), scaling, rows)
        angles = angles.to(frequencies.device)
        module.__dict__[ANGLES] = frequencies, scaling, angles
    cos, sin = angles[:, position_ids].unbind(0)
    return cos, sin


def extend_angles(table: Tensor, frequencies: Tensor, scaling: float, rows: int) -> Tensor:
    """Compute cos and sin of more positions in blocks: each is a call of one shape, on one thread.

    On the CPU also where the model is on a GPU, whose sine has other bits.
    """
    blocks = [table]
    for first in range(table.shape[1], rows, POSITIONS_AT_ONCE):
        places = torch.arange(first, first + POSITIONS_AT_ONCE, dtype=torch.float32, device="cpu")
        angles = (places[:, None] * frequencies).repeat(1, 2)
        blocks.append(torch.stack((angles.cos() * scaling, angles.sin() * scaling)))
    return torch.cat(blocks, dim=1)


def share_input(x: Tensor, layers: tuple[nn.Linear, ...], groups: int) -> tuple[Tensor, ...]:
    """Compute linear layers that share x as one operator, because dX is one sum; `groups` are of the unsplit layers."""
    weights = tuple(layer.weight for layer in layers)
    biases = (
        None if layers[0].bias is None else tuple(layer.bias for layer in layers)
    )  # all or none: check_biases
    samples, tp_group = current_layout().samples, tp_group_of(layers[0])
    if tp_group is not None:
        return column_linear_group(
            x, weights, biases, groups=groups, tp_group=tp_group, samples=samples
        )
    if not wants_gradient(
        x, *weights
    ):  # else packed forms are not read, and would be packed at every step
        reads = tuple(read_weight(layer) for layer in layers)
        if any(read.snapshot is not None for read in reads):
            return tuple(
                linear_with_packed(x, read.weight, layer.bias, samples, read.packed)
                for layer, read in zip(layers, reads, strict=True)
            )
    return linear_group(x, weights, biases, groups=groups, samples=samples)


def wants_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd would take a gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def share_count(features: int) -> int:
    """Return into how many equal parts gate and up are cut for dX: a power of two, at most that of segments.

    So a tensor-parallel rank that owns a share of both owns whole segments of that sum.
    """
    shares = 1
    while shares < FEATURE_CAP and features % (2 * shares) == 0:
        shares *= 2
    return shares
