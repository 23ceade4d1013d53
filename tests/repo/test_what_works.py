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


KINDS = ("model", "trainer", "rollout", "device")
# Tuples: the name of a set changes between processes, and workers must collect the same tests.
COLUMNS = (("works",), ("partly",), ("raises", "not run"))


def short_table():
    """Return (kind, states, name) of everything that the README's table names."""
    text = (ROOT / "README.md").read_text()
    lines = text.partition("<!-- works -->\n")[2].partition("<!-- /works -->")[0].splitlines()[2:]
    for line in lines:
        kind, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for states, cell in zip(COLUMNS, cells, strict=True):
            for name in re.split(r"[,;] | and ", cell):
                yield kind, states, name.strip("`")


def lines_of(kind, states):
    """Return the page's lines of a kind that have one of these states."""
    section = PAGE.read_text().split("\n## ")[1 + KINDS.index(kind)]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [row[0].strip() for row in cells if row[1].strip() in states]


@pytest.mark.parametrize(("kind", "states", "name"), list(short_table()), ids=lambda v: str(v)[:24])
def test_the_readme_says_the_same(kind, states, name):
    if name == "others":
        return
    found = (
        " ; ".join(lines_of(kind, states)).replace("`", "").replace("FSDP2 (fully_shard)", "FSDP2")
    )
    assert all(word in found for word in (name, *name.split())), f"{name}: {found}"


def test_the_readme_names_enough():
    assert len(list(short_table())) > 35
    assert {kind for kind, *_ in short_table()} == set(KINDS)


def test_a_test_that_is_gone_is_noticed():
    assert missing("`tests/repo/test_what_works.py::test_that_never_was`")
    assert missing("`tests/repo/test_nowhere.py`")
    assert not missing("`tests/repo/test_what_works.py::test_a_test_that_is_gone_is_noticed`")
