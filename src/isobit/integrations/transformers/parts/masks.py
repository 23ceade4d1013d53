"""Read what transformers would mask, from the function that it builds a mask of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import refuse


@dataclass(frozen=True)
class Seen:
    """What a token sees of its sample: itself and all before it, or the last `window` of these.

    Without `causal` it sees tokens after it too: all, or those nearer than `window`. With `chunk_size` it sees only
    tokens of its own chunk of so many positions.
    """

    window: int | None = None
    causal: bool = True
    chunk_size: int | None = None

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
    found: dict[str, list[int]] = {}
    for one in intersected(mask_function):
        kind, value = kind_of_mask(one)
        if kind not in KINDS:
            refuse_mask(kind)
        found.setdefault(kind, []).append(value)
    window = min(found.get("window", []), default=None)
    both_sides = min(found.get("window of both sides", []), default=None)
    chunk_size = min(found.get("chunks", []), default=None)
    if "causal" in found:
        if both_sides is not None or len(found.get("chunks", [])) > 1:
            refuse_mask("a causal mask with a window of both sides, or with chunks of two sizes")
        return Seen(window, True, chunk_size)
    if window is not None or chunk_size is not None or "both sides" not in found:
        refuse_mask("a window or chunks of a mask that is not causal")
    return Seen(both_sides, False)


def intersected(function: Any) -> Iterator[Any]:
    """Yield the masks that are intersected."""
    if defined_as(function, "and_masks.<locals>.and_mask"):
        for inner in closure_of(function)["mask_functions"]:
            yield from intersected(inner)
    else:
        yield function


# Packed samples are in the layout.
KINDS = ("causal", "both sides", "window", "window of both sides", "chunks", "packed")


def kind_of_mask(function: Any) -> tuple[str, int]:
    """Return one of KINDS, with the width of a window or the size of chunks, or a description of another mask."""
    if function is library("masking_utils").causal_mask_function:
        return "causal", 0
    if function is library("masking_utils").bidirectional_mask_function:
        return "both sides", 0
    if defined_as(function, "sliding_window_bidirectional_overlay.<locals>.inner_mask"):
        # Up to and with this distance; isobit.attention counts the token itself.
        return "window of both sides", int(closure_of(function)["sliding_window"]) + 1
    if defined_as(function, "sliding_window_overlay.<locals>.inner_mask"):
        return "window", int(closure_of(function)["sliding_window"])
    if defined_as(function, "packed_sequence_mask_function.<locals>.inner_mask"):
        return "packed", 0
    if defined_as(function, "chunked_overlay.<locals>.inner_mask"):
        # They are counted from the first token behind left padding: from the start of the sample.
        return "chunks", int(closure_of(function)["chunk_size"])
    if defined_as(function, "or_masks.<locals>.or_mask"):
        names = ", ".join(name_of(one) for one in closure_of(function)["mask_functions"])
        return f"a union of masks ({names}), as of a prefix that is seen from both sides", 0
    return f"the mask {name_of(function)}", 0


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
        "a causal mask, with or without a sliding window or chunks, or one that sees both sides, within each sample",
        received,
        "isobit.attention computes these; isobit.audit(model, inputs) shows what depends on the batch",
    )
