"""Runs that are recorded here, on gloo ranks: the planted cause is named with its rank, and the steps add up."""

import pytest

from isobit.profiling.api import profile
from tests.profiling.gloo_runs import CAUSES, DELAY, record


def named(found, rank, cause):
    """Whether the rank is found, and its first cause is the planted one."""
    slow = [one.rank for one in found.findings if one.rule == "slow-rank"]
    return slow == [rank] and next(iter(found.causes[rank])) == CAUSES[cause]


def test_a_slow_loader_of_one_rank_is_named(tmp_path):
    found = profile(record(tmp_path, "loader", late=1))
    assert [rank.device for rank in found.ranks] == ["CPU", "CPU"]
    assert named(found, 1, "loader")
    steps = len(found.ranks[0].steps)
    assert steps == 4
    assert found.causes[1]["idle: data loader"] > 0.9 * (steps - 1) * DELAY * 1e9
    assert found.savings[1] is not None
    assert {one.rule for one in found.findings if one.rank == 1} == {"slow-rank", "data-loader"}
    for rank in found.ranks:
        assert sum(brick.wall for brick in rank.bricks) + rank.whole.idle == rank.whole.total


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("cause", CAUSES)
def test_every_planted_cause_is_named(cause, late, tmp_path):
    ranks = 3 if late == 2 else 2
    assert named(profile(record(tmp_path, cause, late=late, ranks=ranks)), late, cause)
