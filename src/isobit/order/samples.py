"""Which rows form which sample, and which samples of the global batch a call has.

[Note: shares of a global batch]
A gradient of a parameter is a sum over the samples of the *global batch*: all samples of one optimizer step, over all
micro-batches and ranks. Its order of addition is a tree over segments of samples, which depends on the number of
samples and on nothing else. A call of an operator has either the whole global batch or a *share*, a run of consecutive
samples. Operators and kernels describe it with these values:

- `spans`: an int64 tensor [samples, 2] with the first row and the number of rows of each sample of the call, in the
  order of the global batch. Rows outside every span are padding. None means that x [B, T, ...] is B samples of T rows.
- `of`: the number of samples of the global batch. 0, the default of the operators, means that the samples of the
  call are the global batch, so that a caller without shares need not count them.
- `first`: the index in the global batch of the call's first sample.
- `roots`: the largest subtrees of the sample tree that consist of samples of the share. A share can add these by
  itself; a sum across two roots needs the samples of another share first. An operator returns the gradient of a share
  only if that is exactly one root. Its value does not depend on where the share is in the batch, so operators take
  no `first`.

The gradient of a whole batch is rounded once to the dtype of the parameter. The gradient of a share is a partial sum:
it stays in fp32, is merged with the others in a binary counter (isobit/order/tree.py), and is rounded after the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.foundation.renaming import accepts_old, keeps_old_attribute
from isobit.order.plan import (
    SAMPLE_CAP,
    SAMPLE_UNIT,
    Segment,
    count_segments,
    cut_into_leaves,
)
from isobit.order.tree import Node, find_roots


@keeps_old_attribute("of", "total")
@dataclass(frozen=True)
class Samples:
    """The rows of each sample of a call, and the position of these samples in the global batch.

    Make one with `packed`, `padded` or `cumulative`. Rows that belong to no sample are padding: they have outputs, and
    do not take part in the gradient of any parameter. See [Note: shares of a global batch] above.

    Attributes:
        spans: (first row, number of rows) per sample, in the order of the global batch.
        rows: The number of rows of the call, padding included.
        first: The index of the first of these samples in the global batch.
        total: The number of samples of the global batch.

    Example:
        >>> isobit.Samples.packed([3, 5]).spans
        ((0, 3), (3, 5))
        >>> isobit.Samples.padded([3, 5], width=8).spans
        ((0, 3), (8, 5))
        >>> isobit.Samples.packed([3, 5], first=2, total=4).is_share
        True
    """

    spans: tuple[tuple[int, int], ...]
    rows: int
    first: int
    total: int

    @classmethod
    @accepts_old(of="total")
    def packed(cls, lengths: Iterable[int], *, first: int = 0, total: int | None = None) -> Samples:
        """Return samples of these lengths, one after another.

        Args:
            lengths: Rows per sample.
            first: The index of the first one in the global batch.
            total: The number of samples of the global batch; by default these are all.

        Returns:
            The samples.

        Raises:
            ArgumentError: If a length is negative, or `first` is given without `total`.
            CutError: If the share does not consist of whole segments of the global batch.
        """
        spans, at = [], 0
        for length in check_lengths(lengths):
            spans.append((at, length))
            at += length
        return cls.of_spans(spans, at, first, total)

    @classmethod
    @accepts_old(of="total")
    def cumulative(
        cls, offsets: Iterable[int], *, first: int = 0, total: int | None = None
    ) -> Samples:
        """Return samples from cumulative lengths [0, n0, n0 + n1, ...], the `cu_seqlens` of FlashAttention.

        Args:
            offsets: The first row of each sample, then the number of rows.
            first: See `packed`.
            total: See `packed`.

        Returns:
            The samples.

        Raises:
            ArgumentError: If the offsets do not start with 0, or decrease.
            CutError: See `packed`.
        """
        edges = [int(edge) for edge in offsets]
        if not edges or edges[0] != 0:
            raise ArgumentError(
                expected="cumulative lengths that start with 0",
                received=f"{edges[:4]}",
                remedy="pass [0, n0, n0 + n1, ...], or use Samples.packed(lengths)",
            )
        steps = [b - a for a, b in itertools.pairwise(edges)]
        return cls.packed(steps, first=first, total=total)

    @classmethod
    @accepts_old(of="total")
    def padded(
        cls,
        lengths: Iterable[int],
        *,
        width: int,
        side: str = "right",
        first: int = 0,
        total: int | None = None,
    ) -> Samples:
        """Return samples of these lengths, each padded to `width` rows.

        Args:
            lengths: Rows per sample, without padding.
            width: Rows per sample, with padding.
            side: The padded side, "right" or "left".
            first: See `packed`.
            total: See `packed`.

        Returns:
            The samples.

        Raises:
            ArgumentError: If a length is more than `width`, or `side` is another word.
            CutError: See `packed`.
        """
        known = check_lengths(lengths)
        if side not in ("left", "right"):
            raise ArgumentError(
                expected="side 'left' or 'right'",
                received=f"{side!r}",
                remedy="pass the side on which rows are padded",
            )
        if known and max(known) > width:
            raise ArgumentError(
                expected=f"lengths of at most the width {width}",
                received=f"a sample of {max(known)}",
                remedy="pass the padded length of the batch as width",
            )
        spans = [(i * width + (width - n if side == "left" else 0), n) for i, n in enumerate(known)]
        return cls.of_spans(spans, len(known) * width, first, total)

    @classmethod
    @accepts_old(of="total")
    def of_spans(
        cls, spans: list[tuple[int, int]], rows: int, first: int = 0, total: int | None = None
    ) -> Samples:
        """Return samples with these spans, (first row, number of rows), of a call with this many rows."""
        if total is None and first:
            raise ArgumentError(
                expected="`total`, the number of samples of the global batch, with `first`",
                received=f"first={first} alone",
                remedy="pass total=<samples in the global batch>",
            )
        total = len(spans) if total is None else total
        size = segment_size(total)
        if first < 0 or first % size or len(spans) % size or first + len(spans) > total:
            raise CutError(
                expected=f"a share that starts at, and contains, a multiple of {size} of the {total} samples "
                "of the global batch",
                received=f"samples {first} to {first + len(spans)}",
                remedy=f"start at, and take, multiples of {size}; or choose a global batch that is a "
                "power of two times the share",
            )
        return cls(tuple(spans), rows, first, total)

    @property
    def is_share(self) -> bool:
        """Whether the global batch has more samples than these."""
        return len(self.spans) != self.total

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The leaves of every segment of this share, in order."""
        size = segment_size(self.total)
        leaves = [
            cut_into_leaves(start, length, i % size != 0)
            for i, (start, length) in enumerate(self.spans)
        ]
        return tuple(
            tuple(leaf for run in leaves[i : i + size] for leaf in run)
            for i in range(0, len(leaves), size)
        )

    @property
    def roots(self) -> tuple[Node, ...]:
        """The largest subtrees of the sample tree that this share can sum."""
        size = segment_size(self.total)
        return find_roots(self.first // size, (self.first + len(self.spans)) // size)


def segment_size(samples: int) -> int:
    """Return the number of samples per segment of a global batch."""
    return max(samples // count_segments(samples, SAMPLE_UNIT, SAMPLE_CAP), 1)


def check_lengths(lengths: Iterable[int]) -> list[int]:
    """Return lengths as a list of integers; raise if one is negative."""
    known = [int(n) for n in lengths]
    if any(n < 0 for n in known):
        raise ArgumentError(
            expected="lengths of 0 or more",
            received=f"{min(known)}",
            remedy="pass the number of rows of each sample; cumulative lengths must not decrease",
        )
    return known
