"""Every type of model: one value in every layout of a batch, forward and backward, and stock's function.

Small configurations, random weights, strict mode. `benchmarks.families` has the types and what is compared; the
record in docs/results/families.md is made by it.
"""

import pytest
import torch

from benchmarks.families import COLUMNS, ENCODERS, TYPES, judge, judge_encoder

CHEAP = (
    "mistral",
    "olmo3",
    "phi3",
    "granite",
    "gemma2",
    "gemma3_text",
    "qwen2_moe",
    "qwen3_5_text",
    "llama4_text",
    "modernbert",
)
NATS, GRADIENTS = 1e-4, 1e-5  # from stock, in fp32


def check(kind, dtype):
    found = (judge if kind in TYPES else judge_encoder)(kind, dtype)
    # An encoder decodes nothing and has no routes.
    columns = COLUMNS if kind in TYPES else [name for name in COLUMNS if name in found]
    assert len(columns) >= 6
    assert {name: found[name] for name in columns} == dict.fromkeys(columns, 0)
    assert found["parameters"] > 10
    assert (
        found["stock gradients"] > 0
    )  # the same comparison finds differences where there are some
    if dtype == torch.float32:
        assert found["|enabled - stock|"] <= NATS
        assert found["|gradient - stock's|"] <= GRADIENTS


@pytest.mark.parametrize("kind", CHEAP)
@pytest.mark.sweep(5)
def test_one_value_in_every_layout_and_stocks_function(kind):
    check(kind, torch.float32)


def test_the_types_of_the_table():
    assert len(TYPES) >= 30


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*TYPES, *ENCODERS])
def test_every_type_in_both_dtypes(kind, dtype):
    check(kind, dtype)
