"""The tables of docs/explanation/scale.md are what the model computes, and the model keeps what is known of it."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_model", ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scale():
    return load("scale")


def test_the_page_has_the_tables_of_the_record_of_tools():
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()
    tools = load("tools")
    record = json.loads(tools.RECORD.read_text())
    assert set(record["tools"]) == set(tools.TOOLS)
    missing = [line for line in tools.tables(record) if line not in page]
    assert not missing, missing
    for one in record["tools"].values():  # every figure counts
        one["rows"][-1][1] *= 2
    assert len([line for line in tools.tables(record) if line not in page]) == 2 * len(tools.TOOLS)


def test_the_power_of_a_cost_is_that_of_its_size():
    tools = load("tools")
    rows = [[10, 1.0, 1.0, 5.0], [100, 10.0, 1.0, 5.0], [1000, 1000.0, 1.0, 5.0]]
    assert [round(tools.slope(rows, 0, first), 6) for first in (-2, 0)] == [2.0, 1.5]
    assert tools.slope(rows, 2) == 0


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
