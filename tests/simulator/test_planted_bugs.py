"""Each planted bug is named by kind and by exactly its ranks, whatever the schedule; right programs raise nothing.

Theorem: for every bug b and seed s, find(b, s, wrong) says (kind of b, culprits of b with s), and its twin, the same
program without the bug, says nothing; nor do programs that are right in ways a hasty watch would call wrong.
"""

import pytest

from isobit.simulator import World
from tests.simulator.bugs import CATALOGUE, blamed, find
from tests.simulator.clean_programs import PROGRAMS

TWINS = {bug.program.__name__: bug for bug in CATALOGUE.values()}
WATCHES = ("bits", "reads", "training")
pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # an advice, given to every such module


def judge(name, seeds):
    """Return the seeds whose finding is not the planted one, each with that finding."""
    bug, wrong = CATALOGUE[name], {}
    for seed in seeds:
        error = find(bug, seed, True)
        said = None if error is None else (error.kind, blamed(error))
        if said != (bug.kind, bug.culprits(seed)):
            wrong[seed] = said
    return wrong


def alarms(name, seeds):
    """Seeds on which a right program was blamed."""
    return {
        seed: str(error) for seed in seeds if (error := find(TWINS[name], seed, False)) is not None
    }


def test_there_are_enough():
    named = {
        "missing-all-reduce",
        "wrong-group",
        "mean-of-means",
        "collective-under-if",
        "reordered-on-two-groups",
        "forgotten-wait",
        "cyclic-receive",
        "wrapper-bypassed",
        "dropout-seeded-alike",
        "unsynchronised-buffer",
        "dead-rank",
        "flipped-bit",
        "overwritten-send",
        "endless-computation",
    }
    assert named <= set(CATALOGUE)
    assert len(CATALOGUE) == 61
    assert len({bug.kind for bug in CATALOGUE.values()}) >= 15


@pytest.mark.parametrize("name", CATALOGUE)
def test_is_named_with_its_culprits(name):
    assert judge(name, (0, 1, 6)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_clean_twin_raises_nothing(name):
    assert alarms(name, (0, 1)) == {}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_programs_raise_nothing(program):
    World(4, watch=WATCHES).run(program, 0)


def test_a_bug_is_not_named_when_nobody_watches():
    """The silent ones: without the watch they pass, so it is the watch that finds them."""
    bug = CATALOGUE["missing-all-reduce"]
    World(4).run(bug.program, 0, True)


@pytest.mark.full
@pytest.mark.parametrize("name", CATALOGUE)
def test_is_named_with_fifty_seeds(name):
    assert judge(name, range(50)) == {}


@pytest.mark.full
@pytest.mark.parametrize("name", TWINS)
def test_clean_twin_raises_nothing_with_two_hundred_seeds(name):
    assert alarms(name, range(200)) == {}


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_programs_raise_nothing_with_twenty_seeds(program):
    for seed in range(20):
        World(4, seed, watch=WATCHES).run(program, seed)
