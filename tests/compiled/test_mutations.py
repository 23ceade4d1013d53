"""Random changes of a float operation in PTX text are caught, all of them."""

import pytest

from tests.compiled.mutations import SUBJECTS, try_mutations


def check(tally, count):
    assert not tally.missed
    assert sum(tally.caught.values()) == count
    assert tally.how["names"] >= count // 2


def test_random_mutations_are_caught():
    check(try_mutations(24, seed=0, subjects=SUBJECTS[:5]), 24)


@pytest.mark.full
def test_many_random_mutations_are_caught():
    check(try_mutations(200, seed=1), 200)
