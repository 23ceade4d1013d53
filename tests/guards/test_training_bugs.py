"""TrainCheck's 20 bugs, the six that it found, and two more: each wrong program is found as stated, each twin silent.

A bug that no check finds yet is in the catalogue too, and must not be found: whoever adds the check corrects the entry.
`python -m benchmarks training_bugs` prints the table of docs/results/guards.md.
"""

import pytest

from tests.guards.bugs import CATALOGUE


def test_the_catalogue_is_whole():
    groups = [bug.group for bug in CATALOGUE.values()]
    assert (groups.count("20"), groups.count("new"), groups.count("more")) == (20, 6, 2)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.sweep(10)
def test_a_known_bug(name):
    bug = CATALOGUE[name]
    found = bug.look(True)
    assert (found[0] if found else None) == bug.finds, found
    assert bug.look(False) == []
