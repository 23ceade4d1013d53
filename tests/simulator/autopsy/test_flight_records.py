"""What ring buffers, streams, batches, versions and lost files do to dumps, on dumps written by hand."""

import json
import pickle
import shutil

import pytest

from isobit.cli.main import main
from isobit.errors import ArgumentError
from isobit.simulator.autopsy.examine import examine
from tests.simulator.autopsy.hangs import HANGS, record
from tests.simulator.autopsy.written_dumps import PAIR, call, write


def said(folder):
    found = examine(folder).finding
    return None if found is None else (found.kind, found.ranks, found.received)


def test_calls_queued_in_another_order_on_two_streams(tmp_path):
    """NCCL only enqueues: both ranks have recorded both calls, and neither completes."""
    two = {"process_group": ("1", "tensor"), "pg_id": 1}
    groups = PAIR | {"1": {"name": "1", "desc": "tensor", "ranks": "[0, 1]"}}
    first = [call(0, "all_reduce", 1, "started"), call(1, "all_reduce", 1, "scheduled", **two)]
    second = [call(0, "all_reduce", 1, "started", **two), call(1, "all_reduce", 1, "scheduled")]
    kind, ranks, received = said(write(tmp_path / "wrong", {0: first, 1: second}, groups))
    assert (kind, ranks) == ("deadlock", (0, 1))
    assert "a cycle: 0 → 1 → 0" in received
    _, _, received = said(write(tmp_path / "same", {0: first, 1: first}, groups))
    assert "ranks 0, 1 joined all_reduce number 1" in received  # in one order: no cycle


def batch(state, *names):
    """A batch of messages: torch updates the state of its last entry only."""
    inside = [call(at, name, 1, "scheduled", p2p=True) for at, name in enumerate(names)]
    return [*inside, call(len(names), "coalesced", 1, state, p2p=True)]


def test_batches_of_messages_have_the_state_of_their_end(tmp_path):
    right = {
        0: batch("completed", "send 0->1", "recv 0<-1"),
        1: batch("completed", "send 1->0", "recv 1<-0"),
    }
    assert said(write(tmp_path / "right", right)) is None
    wrong = {0: batch("started", "send 0->1", "recv 0<-1"), 1: batch("started", "recv 1<-0")}
    kind, ranks, received = said(write(tmp_path / "wrong", wrong))
    assert (kind, ranks) == ("deadlock", (1,))
    assert received.startswith("rank 0 in recv from rank 1 on group '0'")


def test_batches_of_collectives_are_compared_call_by_call(tmp_path):
    def gathers(*sizes):
        inside = [
            call(at, "all_gather_into_tensor_coalesced", 1, "scheduled", input_sizes=[[size]])
            for at, size in enumerate(sizes)
        ]
        return [*inside, call(len(sizes), "coalesced", 1, "started")]

    kind, ranks, received = said(write(tmp_path, {0: gathers(4, 8), 1: gathers(4, 6)}))
    assert (kind, ranks) == ("mismatch", (0, 1))
    assert "Float (6,)" in received


def test_a_group_made_again_begins_at_one(tmp_path):
    old, new = call(0, "all_reduce", 1), call(1, "all_reduce", 1, "started", pg_id=1)
    kind, ranks, _ = said(write(tmp_path, {0: [old, new], 1: [old]}))
    assert (kind, ranks) == ("deadlock", (1,))


def test_a_dropped_call_was_made_and_a_dropped_group_is_unknown(tmp_path):
    late = [call(9, "all_reduce", 10, "started")]
    assert said(write(tmp_path / "a", {0: [call(8, "all_reduce", 9), *late], 1: late}))[1] == (0, 1)
    other = call(7, "all_reduce", 1, process_group=("1", "x"), pg_id=1)
    _kind, _, received = said(write(tmp_path / "b", {0: late, 1: [other]}))
    assert "rank 1 without records of this group" in received


def test_shapes_of_one_size_agree_and_uneven_gathers_may_complete(tmp_path):
    square = call(0, "broadcast", 1, input_sizes=[[2, 2]])
    assert said(write(tmp_path / "a", {0: [square], 1: [call(0, "broadcast", 1)]})) is None
    uneven = {r: [call(0, "all_gather", 1, input_sizes=[[4 + r]])] for r in (0, 1)}
    assert said(write(tmp_path / "b", uneven)) is None
    summed = {r: [call(0, "all_reduce", 1, input_sizes=[[4 + r]])] for r in (0, 1)}
    assert said(write(tmp_path / "c", summed))[0] == "mismatch"  # completed, and still wrong


def test_json_and_older_versions_are_read(tmp_path):
    record(HANGS["skipped-last"], tmp_path / "pickles")
    for path in list((tmp_path / "pickles").iterdir()):
        raw = pickle.loads(path.read_bytes())
        raw["version"] = "2.1"
        for entry in raw["entries"]:
            for key in (
                "frames",
                "thread_id",
                "thread_name",
                "is_p2p",
                "input_dtypes",
                "output_dtypes",
            ):
                del entry[key]
        name = f"trace_{path.name.split('_')[-1]}.json"
        (tmp_path / name).write_text(json.dumps(raw))
    shutil.rmtree(tmp_path / "pickles")
    assert said(tmp_path)[:2] == ("deadlock", (2,))


