"""NVIDIA's 27 pitfalls of reading a profile: each has a test or a stated limit; so has a busy machine."""

import re
from pathlib import Path

from isobit.profiling.api import profile
from tests.profiling.synthetic import ROOT, Chrome
from tests.profiling.test_ranks import profiled, run_of

PAGE = ROOT / "docs" / "explanation" / "pitfalls-of-profiles.md"


def test_each_of_27_pitfalls_has_a_test_or_a_limit():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, 28))
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for row in rows:
        test = row[-1].strip("| `")
        assert test == "limit" or f"def {test}(" in sources, row
        assert test != "limit" or "limit: " in row[2], row
    assert sum(row[-1].strip("| `") == "limit" for row in rows) <= 7


def test_a_busy_stream_is_not_the_step(tmp_path):
    chrome = Chrome()
    chrome.step(1, 0, 1000)
    chrome.kernel("a", 100, 700, launched=90, stream=7)
    chrome.kernel("b", 300, 900, launched=95, stream=8)
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    assert rank.whole.total == 1_000_000  # neither 600 of one stream, nor 1,200 of both
    assert rank.whole.parts["compute"] == 800_000


def rules(found):
    return {(one.rule, one.rank) for one in found.findings}


def note_core_waits(chromes, us):
    """Note at the end of each step that the last rank's main thread had no core for so long."""
    for chrome in chromes:
        without = us * 1000 if chrome is chromes[-1] else 0
        ends = [e["ts"] + e["dur"] for e in chrome.events if e["name"].startswith("ProfilerStep#")]
        for at in ends:
            words = f"ran 0, waited {without}, senders_ran 0, senders_waited 0, stolen 0"
            chrome.note(f"isobit: core times in ns: {words}", at - 2, at - 1)


def test_time_without_a_core_is_no_finding(tmp_path):
    """The same late rank: because of its loader, or because it had no core."""
    delays = [(2, step, "loader", 400) for step in range(3)]
    slow = run_of(delays=delays)
    note_core_waits(slow, 20)
    found = profiled(slow, tmp_path)
    assert {("slow-rank", 2), ("data-loader", 2)} <= rules(found)
    assert {time.waited for time in found.ranks[2].core_times.values()} == {20_000}
    busy = run_of(delays=delays)
    note_core_waits(busy, 460)
    found = profiled(busy, tmp_path)
    assert not {("slow-rank", 2), ("data-loader", 2)} & rules(found)
    assert any("had no core for 0.460 ms" in note for note in found.ranks[2].notes)
    assert sum(found.ranks[2].whole.parts.values()) == found.ranks[2].whole.total


def test_collectives_need_as_long_as_the_fastest_one_like_them(tmp_path):
    """One that is slow once is not what its size costs."""
    chromes = run_of()
    for chrome in chromes:
        kernels = [e for e in chrome.events if e["name"] == "ncclDevKernel_AllReduce"]
        for kernel in kernels[:2]:
            kernel["ts"] += 98  # all arrive later, and leave as before
            kernel["dur"] -= 98
    found = profiled(chromes, tmp_path)
    assert ("exposed-communication", 0) not in rules(found)
    assert ("exposed-communication", 0) in rules(profiled(run_of(), tmp_path))
