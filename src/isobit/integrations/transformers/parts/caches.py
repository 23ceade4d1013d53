"""Caches: layers that keep every key and every open chunk, in the place of empty ones that would not."""

from __future__ import annotations

from typing import Any

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.delta_net import layer_class


def keep_every_key(config: Any, cache: Any, use_cache: bool | None) -> Any:
    """Return the cache of a call, whose empty sliding layers are replaced by full ones, linear ones by isobit's.

    isobit's attention reads the window from the mask and expects all keys of a sample: with keys dropped, their
    positions could not be told from the cache. A model whose cache is made inside its forward gets a full one here.
    """
    known = library("cache_utils")
    if cache is None:
        wanted = getattr(config, "use_cache", False) if use_cache is None else use_cache
        if wanted and is_linear(config):
            return keep_every_key(config, known.DynamicCache(config=config), use_cache)
        return known.DynamicCache() if wanted and has_windows(config) else None
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        for at, layer in enumerate(layers):
            if type(layer) is known.DynamicSlidingWindowLayer and not layer.is_initialized:
                layers[at] = known.DynamicLayer()
            if type(layer) is known.LinearAttentionLayer and is_untouched(layer):
                layers[at] = layer_class()()
    return cache


def refuse_changed_keys(cache: Any) -> None:
    """Raise for a cache that may return other keys and values than it was given, as quantised ones do.

    Caches are told by the function that updates them: a class that inherits it keeps the bits, whatever its name.
    """
    known = library("cache_utils")
    if not isinstance(cache, known.Cache):
        return
    exact = (
        known.Cache.update,
        known.DynamicLayer.update,
        known.DynamicSlidingWindowLayer.update,
        None,  # layers of linear attention keep no keys
    )
    replicated = getattr(cache, "layer_class_to_replicate", None)
    layers = getattr(cache, "layers", [None])  # a cache of caches has none, and is refused
    for part in (cache, *layers, *([] if replicated is None else [replicated])):
        update = getattr(part, "update", None)
        if part is None or getattr(update, "__func__", update) not in exact:
            kind = part if isinstance(part, type) else type(cache if part is None else part)
            raise UnsupportedError(
                expected="a cache that keeps the bits of keys and values",
                received=f"{type(cache).__name__} of {kind.__name__}, which may return others: where keys are rounded "
                "to fewer bits, a token decoded with it differs from the same token in a prefill",
                remedy="use transformers.DynamicCache()",
            )


def is_untouched(layer: Any) -> bool:
    """Return whether a layer of linear attention holds nothing yet."""
    return not any(layer.has_previous_state.values())


def is_linear(config: Any) -> bool:
    """Return whether some layers of a model carry a state, and no keys."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def has_windows(config: Any) -> bool:
    """Return whether some layers of a model see a window of keys only."""
    kinds = getattr(config, "layer_types", None) or ()
    windows = {"sliding_attention", "chunked_attention"}
    return getattr(config, "sliding_window", None) is not None or not windows.isdisjoint(kinds)