def test_gloo_marks_calls_as_retired_and_does_not_record_members(tmp_path):
    def gloo(record, number, retired):
        name = {"profiling_name": "gloo:all_reduce", "retired": retired}
        return call(record, "", number, "scheduled", **name)

    dumps = {r: [gloo(0, 1, True), *([gloo(1, 2, False)] if r else [])] for r in range(3)}
    groups = {"": {"name": "", "desc": "", "ranks": "[]"}}
    assert said(write(tmp_path, dumps, groups))[:2] == ("deadlock", (0,))


def test_lost_and_cut_files(tmp_path):
    record(HANGS["skipped-last"], tmp_path)
    cut = tmp_path / "nccl_trace_rank_2"
    cut.write_bytes(cut.read_bytes()[:-40])
    autopsy = examine(tmp_path)
    assert autopsy.finding.ranks == (2,)
    assert autopsy.without_dump == (2,)
    assert "rank 2 without a dump" in autopsy.finding.received
    assert "a whole pickle" in autopsy.evidence.broken[2]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ArgumentError, match="none in"):
        examine(tmp_path)


def test_pickle_is_preferred_and_two_hangs_are_not_mixed(tmp_path):
    entries = {0: [call(0, "all_reduce", 1)], 1: [call(0, "all_reduce", 1, "started")]}
    write(tmp_path, entries)
    write(tmp_path, entries, text=True)
    assert examine(tmp_path).last[1].stack == ("/job/train.py:10 in step",)
    write(tmp_path / "other", entries)
    with pytest.raises(ArgumentError, match="one dump of rank 0"):
        examine(tmp_path)


def test_logs_and_stacks_are_repeated(tmp_path):
    write(tmp_path, {0: [call(0, "all_reduce", 1, "started")], 1: []})
    (tmp_path / "job.log").write_text(
        "[rank0]:[E1116 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds\n"
        "[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 0 PG status: last "
        "enqueued work: 0, last completed work: 0\n"
    )
    (tmp_path / "py-spy-rank1.txt").write_text(
        'Process 12: python train.py\nPython v3.11.7\n\nThread 12 (idle): "MainThread"\n'
        "    read (dataset.py:88)\n    <module> (train.py:3)\n"
    )
    (tmp_path / "notes.txt").write_text("nothing that is understood")
    facts = examine(tmp_path).evidence.facts
    assert facts.lines() == [
        "NCCL's watchdog: ALLREDUCE number 1 timed out on rank 0 after 600.029 s",
        "NCCL's watchdog: last enqueued 0, last completed 0 on rank 1",
    ]
    assert facts.stacks == {1: ("dataset.py:88 in read", "train.py:3 in <module>")}
    assert examine(tmp_path).evidence.skipped == ["notes.txt"]


def at(line, **fields):
    """Fields of a call from a line of the job; hosts may keep it in different folders."""
    folder = fields.pop("folder", "/job")
    return {"frames": [{"name": "step", "filename": f"{folder}/train.py", "line": line}]} | fields


def test_where_ranks_came_apart_is_a_note_of_the_mismatch(tmp_path, capsys):
    """Rank 0's extra call has the shape of rank 1's next one: it completes, and the call after it differs."""
    extra = [
        call(0, "all_reduce", 1, **at(10)),
        call(1, "all_reduce", 2, **at(20)),
        call(2, "all_reduce", 3, "started", **at(30)),
    ]
    other = [
        call(0, "all_reduce", 1, **at(10, folder="/mnt/job")),
        call(1, "all_reduce", 2, **at(30, folder="/mnt/job")),
        call(2, "all_reduce", 3, "started", input_sizes=[[9]], **at(40, folder="/mnt/job")),
    ]
    folder = write(tmp_path / "wrong", {0: extra, 1: other})
    found = examine(folder)
    assert found.finding.note == (
        "ranks call from different lines first in all_reduce number 2 of group '0' (ranks 0, 1): "
        "rank 0 at /job/train.py:20 in step, rank 1 at /mnt/job/train.py:30 in step"
    )
    page = tmp_path / "page.html"
    assert main(["autopsy", str(folder), "--html", str(page)]) == 1
    assert "ranks call from different lines first in all_reduce number 2" in page.read_text()
    shown = capsys.readouterr().out
    assert "nobody; the calls differ" in shown
    assert "all joined" not in shown
    assert "note: ranks call from different lines first in all_reduce number 2" in shown
    right = {rank: [call(0, "all_reduce", 1, **at(10 + rank))] for rank in (0, 1)}
    assert said(write(tmp_path / "right", right)) is None  # different lines alone are no finding


def test_where_ranks_came_apart_is_a_note_of_a_deadlock(tmp_path):
    lines = {0: [10, 20, 30], 1: [10, 30]}
    dumps = {
        rank: [
            call(i, "all_reduce", i + 1, "started" if i == 2 else "completed", **at(line))
            for i, line in enumerate(where)
        ]
        for rank, where in lines.items()
    }
    found = examine(write(tmp_path, dumps)).finding
    assert (found.kind, found.ranks) == ("deadlock", (1,))
    assert "first in all_reduce number 2 of group" in found.note
