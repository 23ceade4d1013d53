"""Every type of model: one value in every layout of a batch, forward and backward, and stock's function.

Small configurations, random weights, strict mode. `benchmarks.families` has the types and what is compared; the
record in docs/results/families.md is made by it.
"""

import pytest
import torch

from benchmarks.families import COLUMNS, TYPES, judge

CHEAP = ("mistral", "olmo3", "phi3", "granite", "gemma3_text", "qwen2_moe", "qwen3_5_text")
NATS, GRADIENTS = 1e-4, 1e-5  # from stock, in fp32


def check(kind, dtype):
    found = judge(kind, dtype)
    assert {name: found[name] for name in COLUMNS} == dict.fromkeys(COLUMNS, 0)
    assert found["parameters"] > 10
    assert (
        found["stock gradients"] > 0
    )  # the same comparison finds differences where there are some
    if dtype == torch.float32:
        assert found["|enabled - stock|"] <= NATS
        assert found["|gradient - stock's|"] <= GRADIENTS


@pytest.mark.parametrize("kind", CHEAP)
def test_one_value_in_every_layout_and_stocks_function(kind):
    check(kind, torch.float32)


def test_the_types_of_the_table():
    assert len(TYPES) >= 30


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_in_both_dtypes(kind, dtype):
    check(kind, dtype)
