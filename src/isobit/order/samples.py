"""Which rows form which sample, and which samples of the global batch a call holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.order.plan import (
    SAMPLE_CAP,
    SAMPLE_UNIT,
    TOKEN_LEAF,
    Segment,
    count_segments,
    cut_into_leaves,
)
from isobit.order.tree import Node, find_roots


@dataclass(frozen=True)
class Samples:
    """Samples as (first row, rows) spans, in global order; `first` of `of` samples where this is a share.

    Rows outside every span are padding: they have outputs, and no part in any parameter's gradient.
    """

    spans: tuple[tuple[int, int], ...]
    rows: int
    first: int
    of: int

    @classmethod
    def packed(cls, lengths: Iterable[int], *, first: int = 0, of: int | None = None) -> Samples:
        """Samples of these lengths, one after another."""
        spans, at = [], 0
        for length in check_lengths(lengths):
            spans.append((at, length))
            at += length
        return cls.of_spans(spans, at, first, of)

    @classmethod
    def cumulative(
        cls, offsets: Iterable[int], *, first: int = 0, of: int | None = None
    ) -> Samples:
        """The same from cumulative lengths, 0 first, as variable-length attention takes them."""
        edges = [int(edge) for edge in offsets]
        if not edges or edges[0] != 0:
            raise ArgumentError(
                expected="cumulative lengths that start with 0",
                received=f"{edges[:4]}",
                remedy="pass [0, n0, n0 + n1, ...], or use Samples.packed(lengths)",
            )
        steps = [b - a for a, b in itertools.pairwise(edges)]
        return cls.packed(steps, first=first, of=of)

    @classmethod
    def padded(
        cls,
        lengths: Iterable[int],
        *,
        width: int,
        side: str = "right",
        first: int = 0,
        of: int | None = None,
    ) -> Samples:
        """Samples of these lengths, each padded on `side` to `width` rows."""
        known = check_lengths(lengths)
        if side not in ("left", "right"):
            raise ArgumentError(
                expected="side 'left' or 'right'",
                received=f"{side!r}",
                remedy="name the padded side",
            )
        if known and max(known) > width:
            raise ArgumentError(
                expected=f"lengths of at most the width {width}",
                received=f"a sample of {max(known)}",
                remedy="pass the padded length of the batch as width",
            )
        spans = [(i * width + (width - n if side == "left" else 0), n) for i, n in enumerate(known)]
        return cls.of_spans(spans, len(known) * width, first, of)

    @classmethod
    def of_spans(
        cls, spans: list[tuple[int, int]], rows: int, first: int = 0, of: int | None = None
    ) -> Samples:
        """Samples at these (first row, rows) of a call with this many rows."""
        total = first + len(spans) if of is None else of
        if of is None and first:
            raise ArgumentError(
                expected="`of`, the global number of samples, beside `first`",
                received=f"first={first} alone",
                remedy="pass of=<samples in the global batch>",
            )
        size = segment_size(total)
        if first < 0 or first % size or len(spans) % size or first + len(spans) > total:
            raise CutError(
                expected=f"a run of whole segments of {size} of the {total} samples",
                received=f"samples {first} to {first + len(spans)}",
                remedy=f"start at, and take, multiples of {size}; or choose a global batch that is a "
                "power of two times the share",
            )
        return cls(tuple(spans), rows, first, total)

    @property
    def is_share(self) -> bool:
        """Whether the global batch holds more samples than these."""
        return len(self.spans) != self.of

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The leaves of every segment of this share, in order."""
        size = segment_size(self.of)
        leaves = [
            cut_into_leaves(start, length, TOKEN_LEAF, i % size != 0)
            for i, (start, length) in enumerate(self.spans)
        ]
        return tuple(
            tuple(leaf for run in leaves[i : i + size] for leaf in run)
            for i in range(0, len(leaves), size)
        )

    @property
    def roots(self) -> tuple[Node, ...]:
        """The subtrees of the global sample tree that this share sums."""
        size = segment_size(self.of)
        return find_roots(self.first // size, (self.first + len(self.spans)) // size)


def segment_size(samples: int) -> int:
    """Samples per segment of a global batch."""
    return max(samples // count_segments(samples, SAMPLE_UNIT, SAMPLE_CAP), 1)


def check_lengths(lengths: Iterable[int]) -> list[int]:
    """Non-negative whole numbers, or a refusal."""
    known = [int(n) for n in lengths]
    if any(n < 0 for n in known):
        raise ArgumentError(
            expected="lengths of zero or more",
            received=f"{min(known)}",
            remedy="cumulative lengths must not decrease",
        )
    return known
