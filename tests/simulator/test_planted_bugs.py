"""Each planted bug is named by kind and by exactly its ranks, whatever the schedule; right programs raise nothing.

Theorem: for every bug b and seed s, find(b, s, wrong) says (kind of b, culprits of b with s), and its twin, the same
program without the bug, says nothing; nor do programs that are right in ways a hasty watch would call wrong.
"""

import tempfile

import pytest

from benchmarks import bugs as benchmark
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
@pytest.mark.sweep(25)
def test_is_named_with_its_culprits(name):
    seeds = (0,) if name == "endless-poll" else (0, 1, 6)  # five seconds each
    assert judge(name, seeds) == {}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.sweep(25)
def test_clean_twin_raises_nothing(name):
    assert alarms(name, (0, 1)) == {}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_right_programs_raise_nothing(program):
    World(4, watch=WATCHES).run(program, 0)


def test_a_bug_is_not_named_when_nobody_watches():
    """The silent ones: without the watch they pass, so it is the watch that finds them."""
    bug = CATALOGUE["missing-all-reduce"]
    World(4).run(bug.program, 0, True)


def test_the_benchmark_counts_bugs_that_are_missed_and_false_alarms(tmp_path, monkeypatch, capsys):
    name = "wrong-group"  # of every rank, whatever the seed
    monkeypatch.setattr(benchmark, "CATALOGUE", {name: CATALOGUE[name]})
    monkeypatch.setattr(benchmark, "PROGRAMS", PROGRAMS[:1])
    found = {wrong: find(CATALOGUE[name], 0, wrong) for wrong in (True, False)}

    def sweep(wrong, right):
        folder = tmp_path / f"{wrong} {right}"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(
            benchmark, "find", lambda bug, seed, planted: found[wrong if planted else right]
        )
        codes = [benchmark.run(True, None, None) for _ in range(2)]  # the second reads the verdicts
        assert codes[0] == codes[1]
        return codes[0], capsys.readouterr().out

    code, printed = sweep(True, False)
    assert code == 0
    assert "1 bugs x 3 seeds: 0 not named with kind and ranks, of 3" in printed
    code, printed = sweep(False, False)
    assert code == 1
    assert "1 bugs x 3 seeds: 3 not named" in printed
    code, printed = sweep(True, True)
    assert code == 1
    assert "1 right twins x 5 seeds: 5 false alarms of 5" in printed


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
