"""The timeline for Perfetto: its pieces tile the steps of every rank, waits meet, and all ranks are on one clock."""

import json

from isobit.cli.main import main
from isobit.profiling.timeline import TRACKS, timeline_of
from isobit.profiling.trace import read_traces
from tests.profiling.test_ranks import run_of


def written(tmp_path, **how):
    for rank, chrome in enumerate(run_of(**how)):
        chrome.write(tmp_path / f"rank{rank}.json")
    return timeline_of(read_traces([tmp_path]))["traceEvents"]


def on(events, rank, track):
    return [
        e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, TRACKS.index(track))
    ]


def test_pieces_tile_the_steps_and_waits_end_when_the_last_rank_arrives(tmp_path):
    # The clock of rank 1 is ahead; its collectives prove it.
    events = written(tmp_path, delays=[(2, 1, "loader", 400)], clock=[0, 5000, 0])
    for rank in range(3):
        steps, causes = on(events, rank, "steps"), on(events, rank, "where the time goes")
        assert len(steps) == 3
        assert round(sum(e["dur"] for e in causes), 3) == round(sum(e["dur"] for e in steps), 3)
        ends = [round(e["ts"] + e["dur"], 3) for e in causes]
        assert ends[:-1] == [round(e["ts"], 3) for e in causes[1:]]
    waits = [e for rank in (0, 1) for e in on(events, rank, "collectives") if "waits" in e["name"]]
    assert {e["name"] for e in waits} == {"waits for rank 2: allreduce"}
    assert {round(e["dur"], 3) for e in waits} == {400.0}
    assert len({round(e["ts"] + e["dur"], 3) for e in waits}) == 1
    assert waits[0]["args"]["late_by_ms"]["idle: data loader"] == 0.4


def test_the_command_writes_it_with_findings(tmp_path, capsys):
    delays = [(2, step, "loader", 400) for step in range(3)]
    for rank, chrome in enumerate(run_of(delays=delays)):
        chrome.write(tmp_path / f"rank{rank}.json")
    out = tmp_path / "out" / "timeline.json"
    out.parent.mkdir()
    traces = [str(tmp_path / f"rank{rank}.json") for rank in range(3)]
    assert main(["profile", *traces, "--perfetto", str(out)]) == 1
    events = json.loads(out.read_text())["traceEvents"]
    assert any(e["name"].startswith("slow-rank") for e in on(events, 2, "findings"))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    # It is no trace of a run: nothing in it is work.
    assert main(["profile", str(out)]) == 2
    assert main(["profile", traces[0], traces[0], "--compare", "--perfetto", str(out)]) == 2
    assert "one run" in capsys.readouterr().err
