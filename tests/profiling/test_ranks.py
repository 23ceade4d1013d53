"""Ranks: waiting is told from moving, and the lateness of the last rank is the exact sum of its causes."""

import json

import pytest

from isobit.profiling.account import Books
from isobit.profiling.api import profile, profile_traces
from isobit.profiling.records import Lateness
from isobit.profiling.trace import Step, read_traces
from tests.profiling.planted_delays import CAUSES, LOADER, plant, read_archive, traces_of
from tests.profiling.synthetic import CORPUS, Chrome

STEP = 1000  # µs


def run_of(ranks=3, steps=3, delays=(), clock=(), skew=0):
    """A run: each step loads 50 µs, launches a kernel of 300, waits, and meets in an all-reduce that moves for 100.

    `delays` are (rank, step, cause, µs); `clock` is what each rank's clock is ahead.
    """
    chromes = [Chrome(rank, ranks) for rank in range(ranks)]
    begin = 0
    for step in range(steps):
        arrivals = []
        for rank, chrome in enumerate(chromes):
            late = {cause: us for r, s, cause, us in delays if (r, s) == (rank, step)}
            at = begin
            chrome.note(LOADER, at, at + 50 + late.get("loader", 0))
            at += 50 + late.get("loader", 0)
            if "sync" in late:
                chrome.call("cudaStreamSynchronize", at, at + late["sync"])
            if "python" in late:
                chrome.add("python_function", "train.py(3): augment", at, at + late["python"])
            if "operators" in late:
                chrome.operator("aten::nonzero", at, at + late["operators"])
            if "allocator" in late:
                chrome.call("cudaMalloc", at, at + late["allocator"])
            at += sum(us for cause, us in late.items() if cause not in ("loader", "compute"))
            chrome.operator("aten::mm", at, at + 20, [[64, 64], [64, 64]])
            chrome.kernel("sgemm", at + 20, at + 320 + late.get("compute", 0), launched=at + 18)
            arrivals.append(at + 320 + late.get("compute", 0) + skew * rank)
        finish = max(arrivals) + 100
        for chrome, at in zip(chromes, arrivals, strict=True):
            message = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Float"}
            chrome.kernel(
                "ncclDevKernel_AllReduce", at, finish, launched=at - 5, stream=20, **message
            )
            chrome.step(step, begin, finish + 10)
        begin = finish + 10
    for chrome, ahead in zip(chromes, clock, strict=False):
        for event in chrome.events:
            event["ts"] += ahead
    return chromes


def profiled(chromes, folder):
    for rank, chrome in enumerate(chromes):
        chrome.write(folder / f"rank{rank}.json")
    return profile([folder])


