"""Read from a model's inputs which rows form which sample, its keys and its positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.attention.op import Places
from isobit.ops.logprob.op import IGNORED
from isobit.ops.share import share_in_force
from isobit.order.samples import Samples
from isobit.parallel.tensor.context_attention import SplitPlaces
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

CONTEXT = "_isobit_context"  # on an attention module: the ranks that its attention is split over
LAYOUT = "isobit_layout"  # the keyword that takes a layout through transformers' own forwards


@dataclass(frozen=True)
class Layout:
    """The rows of one call. `samples=None` is the operators' default: each row of the batch is one sample."""

    kind: str  # plain, padded or packed
    positions: Tensor  # [B, T], counted inside each sample unless the caller gave them
    samples: Samples | None  # spans of the B·T rows of this call
    keys: Samples | None  # spans of the B·S rows of cache and call
    key_rows: int  # S
    known_places: dict[Any, Places] = field(default_factory=dict, compare=False, repr=False)
    # What one module leaves for the next within a call, such as outputs of linears that share an input.
    pending: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    context: TensorParallelGroup | None = None  # the ranks that share attention

    def places(self, q: Tensor, k: Tensor) -> Places:
        """Return where samples are in the queries and keys of a layer; layers share what the first one makes."""
        of = q.shape[:-2], k.shape[:-2], q.device, self.context is None
        if of not in self.known_places:
            known = (q, k, self.samples, self.keys)
            self.known_places[of] = (
                Places(*known) if self.context is None else SplitPlaces(*known, self.context)
            )
        return self.known_places[of]

    def row_samples(self) -> Samples:
        """Return the spans of the B·T rows, also where `samples` is None: for rows that lost the batch's axes."""
        if self.samples is not None:
            return self.samples
        batch, width = self.positions.shape
        return Samples.packed([width] * batch)

    def samples_of(self, x: Tensor) -> Samples | None:
        """Return the samples of x [..., K], as operators take them."""
        return self.samples if x.dim() > 2 else self.row_samples()

    def next_of(self, tokens: Tensor) -> Tensor:
        """Return the next token of the same sample, [B, T]; -100 where there is none."""
        following = torch.full_like(tokens, IGNORED)
        if self.samples is None:
            following[:, :-1] = tokens[:, 1:]
            return following
        flat, out = tokens.reshape(-1), following.view(-1)
        for start, length in self.samples.spans:
            if length > 1:
                out[start : start + length - 1] = flat[start + 1 : start + length]
        return following

    def last(self, rows: int) -> Samples | None:
        """Return the samples if only the last `rows` of each row of the batch are kept."""
        if self.samples is None:
            return None
        width = self.positions.shape[1]
        rows = min(rows, width)
        kept = []
        for start, length in self.samples.spans:
            batch, at = divmod(start, width)
            first = max(at, width - rows)
            # A sample without rows may be at the end of its row of the batch; its position does not matter.
            count = max(at + length - first, 0)
            kept.append((batch * rows + min(first - (width - rows), rows - 1), count))
        return of_global_batch(kept, len(self.positions) * rows)


