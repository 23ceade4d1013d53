"""Random changes of a float operation in PTX text are caught, all of them."""

import pytest

from tests.certifying.mutations import SUBJECTS, reaches_an_output, try_mutations
from tests.certifying.ptx_changes import float_lines


def check(tally, count):
    assert not tally.missed
    assert tally.of("names") + tally.of("refused") == count
    assert tally.of("names") >= count // 2


def test_random_mutations_are_caught():
    check(try_mutations(24, seed=0, subjects=SUBJECTS[:5]), 24)


@pytest.mark.full
def test_many_random_mutations_are_caught():
    check(try_mutations(200, seed=1), 200)


def test_a_replaced_result_shows():
    """The reason "no output depends on the result" is not given to an instruction that matters."""
    target, make = SUBJECTS[4]
    case = make()
    program = case.launches[0].compile(target)[0].program
    lines = {line.at + 1 for line in float_lines(case.launches[0].compile(target)[0].ptx)}
    found = [each for each in program.instructions if each.line in lines]
    assert found
    assert all(reaches_an_output(case, target, each) for each in (found[0], found[-1]))
