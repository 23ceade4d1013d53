"""The plan: segments tile the extent equally, in a power-of-two number; each is one chain."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.foundation import native
from isobit.order import plan
from isobit.order.plan import FEATURE_CAP, FEATURE_UNIT, LEAF, FeaturePlan, count_segments
from isobit.order.samples import Samples


@pytest.mark.parametrize(
    ("extent", "count", "length"),
    [
        (1024, 4, 256),
        (2048, 8, 256),
        (4096, 8, 512),
        (14336, 8, 1792),
        (12288, 8, 1536),
        (3072, 8, 384),
        (5100, 4, 1275),
        (151936, 8, 18992),
        (511, 1, 511),
        (1, 1, 1),
    ],
)
def test_known_extents(extent, count, length):
    assert (FeaturePlan(extent).count, FeaturePlan(extent).length) == (count, length)


@given(st.integers(0, 200_000))
def test_segments_and_leaves_tile_the_extent(extent):
    plan = FeaturePlan(extent)
    assert plan.count * plan.length == extent
    assert plan.count & (plan.count - 1) == 0
    assert plan.count <= FEATURE_CAP
    assert plan.count == 1 or plan.length >= FEATURE_UNIT
    at = 0
    for segment in plan.segments:
        (leaf,) = segment
        assert not leaf.fold
        assert (leaf.start, leaf.length) == (at, plan.length)
        at += leaf.length
    assert at == extent
    for (whole,), leaves in zip(plan.segments, plan.products, strict=True):
        lengths = [leaf.length for leaf in leaves]
        assert sum(lengths) == whole.length
        assert lengths[:-1] == [LEAF] * (len(lengths) - 1)
        assert lengths[-1] <= LEAF
        starts = range(whole.start, whole.start + max(whole.length, 1), LEAF)
        assert [leaf.start for leaf in leaves] == list(starts)
        assert [leaf.fold for leaf in leaves] == [False] + [True] * (len(leaves) - 1)


@given(st.integers(1, 1000), st.sampled_from([1, 2, 4, 8]))
def test_hidden_sizes_from_4096_on_can_be_cut_over_eight_ranks(eights, ranks):
    extent = 4096 + 8 * eights
    assert FeaturePlan(extent).count % ranks == 0


@given(st.integers(1, 10_000), st.integers(1, 300), st.integers(1, 64))
def test_count_is_the_largest_that_fits(extent, unit, cap):
    count = count_segments(extent, unit, cap)
    fits = [
        s
        for s in (1 << i for i in range(14))
        if extent % s == 0 and extent // s >= unit and s <= cap
    ]
    assert count == max(fits, default=1)


def rows(segments, first=0):
    return [
        [leaf.start, leaf.length, int(leaf.fold), first + index]
        for index, segment in enumerate(segments)
        for leaf in segment
    ]


@pytest.mark.skipif(native.load() is not None, reason="no native kernels")
def test_native_plan_is_this_plan():
    for extent in [*range(1, 3000), 3072, 4096, 6144, 12288, 24576, 151936, 151937]:
        assert torch.ops.isobit.feature_schedule(extent).tolist() == rows(
            FeaturePlan(extent).segments
        ), extent
        assert torch.ops.isobit.product_schedule(extent).tolist() == rows(
            FeaturePlan(extent).products
        ), extent


@pytest.mark.skipif(native.load() is not None, reason="no native kernels")
@given(st.data())
def test_native_sample_plan_is_this_plan(data):
    lengths = data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=24))
    whole = Samples.packed(lengths)
    size = len(lengths) // len(whole.segments)
    first = size * data.draw(st.integers(0, len(whole.segments) - 1))
    count = size * data.draw(st.integers(1, (len(lengths) - first) // size))
    share = Samples.packed(lengths[first : first + count], first=first, total=len(lengths))
    table = torch.ops.isobit.sample_schedule(torch.tensor(share.spans), first, len(lengths))
    assert table.tolist() == rows(share.segments, first // size)


def test_kernels_have_the_constants_of_the_plan():
    """They are written again in C++ and Triton; whoever changes one finds the others here."""
    header = (Path(__file__).parents[2] / "csrc" / "order.h").read_text()
    found = dict(re.findall(r"constexpr int64_t (\w+) = (\d+);", header))
    assert found == {
        "feature_unit": str(plan.FEATURE_UNIT),
        "feature_cap": str(plan.FEATURE_CAP),
        "sample_cap": str(plan.SAMPLE_CAP),
        "leaf_length": str(plan.LEAF),
        "attention_chunk": str(plan.ATTENTION_CHUNK),
    }
    assert pytest.importorskip("isobit.ops.gpu.sums").LEAF.value == plan.LEAF
