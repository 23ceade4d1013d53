"""Keys that a query does not see add nothing, also when their values are not finite, in compiled attention."""

import pytest
import torch

import isobit
from isobit import bits
from tests.certifying.running import draw

KEYS, DEPTH, BLOCK = 128, 16, 64


def attend(v):
    """Return y [keys] of causal attention with one head."""
    q, k = (draw(KEYS, 1, DEPTH, dtype="bf16", seed=seed) for seed in range(2))
    with isobit.certifying.executing("machine", target="sm_80"):
        return isobit.attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_reaches_the_queries_that_see_it_and_no_other(value):
    v = draw(KEYS, 1, DEPTH, dtype="bf16", seed=3)
    right = attend(v)
    seen = BLOCK + 9
    v[seen] = value
    found = attend(v)
    assert torch.isfinite(right).all()
    assert bits.equal(found[:seen], right[:seen])
    assert not torch.isfinite(found[seen:]).any()