PLANTS = {
    "loader": "idle: data loader",
    "sync": "idle: host waits for the device",
    "python": "idle: host in Python",
    "operators": "idle: host between launches",
    "allocator": "idle: allocator",
    "compute": "compute",
    "sleep": "idle: nothing recorded",
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("cause", PLANTS)
def test_a_planted_delay_is_named_with_rank_cause_and_size(cause, rank, tmp_path):
    found = profiled(run_of(delays=[(rank, step, cause, 200) for step in (1, 2)]), tmp_path)
    assert [one.last for one in found.collectives[1:]] == [rank, rank]
    assert found.waited_for[rank] == 2 * 2 * 200_000  # two others, two steps
    assert found.causes[rank][PLANTS[cause]] == 400_000
    assert sum(found.causes[rank].values()) == 400_000
    assert found.savings[rank] == 400_000
    for one in found.collectives:
        assert {r: one.waits[r] + one.moves[r] for r in one.waits} == {
            r: 100_000 + one.waits[r] for r in one.waits
        }
        assert sum(one.lateness.parts.values()) == one.lateness.ns


def test_the_right_twin_waits_for_nobody(tmp_path):
    found = profiled(run_of(), tmp_path)
    assert sum(one.waiting for one in found.collectives) == 0
    assert sum(one.moving for one in found.collectives) == 3 * 3 * 100_000
    assert [one.lateness.ns for one in found.collectives] == [0, 0, 0]
    assert set(found.savings.values()) <= {0}


def test_what_a_rank_brings_along_is_a_part(tmp_path):
    chromes = run_of(ranks=2, steps=1)
    for event in chromes[1].events:
        if event["name"] != "ncclDevKernel_AllReduce":
            event["ts"] += 70
        else:
            event["ts"] += 70
            event["dur"] -= 70
    chromes[0].events[-2]["dur"] += 0
    found = profiled(chromes, tmp_path)
    (one,) = found.collectives
    assert one.last == 1
    assert one.lateness.parts["began the recording later"] == 70_000
    assert one.lateness.ns == 70_000


def test_lateness_that_does_not_add_up_cannot_be_made():
    with pytest.raises(ArithmeticError):
        Lateness(1, 0, 10, {"compute": 9})


@pytest.mark.parametrize("kept", [1, 2])
def test_some_ranks_of_several_cannot_tell(kept, tmp_path):
    chromes = run_of(delays=[(2, 1, "loader", 300)])[:kept]
    found = profiled(chromes, tmp_path)
    assert found.collectives == ()
    assert found.waited_for == found.savings == {}
    assert any(f"cannot be told apart from {kept} of 3 ranks" in note for note in found.notes)


def test_clocks_that_differ_are_aligned_and_said(tmp_path):
    delays = [(2, step, "loader", 200) for step in (1, 2)]
    found = profiled(run_of(delays=delays, clock=(0, 5000, -7000)), tmp_path)
    assert any(
        "differ by up to 7.000 ms" in note and "up to 0.000 ms" in note for note in found.notes
    )
    assert found.waited_for[2] == 800_000
    assert found.causes[2]["idle: data loader"] == 400_000
    assert profiled(run_of(delays=delays), tmp_path).notes == ()


def test_base_times_are_added(tmp_path):
    chromes = run_of(ranks=2, delays=[(1, 1, "loader", 200)])
    for event in chromes[1].events:
        event["ts"] += 1000
    chromes[0].header["baseTimeNanoseconds"] = 1_700_000_000_001_000_000
    chromes[1].header["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
    found = profiled(chromes, tmp_path)
    assert found.notes == ()
    assert found.waited_for == {1: 200_000}


def test_ranks_that_call_otherwise_are_not_matched(tmp_path):
    chromes = run_of(ranks=2)
    message = {"Collective name": "allreduce", "In msg nelems": 1, "dtype": "Float"}
    chromes[0].kernel("ncclDevKernel_AllReduce", 900, 910, launched=500, stream=20, **message)
    found = profiled(chromes, tmp_path)
    assert len(found.collectives) == 2
    assert any("different numbers of collectives" in note for note in found.notes)
    chromes = run_of(ranks=2)
    for event in chromes[1].events:
        if "Collective name" in event["args"]:
            event["args"]["Collective name"] = "broadcast"
    found = profiled(chromes, tmp_path)
    assert found.collectives == ()
    assert any("not the same on all ranks" in note for note in found.notes)


def test_messages_between_two_ranks_are_left_out(tmp_path):
    chromes = run_of(ranks=2)
    message = {"Collective name": "send", "In msg nelems": 64, "dtype": "Float"}
    chromes[0].kernel("ncclDevKernel_SendRecv", 10, 30, launched=8, stream=21, **message)
    found = profiled(chromes, tmp_path)
    assert len(found.collectives) == 3
    assert any("1 sends and receives are not matched" in note for note in found.notes)


def test_groups_are_matched_by_their_ranks(tmp_path):
    chromes = run_of(ranks=4)
    for rank, chrome in enumerate(chromes):
        for event in chrome.events:
            if "Collective name" in event["args"]:
                event["args"]["Process Group Ranks"] = "[0, 1]" if rank < 2 else "[2, 3]"
    found = profiled(chromes, tmp_path)
    assert sorted({tuple(one.waits) for one in found.collectives}) == [(0, 1), (2, 3)]
    assert len(found.collectives) == 6


# What HolisticTraceAnalysis 0.6.1 prints for the same files (get_temporal_breakdown): idle, compute, other, all in µs.
HTA = [
    (6419, 1034, 5556, 13009), (6428, 1246, 11075, 18749), (7046, 1068, 3236, 11350), (8145, 1240, 9468, 18853),
    (8887, 1126, 6576, 16589), (9121, 1041, 6230, 16392), (7051, 1051, 3308, 11410), (8308, 1059, 1600, 10967),
]  # fmt: skip
corpus = pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")


@corpus
def test_device_time_equals_that_of_holistic_trace_analysis():
    traces = sorted(read_traces([CORPUS / "dlrm_8xV100.tar.gz"]), key=lambda trace: trace.rank)
    worst = 0
    for trace, wanted in zip(traces, HTA, strict=True):
        first, last = trace.device[0].start, max(event.end for event in trace.device)
        account = Books(trace).account(Step("device", first, last))
        earlier = [
            e
            for e in trace.device
            if e.launch is None and e.kind == "kernel" and not e.communicates
        ]
        compute = account.parts["compute"] + (
            account.parts.get("work from before the trace", 0) if earlier else 0
        )
        found = (account.idle, compute, account.total - account.idle - compute, account.total)
        worst = max(worst, *(abs(ns - us * 1000) for ns, us in zip(found, wanted, strict=True)))
    assert worst <= 1000  # ns


@corpus
def test_the_eight_ranks_wait_for_rank_seven():
    found = profile([CORPUS / "dlrm_8xV100.tar.gz"])
    waiting = sum(one.waiting for one in found.collectives)
    assert len(found.collectives) == 8
    assert waiting / (waiting + sum(one.moving for one in found.collectives)) > 0.95
    assert next(iter(found.waited_for)) == 7
    assert 0.70 < found.waited_for[7] / waiting < 0.80
    assert found.notes == ()


def named(documents, rank, number, cause, delay):
    """Whether the planted delay is named with its rank and cause; None if there is nothing to plant in."""
    planted = plant(documents, rank, number, cause, delay)
    if planted is None:
        return None
    one = profile_traces(list(traces_of(planted))).collectives[number]
    return one.last == rank and one.lateness.cause == CAUSES[cause]


@corpus
@pytest.mark.full
def test_some_planted_delays_in_a_recorded_run_are_named():
    documents = read_archive(CORPUS / "dlrm_8xV100.tar.gz")
    places = [(0, 1, "compute"), (3, 4, "data loader"), (6, 7, "sync"), (2, 6, "compute")]
    found = {place: named(documents, *place, 3000) for place in places}
    assert False not in found.values()
    assert True in found.values()


@pytest.mark.full
@corpus
def test_every_planted_delay_in_a_recorded_run_is_named():
    documents = read_archive(CORPUS / "dlrm_8xV100.tar.gz")
    found = [
        named(documents, rank, number, cause, 3000)
        for cause in CAUSES
        for number in range(1, 8)
        for rank in range(8)
    ]
    assert (found.count(True), found.count(False)) == (147, 0)
    short = [
        named(documents, rank, number, cause, 1000)
        for cause in CAUSES
        for number in (2, 4, 6)
        for rank in (0, 3, 6)
    ]
    assert (short.count(True), short.count(False)) == (21, 0)


def test_traces_of_two_runs_are_no_ranks_of_one(tmp_path):
    run_of(ranks=2)[0].write(tmp_path / "a.json")
    run_of(ranks=3)[1].write(tmp_path / "b.json")
    from isobit.errors import ArgumentError

    with pytest.raises(ArgumentError, match="runs on 2 and 3 ranks"):
        profile([tmp_path / "a.json", tmp_path / "b.json"])


def test_json_has_everything(tmp_path, capsys):
    from isobit.cli.main import main

    for rank, chrome in enumerate(run_of(delays=[(1, 1, "loader", 200)])):
        chrome.write(tmp_path / f"rank{rank}.json")
    main(["profile", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out)["profile"]
    assert record["causes"]["1"]["idle: data loader"] == 200_000
    assert record["collectives"][1]["lateness"]["rank"] == 1
