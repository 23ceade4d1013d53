"""Folders without the dumps of all ranks: who waits is not blamed, and what is not known is not judged."""

import json

import pytest

from isobit.cli.main import main
from isobit.errors import ArgumentError
from isobit.simulator.autopsy.examine import examine
from tests.simulator.autopsy.written_dumps import GLOO, call, gloo, grouped, write

DONE = call(0, "all_reduce", 1)
WAITING = [DONE, call(1, "all_reduce", 2, "started")]


@pytest.mark.parametrize("present", [(0, 1, 3), (5,), (0, 1, 3, 4), (0, 1, 3, 4, 5, 6, 7)], ids=str)
def test_ranks_that_wait_for_ranks_without_a_dump_are_not_blamed(present, tmp_path, capsys):
    """Rank 2 of 8 skipped the call; most dumps may be lost."""
    folder = write(tmp_path, dict.fromkeys(present, WAITING), grouped(8))
    found = examine(folder).finding
    assert found.ranks == tuple(rank for rank in range(8) if rank not in present)
    assert found.remedy.startswith("collect the dump")
    assert "check rank" not in found.remedy
    assert main(["autopsy", str(folder)]) == 1


def test_a_rank_with_a_dump_that_did_not_join_is_checked_and_others_are_collected(tmp_path):
    """Ranks 0 and 1 wait for rank 2, and rank 3 in another group for ranks that left nothing."""
    groups = grouped(8) | {
        "1": {"desc": "a", "ranks": "[0, 1, 2]"},
        "2": {"desc": "b", "ranks": "[3, 4, 5, 6, 7]"},
    }
    first = call(1, "all_reduce", 1, "started", process_group=("1", "a"), pg_id=1)
    second = call(1, "all_reduce", 1, "started", process_group=("2", "b"), pg_id=2)
    dumps = {0: [DONE, first], 1: [DONE, first], 2: [DONE], 3: [DONE, second]}
    found = examine(write(tmp_path, dumps, groups)).finding
    assert found.ranks == (2, 4, 5, 6, 7)
    assert found.remedy.startswith("check rank 2 for an extra or missing collective")
    assert "; collect the dumps of ranks 4–7" in found.remedy


def test_lost_dumps_do_not_hide_the_one_rank_that_waits_elsewhere(tmp_path):
    """Rank 0 alone calls on: ranks 1 to 3 made all their calls, and the others left nothing."""
    dumps = {0: WAITING, **{rank: [DONE] for rank in (1, 2, 3)}}
    found = examine(write(tmp_path, dumps, grouped(16))).finding
    assert found.ranks == (0,)


def test_a_folder_without_those_who_wait_is_not_judged(tmp_path, capsys):
    """Only the rank that skipped the call left a dump: none of its calls is in progress."""
    folder = write(tmp_path / "dumps", {2: [DONE]}, grouped(8))
    assert main(["autopsy", str(folder), "--html", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr().out
    assert "not judged: dumps of ranks 0, 1, 3–7 are missing" in shown
    assert "rank 2: last call all_reduce number 1 of group '0', completed" in shown
    assert "no hang" not in shown
    assert (
        "not judged: dumps of ranks 0, 1, 3–7 are missing" in (tmp_path / "page.html").read_text()
    )
    assert main(["autopsy", str(folder), "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["finding"] is None
    assert record["not_judged"] == "dumps of ranks 0, 1, 3–7 are missing"
    assert main(["diagnose", str(folder)]) == 2
    assert "received: dumps of ranks 0, 1, 3–7 are missing" in capsys.readouterr().out


def test_files_of_other_programs_are_no_lost_dumps(tmp_path):
    folder = write(tmp_path, {0: [DONE], 1: [DONE]}, grouped(2))
    (folder / "settings_7.json").write_text("{}")
    assert main(["autopsy", str(folder)]) == 0


def test_how_many_ranks_the_job_had_is_not_recorded_by_gloo(tmp_path, capsys):
    """Ranks 0 and 1 of 4 left a dump, and rank 2 is at fault."""
    entries = [gloo(0, 1, True), gloo(1, 2, False)]
    folder = write(tmp_path / "hung", {0: entries, 1: entries}, GLOO)
    assert main(["autopsy", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "nobody with a dump; others not recorded" in shown
    assert "if there were more than these 2, a rank without a dump did not join" in shown
    assert "--ranks N" in shown
    assert examine(folder, ranks=4).finding.ranks == (2, 3)
    assert "if there were more" not in examine(folder, ranks=2).finding.received
    assert main(["autopsy", str(folder), "--ranks", "4"]) == 1
    assert "did not join │\n" in capsys.readouterr().out.replace("┃", "│")
    with pytest.raises(ArgumentError, match="a number of ranks from 2"):
        examine(folder, ranks=1)

    calm = write(tmp_path / "calm", {0: entries[:1], 1: entries[:1]}, GLOO)
    assert main(["autopsy", str(calm)]) == 2
    assert "not judged: the dumps do not record how many ranks" in capsys.readouterr().out
    assert main(["autopsy", str(calm), "--ranks", "2"]) == 0
    assert main(["autopsy", str(calm), "--ranks", "3"]) == 2
    assert "the dump of rank 2 is missing" in capsys.readouterr().out


def test_a_rank_below_another_one_exists(tmp_path):
    assert examine(write(tmp_path, {2: [gloo(0, 1, True)]}, GLOO)).without_dump == (0, 1)


def test_members_of_a_group_of_gloo_are_not_known(tmp_path, capsys):
    """Rank 1 never joins group '1' of ranks 0 and 1: no dump says that it is a member."""
    inside = gloo(1, 1, False, process_group=("1", "undefined"), pg_id=1)
    dumps = {0: [gloo(0, 1, True), inside]}
    dumps |= {rank: [gloo(0, 1, True), gloo(1, 2, False)] for rank in (1, 2, 3)}
    folder = write(tmp_path, dumps, GLOO)
    assert main(["autopsy", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "nobody with a dump; others not recorded" in shown
    assert "rank 0 in all_reduce number 1 of group '1' (members not recorded; called by" in shown
    assert "a member of this group that never called it may be missing" in shown
    assert "look at the other members of group '1' too" in shown

    alone = examine(write(tmp_path / "alone", {0: dumps[0], 1: [gloo(0, 1, True)]}, GLOO)).finding
    assert "a member of this group that never called it may be missing" in alone.received
    assert alone.remedy.startswith("see in the program which ranks are members of the group")


def test_a_long_ring_of_messages_is_told_in_short(tmp_path):
    ring = {
        rank: [call(0, f"recv {rank}<-{(rank - 1) % 64}", 1, "started", p2p=True)]
        for rank in range(64)
    }
    found = examine(write(tmp_path, ring, grouped(64))).finding
    assert found.ranks == tuple(range(64))
    assert len(found.received) < 600
    assert "ranks 4–63 in 60 other calls" in found.received
    assert "a cycle of 64 ranks: 0 → 63 → 62 → 61 → …" in found.received
