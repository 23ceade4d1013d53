"""Read what transformers would mask, from the function that it builds a mask of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import refuse


@dataclass(frozen=True)
class Seen:
    """What a token sees of its sample: itself and all before it, or the last `window` of these."""

    window: int | None = None

    def contiguous(self) -> NoReturn:
        """Raise: `generate` asks for this where it has made a static cache, before it calls the model."""
        refuse(
            "a cache that holds the samples' keys and no more",
            "a static cache, as of generate(cache_implementation='static')",
            "leave cache_implementation out, or pass past_key_values=transformers.DynamicCache()",
        )


def read_mask(*, mask_function: Callable[..., Any], **_: Any) -> Seen:
    """Return what a mask says, in the place of the mask: samples and padding are in the layout.

    This is called as a mask function of transformers' registry. `mask_function` is an intersection of masks by index.
    """
    causal, window = False, None
    for one in intersected(mask_function):
        kind, value = kind_of_mask(one)
        if kind == "causal":
            causal = True
        elif kind == "window":
            window = value if window is None else min(window, value)
        elif kind != "packed":  # packed samples are in the layout
            refuse_mask(kind)
    if not causal:
        refuse_mask("a mask that is not causal")
    return Seen(window)


def intersected(function: Any) -> Iterator[Any]:
    """Yield the masks that are intersected."""
    if defined_as(function, "and_masks.<locals>.and_mask"):
        for inner in closure_of(function)["mask_functions"]:
            yield from intersected(inner)
    else:
        yield function


def kind_of_mask(function: Any) -> tuple[str, Any]:
    """Return causal, window (with its width), packed, or a description of another mask."""
    if function is library("masking_utils").causal_mask_function:
        return "causal", None
    if defined_as(function, "sliding_window_overlay.<locals>.inner_mask"):
        return "window", int(closure_of(function)["sliding_window"])
    if defined_as(function, "packed_sequence_mask_function.<locals>.inner_mask"):
        return "packed", None
    if defined_as(function, "chunked_overlay.<locals>.inner_mask"):
        return f"a mask in chunks of {closure_of(function)['chunk_size']}", None
    if defined_as(function, "or_masks.<locals>.or_mask"):
        names = ", ".join(name_of(one) for one in closure_of(function)["mask_functions"])
        return f"a union of masks ({names}), as of a prefix that is seen from both sides", None
    return f"the mask {name_of(function)}", None


def defined_as(function: Any, name: str) -> bool:
    """Return whether a function is the one of transformers' masks that has this name."""
    return (
        getattr(function, "__qualname__", "") == name
        and getattr(function, "__module__", "") == library("masking_utils").__name__
        and function.__globals__ is vars(library("masking_utils"))
    )


def closure_of(function: Any) -> dict[str, Any]:
    """Return the names that a function closes over, with their values."""
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def name_of(function: Any) -> str:
    """Return a function's name and module."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}"


def refuse_mask(received: str) -> None:
    """Raise for a mask that isobit's attention does not compute."""
    refuse(
        "a causal mask, or a causal one with a sliding window, within each sample",
        received,
        "isobit.attention computes these two; isobit.audit(model, inputs) shows what depends on the batch",
    )
