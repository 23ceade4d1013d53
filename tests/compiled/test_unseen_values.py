"""Keys that a query does not see, as the page on tensor cores says: whole blocks are nothing, parts must be finite."""

import numpy as np
import pytest
import torch

from isobit.compiled.kernels.attention import attention
from tests.compiled.running import Launch, Session, draw, raw

KEYS, DEPTH, BLOCK = 128, 16, 64


def attend(v, queries=128):
    """Return y [queries] of causal attention over 128 keys with one head."""
    q, k = (draw(n, 1, DEPTH, dtype="bf16", seed=s) for s, n in enumerate((queries, KEYS)))
    y = torch.zeros(queries, 1, DEPTH, dtype=torch.bfloat16)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "y": y,
        "QUERIES": queries,
        "KEYS": KEYS,
        "SCALE": 0.25,
        "KEY_HEADS": 1,
        "GROUP": 1,
        "DEPTH": DEPTH,
        "CHUNK": 2048,
        "ROWS": 128,
    }
    Session("sm_80", names=False).run(Launch(attention, (1, 1), arguments, {}))
    return raw(y)[:, 0].copy()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_reaches_its_block_and_no_other(value):
    v = draw(KEYS, 1, DEPTH, dtype="bf16", seed=3)
    right = attend(v)
    v[BLOCK + 9] = value  # a key of the second block
    found = attend(v)
    is_nan = (found & 0x7FFF) > 0x7F80
    assert np.array_equal(found[:BLOCK], right[:BLOCK])  # the block is not folded into these
    assert is_nan[BLOCK : BLOCK + 9].all()  # queries that see the block, but not the key: +0 · inf
    assert not np.array_equal(found[BLOCK + 9 :], right[BLOCK + 9 :])
