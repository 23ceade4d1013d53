"""Every recorded hang is explained by its dumps: the ranks at fault and the call, as planted. Right twins show none."""

import pytest

from isobit.simulator.autopsy.examine import examine
from tests.simulator.autopsy.hangs import HANGS, record


def test_there_are_enough():
    assert len(HANGS) >= 25


@pytest.mark.parametrize("case", HANGS.values(), ids=lambda case: case.name)
@pytest.mark.sweep(15)
def test_ranks_and_call_are_named(case, tmp_path):
    record(case, tmp_path)
    found = examine(tmp_path).finding
    assert (found.kind, found.ranks) == (case.kind, case.ranks)
    assert case.call in f"{found.expected}; {found.received}"


@pytest.mark.parametrize("case", HANGS.values(), ids=lambda case: case.name)
@pytest.mark.sweep(15)
def test_right_twin_shows_no_hang(case, tmp_path):
    assert record(case, tmp_path, planted=False) is None
    autopsy = examine(tmp_path)
    assert autopsy.finding is None
    assert not autopsy.places
    assert len(autopsy.history.dumps) == case.world
    assert all(dump.entries for dump in autopsy.history.dumps.values()) or case.world == 4


def test_stack_is_where_the_simulator_saw_it(tmp_path):
    case = HANGS["skipped-last"]
    simulated, found = record(case, tmp_path), examine(tmp_path).finding
    assert found.stacks == simulated.stacks
    assert found.ranks == simulated.ranks
