"""Samples: layouts describe the same spans; a share is whole segments of the global batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit import ArgumentError, CutError, Samples

LENGTHS = st.lists(st.integers(0, 700), min_size=1, max_size=20)


def leaf_lengths(samples):
    return [[(leaf.length, leaf.fold) for leaf in segment] for segment in samples.segments]


@given(LENGTHS, st.integers(0, 9))
def test_padding_moves_rows_and_nothing_else(lengths, extra):
    packed = Samples.packed(lengths)
    for side in ("left", "right"):
        padded = Samples.padded(lengths, width=max(lengths) + extra, side=side)
        assert leaf_lengths(padded) == leaf_lengths(packed)
        assert padded.rows == len(lengths) * (max(lengths) + extra)
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert Samples.cumulative(offsets) == packed


@given(LENGTHS)
def test_segments_hold_equal_numbers_of_samples(lengths):
    samples = Samples.packed(lengths)
    count = len(samples.segments)
    assert count & (count - 1) == 0
    assert len(lengths) % count == 0
    assert (len(lengths) // count) % 2 or count == 1024


def test_a_share_that_splits_a_segment_is_refused():
    Samples.packed([3, 4, 5], first=3, total=6)  # 6 samples are 2 segments of 3
    with pytest.raises(CutError, match="a multiple of 3 of the 6 samples"):
        Samples.packed([3, 4], first=0, total=6)
    with pytest.raises(CutError):
        Samples.packed([3, 4, 5], first=1, total=6)
    with pytest.raises(CutError):
        Samples.packed([1] * 12, first=0, total=6)


def test_malformed_samples_are_refused():
    with pytest.raises(ArgumentError, match="0 or more"):
        Samples.packed([3, -1])
    with pytest.raises(ArgumentError, match="start with 0"):
        Samples.cumulative([1, 2])
    with pytest.raises(ArgumentError, match="at most the width"):
        Samples.padded([5], width=4)
    with pytest.raises(ArgumentError, match="'left' or 'right'"):
        Samples.padded([5], width=8, side="centre")
    with pytest.raises(ArgumentError, match="`total`"):
        Samples.packed([5], first=2)
