"""docs/explanation/gpu-executors.md: every line of what a card will meet has a state, and names tests that exist."""

import re
from pathlib import Path

import pytest

from tests.repo.test_what_works import missing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/gpu-executors.md"


def rows():
    section = PAGE.read_text().partition("\n## What a card will meet\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_there_are_lines():
    assert len(rows()) == 18


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_line_names_tests_that_exist(row):
    what, state, evidence = row
    assert what
    assert state
    assert re.fullmatch(r"`tests/\w+/test_\w+\.py`(, `tests/\w+/test_\w+\.py`)*", evidence)
    assert missing(evidence) == []


def test_a_test_that_is_gone_is_seen():
    assert missing("`tests/gpu/test_of_nothing.py`") == ["tests/gpu/test_of_nothing.py"]
