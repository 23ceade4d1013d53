"""Runs that are recorded here, on gloo ranks: the planted cause is named with its rank, and right runs are silent."""

import pytest

from isobit.profiling.api import profile
from tests.profiling.gloo_runs import CAUSES, GLOBAL, SLEEPING, STEPS, record

RUNS = {
    2: [f"{cause}@{late}" for cause in CAUSES for late in (0, 1)] + list(GLOBAL),
    3: [f"{cause}@2" for cause in CAUSES],
    4: ["loader@2", "backward@2"],
}


def warnings(found):
    return {one.rule: one.rank for one in found.findings if one.severity == "warning"}


def is_named(found, run):
    """Whether the planted cause is found, with its rank, and nothing else is."""
    cause, _, late = run.partition("@")
    said = warnings(found)
    if not late:
        return set(said) == {GLOBAL[cause]}
    allowed = {"slow-rank", "data-loader"} if cause == "loader" else {"slow-rank"}
    return (
        said.get("slow-rank") == int(late)
        and set(said) <= allowed
        and next(iter(found.causes[int(late)])) == CAUSES[cause]
    )


def length(found):
    return max(rank.whole.total for rank in found.ranks)


def test_a_slow_loader_of_one_rank_is_named(tmp_path):
    found = profile([record(tmp_path, ["loader@1"])["loader@1"]])
    assert [rank.device for rank in found.ranks] == ["CPU", "CPU"]
    assert warnings(found)["slow-rank"] == 1
    assert next(iter(found.causes[1])) == "idle: data loader"
    assert len(found.ranks[0].steps) == STEPS
    assert found.savings[1] is not None
    for rank in found.ranks:
        assert sum(brick.wall for brick in rank.bricks) + rank.whole.idle == rank.whole.total
        assert len(rank.core_times) == STEPS


@pytest.mark.full
def test_planted_causes_are_named_right_twins_are_silent_and_savings_come_true(tmp_path):
    """22 runs with one planted cause each and their right twins; 20 of them have a slow rank and so a prediction."""
    named, silent, said, kept, predicted = {}, {}, {}, {}, 0
    for ranks, runs in RUNS.items():
        folder = tmp_path / str(ranks)
        folder.mkdir()
        pairs = [pair for run in runs for pair in ((run, run), (f"{run}.twin", "none"))]
        folders = record(folder, pairs, ranks)
        for run in runs:
            found, twin = profile([folders[run]]), profile([folders[f"{run}.twin"]])
            name = f"{run} of {ranks}"
            named[name], silent[name] = is_named(found, run), not warnings(twin)
            if not named[name] or not silent[name]:
                said[name] = (
                    [(one.rule, one.rank, one.detail) for one in found.findings],
                    found.causes,
                )
                said[name] += ([(one.rule, one.rank, one.detail) for one in twin.findings],)
            if "@" in run:
                measured, saving = length(found) - length(twin), found.savings[int(run[-1])]
                if (
                    run.partition("@")[0] in SLEEPING
                ):  # then it is known, whatever the machine did to the twin
                    measured = STEPS * float((folder / "slept").read_text()) * 1e9
                predicted += 1
                kept[name] = saving is not None and abs(saving - measured) <= 0.2 * measured
    assert (len(named), predicted) == (22, 20)
    assert all(named.values()), said
    assert all(silent.values()), said
    assert sum(kept.values()) >= 16, kept