def read_layout(
    rows: tuple[int, int],
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> Layout:
    """Return the layout of [B, T] new rows behind `past` cached ones; positions are on `device`, that of all given."""
    batch, width = rows
    total = past + width
    real = None if attention_mask is None else read_mask(attention_mask, batch, total)
    if real is not None and bool(real.all()):
        real = None
    given = None if position_ids is None else read_positions(position_ids, batch, width)
    if given is not None:
        given = refuse_negative(given, real, past)
    if given is not None and has_restart(given, real, past):
        return read_packed(given, real, past)
    if real is None:
        if given is None:
            given = torch.arange(past, total, device=device).expand(batch, width)
        if share_in_force() is None:
            return Layout("plain", given, None, None, total)
        spans, keys = (
            of_global_batch([(row * length, length) for row in range(batch)], batch * length)
            for length in (width, total)
        )
        return Layout("plain", given, spans, keys, total)
    return read_padded(real, given, past)


def read_padded(real: Tensor, given: Tensor | None, past: int) -> Layout:
    """Read one sample per row of the batch, with padding on either side of it."""
    batch, total = real.shape
    width = total - past
    count = real.sum(-1)
    start = real.to(torch.uint8).argmax(-1)
    place = torch.arange(total, device=real.device)
    if not torch.equal(real, (place >= start[:, None]) & (place < (start + count)[:, None])):
        raise ArgumentError(
            expected="an attention_mask whose ones are contiguous in each row",
            received="a row with zeros between ones",
            remedy="pad prompts on the left before generating; or pack, with position_ids that restart at 0",
        )
    if given is None:
        given = (place[past:] - start[:, None]).masked_fill(~real[:, past:], 0)
    spans, keys = [], []
    for row, (first, length) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        here = max(first, past)
        held = max(first + length - here, 0)
        spans.append((row * width + (here - past if held else 0), held))
        keys.append((row * total + first, length))
    return Layout(
        "padded",
        given,
        of_global_batch(spans, batch * width),
        of_global_batch(keys, batch * total),
        total,
    )


def read_packed(given: Tensor, real: Tensor | None, past: int) -> Layout:
    """Read several samples per row of the batch, each starting at position 0; masked rows belong to none."""
    if past:
        raise ArgumentError(
            expected="positions that count on, behind a cache",
            received="position_ids that restart",
            remedy="give each sample its own row of the batch when a cache is used",
        )
    batch, width = given.shape
    held = torch.ones_like(given, dtype=torch.bool) if real is None else real
    starts = held.clone()
    starts[:, 1:] &= ~held[:, :-1] | (given[:, 1:] != given[:, :-1] + 1)
    refuse_constant(starts, held)
    flat = starts.reshape(-1).nonzero().reshape(-1).tolist()
    places, rows = given.reshape(-1).tolist(), held.reshape(-1).tolist()
    seen: set[int] = set()
    for start in flat:
        if start // width in seen and places[start] != 0:
            raise ArgumentError(
                expected="position_ids that count on, or restart at 0 for the next sample",
                received=f"position {places[start]} after a gap, at row {start // width}, column {start % width}",
                remedy="count positions inside each packed sample from 0",
            )
        seen.add(start // width)
    # A sample ends before the next start, the end of its row or its first padding.
    ends = [
        min(b, (a // width + 1) * width)
        for a, b in zip(flat, [*flat[1:], batch * width], strict=True)
    ]
    spans = of_global_batch(
        [(a, sum(rows[a:b])) for a, b in zip(flat, ends, strict=True)], batch * width
    )
    return Layout("packed", given.masked_fill(~held, 0), spans, spans, width)


def refuse_constant(starts: Tensor, held: Tensor) -> None:
    """Raise if no position follows another: every token would be a sample of its own."""
    if bool((starts == held).all()) and bool((held.sum(-1) > 1).any()):
        raise ArgumentError(
            expected="position_ids that count on inside each sample",
            received="positions of which none follows another, so that each token would be a sample by itself",
            remedy="count positions inside each sample from 0, or leave position_ids out",
        )


def has_restart(given: Tensor, real: Tensor | None, past: int) -> bool:
    """Return whether positions restart within the tokens of a row."""
    if given.shape[1] < 2:
        return False
    jumps = given[:, 1:] != given[:, :-1] + 1
    if real is not None:
        held = real[:, past:]
        jumps = jumps & held[:, 1:]
        # Real tokens after padding restart only where other real tokens come before that padding in the row.
        earlier = held.to(torch.uint8).cummax(-1).values.bool()
        jumps = jumps & earlier[:, :-1]
    return bool(jumps.any())


def read_mask(mask: Tensor, batch: int, total: int) -> Tensor:
    """Return the mask, [B, past + T], as booleans."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or tuple(mask.shape) != (batch, total):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError(
            expected=f"an attention_mask of shape [{batch}, {total}]: 1 for tokens, also cached ones, 0 for padding",
            received=str(shape),
            remedy="pass the two-dimensional mask; samples packed into one row are separated by position_ids",
        )
    real = mask.bool()
    if mask.dtype != torch.bool and not torch.equal(real.to(mask.dtype), mask):
        raise ArgumentError(
            expected="an attention_mask of ones and zeros",
            received=f"values up to {mask.max().item()}",
            remedy="separate packed samples by position_ids that restart at 0",
        )
    return real


def read_positions(position_ids: Tensor, batch: int, width: int) -> Tensor:
    """Return positions as [B, T]; one row serves all."""
    if (
        position_ids.dim() != 2
        or position_ids.shape[0] not in (1, batch)
        or position_ids.shape[1] != width
    ):
        raise ArgumentError(
            expected=f"position_ids of shape [{batch}, {width}] or [1, {width}]",
            received=str(list(position_ids.shape)),
            remedy="pass one position for each token of this call",
        )
    return position_ids.expand(batch, width)


def refuse_negative(given: Tensor, real: Tensor | None, past: int) -> Tensor:
    """Raise if a token's position is negative; set positions of padding to 0."""
    if real is not None:
        given = given.masked_fill(~real[:, past:], 0)
    if bool((given < 0).any()):
        raise ArgumentError(
            expected="position_ids of 0 or more",
            received=f"position {int(given.min())}",
            remedy="count positions inside each sample from 0, or leave position_ids out",
        )
    return given


def of_global_batch(spans: list[tuple[int, int]], rows: int) -> Samples:
    """Return these samples as a share of the global batch if one is collected, else as all there are."""
    share = share_in_force()
    if share is None:
        return Samples(tuple(spans), rows, 0, len(spans))
    return Samples.of_spans(spans, rows, share.first, share.total)


def over_ranks(module: Any, layout: Layout) -> Layout:
    """Return the layout of an attention module, which ranks may share."""
    ranks = vars(module).get(CONTEXT)
    return layout if ranks is None else replace(layout, context=ranks)


# ---- the layout in force -----------------------------------------------------------------------------------

_current: ContextVar[Layout | None] = ContextVar("isobit_layout", default=None)


@contextmanager
def in_force(layout: Layout) -> Iterator[Layout]:
    """Provide the layout to the modules that run inside, in this thread and context only."""
    token = _current.set(layout)
    try:
        yield layout
    finally:
        _current.reset(token)


def current_layout() -> Layout:
    """Return the layout of the running model."""
    layout = _current.get()
    if layout is None:
        raise UnsupportedError(
            expected="a module of an enabled model to run inside that model",
            received="a call of the module by itself",
            remedy="call the model, or disable it first",
        )
    return layout
