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
from isobit.ops.attention.op import attention_in, check_attention, check_scale, check_window
from isobit.ops.attention.portable import Mask

ATTENTION = "isobit"  # our name in transformers' registries of attention and mask functions
# Keywords of attention functions that change what is computed, by what they are.
OTHERS = {
    "softcap": "a soft cap of the scores",
    "position_bias": "a bias of the scores by position",
}


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
    if attention_mask is None:
        window = sliding_window
    elif isinstance(attention_mask, Seen):
        window = window_of(attention_mask, sliding_window)
    else:
        refuse_keys(layout, f"{key.shape[2]} keys and a mask")
    if key.shape[2] != layout.key_rows:
        refuse_keys(layout, f"{key.shape[2]} keys")
    check_others(module, inputs)
    # Under autocast a norm of heads gives fp32, while values have the product's dtype.
    query, key, value = cast_for_autocast(query, key, value)
    sinks = inputs.get("s_aux")
    if sinks is not None:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        check_attention(q, k, v)
        mask = Mask(check_scale(scaling, q.shape[-1]), True, check_window(window, True))
        rows = layout.row_samples()
        return attend_with_sinks(layout.places(q, k), q, k, v, sinks, mask, rows), None
    mixed = attention_in(
        layout.places,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        scale=scaling,
        window=window,
    )
    return mixed, None


def refuse_keys(layout: Layout, received: str) -> NoReturn:
    """Raise if keys are missing, or masked by what is not in the layout."""
    raise UnsupportedError(
        expected=f"all {layout.key_rows} keys of the samples, and no mask besides the layout",
        received=received,
        remedy="use a cache that keeps every key and only those: transformers.DynamicCache() without a config",
    )


def window_of(mask: Seen, sliding_window: int | None) -> int | None:
    """Return the window of a layer: that of the mask, and of the keyword if there is one."""
    if sliding_window is not None and mask.window != sliding_window:
        raise UnsupportedError(
            expected="one window: the mask's and the attention module's",
            received=f"a mask {'without one' if mask.window is None else f'of {mask.window}'}, and "
            f"sliding_window={sliding_window}",
            remedy="set layer_types and sliding_window of the config so that they agree",
        )
    return mask.window


def check_others(module: Any, inputs: dict[str, Any]) -> None:
    """Raise for what changes attention and is not computed."""
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(
            expected="causal attention",
            received=f"{type(module).__name__}.is_causal = False",
            remedy="isobit.attention(is_causal=False) computes it; enable computes causal language models",
        )
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
        expected="attention by scaled products, a causal mask and a window",
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
