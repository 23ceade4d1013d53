"""Cuts fall on segment edges, or are refused with the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import isobit
from isobit.order.plan import FeaturePlan


@given(st.integers(1, 20_000), st.integers(0, 4))
def test_allowed_cuts_tile_the_extent_with_one_root_each(extent, power):
    parts = 1 << power
    if FeaturePlan(extent).count % parts:
        with pytest.raises(isobit.CutError, match=str(FeaturePlan(extent).count)):
            isobit.order.Cut(extent, parts, 0)
        return
    cuts = [isobit.order.Cut(extent, parts, i) for i in range(parts)]
    assert [c.start for c in cuts] == list(range(0, extent, extent // parts))
    assert all(len(c.roots) == 1 for c in cuts)


@pytest.mark.parametrize(("parts", "index"), [(3, 0), (0, 0), (-2, 0), (16, 0), (2, 2), (2, -1)])
def test_other_cuts_are_refused(parts, index):
    with pytest.raises(isobit.CutError, match=r"(?s)expected .* received: .* remedy"):
        isobit.order.Cut(4096, parts, index)
