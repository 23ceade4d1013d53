"""The tables of docs/explanation/scale.md are what the model computes, and the model keeps what is known of it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("scale_model", ROOT / "benchmarks" / "scale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables(scale):
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()
    for table in (scale.table(25 << 20), scale.table(64 << 10), scale.sizes(25 << 20, 16384)):
        assert table in page
    assert scale.table(26 << 20) not in page


def test_what_must_hold_of_any_such_model(scale):
    large = 1 << 40  # bytes: latency no longer counts
    assert scale.ring(large, 4096).seconds < 1.05 * scale.double_tree(large, 4096).seconds
    assert scale.flat_collectives(large, 4096).seconds > 3 * scale.two_levels(large, 4096).seconds
    assert (
        scale.recursive_halving(1 << 10, 16384).seconds < scale.two_levels(1 << 10, 16384).seconds
    )
    assert scale.recursive_halving(large, 512).messages == 2 * 9
