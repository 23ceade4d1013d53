"""Attention, as transformers' registry of attention functions calls it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import LAYOUT, Layout, current_layout, over_ranks
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.activations import refuse_dropout
from isobit.integrations.transformers.parts.masks import Seen, read_mask
from isobit.integrations.transformers.parts.sinks import attend_with_sinks
from isobit.ops.arguments import cast_for_autocast
from isobit.ops.attention.op import attention_in, check_attention, mask_of

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
