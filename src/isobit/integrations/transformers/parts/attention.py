"""Attention, as transformers' registry of attention functions calls it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from isobit.errors import UnsupportedError
from isobit.foundation.machine import keeping_subnormals
from isobit.integrations.transformers.layout import (
    LAYOUT,
    Layout,
    current_layout,
    in_force,
    over_ranks,
)
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.layers import refuse_dropout
from isobit.integrations.transformers.parts.masks import Seen, read_mask
from isobit.integrations.transformers.parts.rotary import rotate
from isobit.ops.arguments import cast_for_autocast
from isobit.ops.attention.op import (
    Places,
    attention_in,
    check_attention,
    check_rows_of_keys,
    mask_of,
)
from isobit.ops.attention.portable import Mask
from isobit.ops.linear.op import linear
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.elementary import log_positive
from isobit.ops.portable.samples import spans_of
from isobit.ops.portable.sums import round_once, widen
from isobit.ops.registration import PREFIXES, executor_of, launch
from isobit.ops.share import as_partial, check_share, gradient_dtype, share_in_force
from isobit.ops.softmax.op import softmax
from isobit.order.plan import FEATURE_CAP, LANES
from isobit.order.samples import Samples
from isobit.order.tree import merge_items

# Attention sinks: a score per head that takes part in the softmax and has no value.
#
# [Note: sinks] With lse the log-sum-exp of a query's scores and L = log(e^lse + e^sink), the result is y · e^(lse −
# L). The backward of attention reads y and L in the place of y and lse: p = e^(score − L), and Σ dO·y is that of the
# result. The gradient of a sink is −Σ e^(sink − L) · (dO·y) over the tokens, a sum over samples as a bias has it.


def attend_with_sinks(
    places: Places, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Mask, samples: Samples
) -> Tensor:
    """Compute attention of [B, T, H, D] with sinks [H]; see [Note: sinks]."""
    check_share(samples, sinks)
    made: Tensor = _Sinks.apply(q, k, v, sinks, places, mask, samples)  # type: ignore[no-untyped-call]
    return made


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        places: Places,
        mask: Mask,
        samples: Samples,
    ) -> Tensor:
        shape = q.shape
        if places.crosses:
            q, k, v = (t.flatten(0, -3) for t in (q, k, v))
        where = (places.spans, places.table.starts, places.table.lengths)
        sizes = (q.shape[:-2].numel(), *q.shape[-2:], k.shape[:-2].numel(), k.shape[-2])
        how = mask.options
        y, lse = launch("attention", sizes, q, k, v, *where, *how)
        pair = torch.stack((lse, widen(sinks).to(lse.dtype).expand(lse.shape)), -1)
        share = softmax(pair)  # of the keys, and of the sink
        y = round_once(widen(y) * share[..., :1], y.dtype)
        whole = lse - log_softmax(pair)[..., 0]
        ctx.save_for_backward(q, k, v, y, whole, *where, share[..., 1], sinks)
        ctx.how, ctx.samples, ctx.share = how, samples, share_in_force()
        ctx.prefix = PREFIXES[executor_of("attention", q.dtype, (q, k, v))]
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, whole, spans, blocks, lengths, taken, sinks = ctx.saved_tensors
        if not torch.equal(spans[:, 1], lengths):
            raise UnsupportedError(
                expected="as many queries as keys in every sample",
                received="a gradient through keys of a cache, or of an earlier chunk",
                remedy="train on whole samples; a cache is for inference, under torch.no_grad()",
            )
        check_rows_of_keys(spans, blocks, lengths)
        shape, upstream = grad.shape, grad.reshape(y.shape).contiguous()
        operator = getattr(torch.ops.isobit, f"{ctx.prefix}attention_backward")
        saved = (upstream, q, k, v, y, whole, spans, blocks, lengths)
        grads = [g.reshape(shape[:-2] + g.shape[-2:]) for g in operator(*saved, *ctx.how)]
        dots = linear(widen(upstream) * widen(y), torch.ones(1, y.shape[-1], dtype=taken.dtype))
        terms = -(taken * dots[..., 0]).reshape(-1, len(sinks))
        samples = ctx.samples
        prefix = PREFIXES[executor_of("linear", terms.dtype, (terms,))]
        into = getattr(torch.ops.isobit, f"{prefix}linear_bias_grad")
        total = into(terms, spans_of(samples, terms), samples.total)
        dtype = gradient_dtype(sinks.dtype, len(samples.spans), samples.total)
        return *grads, as_partial(round_once(total, dtype), ctx.share), None, None, None


ATTENTION = "isobit"  # our name in transformers' registries of attention and mask functions
# Keywords of attention functions that change what is computed, by what they are.
OTHERS = {"position_bias": "a bias of the scores by position"}


def register_attention() -> None:
    """Put attention and the reader of masks into transformers' registries."""
    library("modeling_utils").AttentionInterface.register(ATTENTION, attend)
    library("masking_utils").AttentionMaskInterface.register(ATTENTION, read_mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **inputs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' registry calls it: [B, H, T, D] and [B, Hkv, S, D] to [B, T, H, D]."""
    layout: Layout = over_ranks(module, inputs.get(LAYOUT) or current_layout())
    if dropout:
        refuse_dropout(f"attention_dropout of {dropout} in training")
    causal = bool(getattr(module, "is_causal", True))
    if attention_mask is None:
        attention_mask = Seen(sliding_window, causal)
    elif not isinstance(attention_mask, Seen):
        refuse_keys(layout, f"{key.shape[2]} keys and a mask")
    check_seen(attention_mask, sliding_window, causal, module)
    if key.shape[2] != layout.key_rows:
        refuse_keys(layout, f"{key.shape[2]} keys")
    if not causal and key.shape[2] != query.shape[2]:
        raise UnsupportedError(
            expected="whole samples at once, where tokens see those after them",
            received=f"{query.shape[2]} tokens behind a cache of {key.shape[2] - query.shape[2]}",
            remedy="call an encoder without past_key_values",
        )
    check_others(module, inputs)
    # Under autocast a norm of heads gives fp32, while values have the product's dtype.
    query, key, value = cast_for_autocast(query, key, value)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    window, chunk_size = attention_mask.window, attention_mask.chunk_size
    mask = mask_of(q, causal, scaling, window, inputs.get("softcap"), chunk_size)
    sinks = inputs.get("s_aux")
    if sinks is not None:
        check_attention(q, k, v)
        rows = layout.row_samples()
        return attend_with_sinks(layout.places(q, k), q, k, v, sinks, mask, rows), None
    return attention_in(layout.places, q, k, v, mask), None


def refuse_keys(layout: Layout, received: str) -> NoReturn:
    """Raise if keys are missing, or masked by what is not in the layout."""
    raise UnsupportedError(
        expected=f"all {layout.key_rows} keys of the samples, and no mask besides the layout",
        received=received,
        remedy="use a cache that keeps every key and only those: transformers.DynamicCache() without a config",
    )


def check_seen(mask: Seen, sliding_window: int | None, causal: bool, module: Any) -> None:
    """Raise unless a mask and an attention module agree on what is seen."""
    if mask.causal != causal:
        what = "a causal mask" if mask.causal else "a mask that sees both sides"
        raise UnsupportedError(
            expected="one kind of attention: the mask's and the attention module's",
            received=f"{what}, and {type(module).__name__}.is_causal = {causal}",
            remedy="call the model with a two-dimensional attention_mask, as its class makes a mask of it",
        )
    if sliding_window is not None and mask.window != sliding_window:
        raise UnsupportedError(
            expected="one window: the mask's and the attention module's",
            received=f"a mask {'without one' if mask.window is None else f'of {mask.window}'}, and "
            f"sliding_window={sliding_window}",
            remedy="set layer_types and sliding_window of the config so that they agree",
        )


def check_others(module: Any, inputs: dict[str, Any]) -> None:
    """Raise for what changes attention and is not computed."""
    for name in OTHERS:
        if inputs.get(name) is not None:
            refuse_keyword(name, type(module).__name__)
    if inputs.get("output_attentions"):
        raise UnsupportedError(
            expected="attention whose weights are not held",
            received="output_attentions=True",
            remedy="disable isobit for the call that looks at attention weights",
        )


def refuse_keyword(name: str, where: str) -> NoReturn:
    """Raise for a keyword that changes what attention computes."""
    raise UnsupportedError(
        expected="attention by scaled products, a soft cap, a mask and a window",
        received=f"{OTHERS[name]}: {name}= of {where}",
        remedy="set it to None in the config if the model allows; it is not supported",
    )


def check_registered(configs: Iterable[Any]) -> None:
    """Raise if the configs of an enabled model, or transformers' registry, name another attention than isobit's."""
    for config in configs:
        chosen = config._attn_implementation
        if chosen != ATTENTION:
            raise UnsupportedError(
                expected=f"attention implementation {ATTENTION!r} while the model is enabled",
                received=repr(chosen),
                remedy="disable isobit before setting another, and give each enabled model a config of its own",
            )
    known = library("modeling_utils").ALL_ATTENTION_FUNCTIONS
    if ATTENTION not in known:  # the model was enabled in another process, and pickled
        register_attention()
    found = known[ATTENTION]
    if found is not attend:
        raise UnsupportedError(
            expected=f"isobit's attention under the name {ATTENTION!r} in transformers' registry",
            received=f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__name__)}",
            remedy=f"register other attention functions under other names than {ATTENTION!r}",
        )


# Attention whose queries are multiplied by a factor of their position, in layers without rotary embeddings.
#
# Stock counts positions from the start of the row, padding included; here they are those of the sample. The factor is
# one chain of operations per position, so that it does not depend on the tokens of a call.


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


# Multi-head latent attention: keys and values are expanded from a latent row, which the cache holds.
#
# The latent rows of all keys are expanded at each call, as transformers does: a row of the expansion does not depend on
# others, so that a decoded token has the bits of a prefill. The absorbed form would be another order of addition.


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
