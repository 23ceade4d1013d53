"""docs/reference/what-works.md: every line has a state and names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/what-works.md"
STATES = {"works", "partly", "raises", "not run"}


def rows():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[-1] != "shown by" and not set(row[0]) <= {"-"}]


def missing(evidence):
    """Return what a cell names that does not exist."""
    found = []
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", evidence):
        path = ROOT / file
        if not path.is_file():
            found.append(file)
        elif test and not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
            found.append(f"{file}::{test}")
    return found


def test_there_are_lines_of_every_kind():
    assert len(rows()) >= 30
    assert {row[1] for row in rows()} == STATES


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_line_names_tests_that_exist(row):
    assert len(row) == 4
    _, state, _, evidence = row
    assert state in STATES
    assert missing(evidence) == []
    named = "`tests/" in evidence
    assert named if state != "not run" else evidence == "not run"


def test_a_test_that_is_gone_is_noticed():
    assert missing("`tests/repo/test_what_works.py::test_that_never_was`")
    assert missing("`tests/repo/test_nowhere.py`")
    assert not missing("`tests/repo/test_what_works.py::test_a_test_that_is_gone_is_noticed`")
