"""The reader takes what profilers write, exactly, and refuses what is damaged or made to harm, with a reason."""

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import time

import pytest

from isobit.cli.main import main
from isobit.errors import ArgumentError
from isobit.profiling import trace_files
from isobit.profiling.api import profile
from isobit.profiling.report import lines_of, write_profile_page
from isobit.profiling.trace import read_traces
from isobit.profiling.trace_files import JsonStream, nanoseconds
from tests.profiling.synthetic import CORPUS, Chrome, one_step

WHOLE = {
    "compute": 300_000,
    "exposed communication": 150_000,
    "exposed copies": 100_000,
    "idle: launched, not started": 10_000,
    "idle: data loader": 200_000,
    "idle: host waits for the device": 50_000,
    "idle: host in launch calls": 3_000,
    "idle: host between launches": 57_000,
    "idle: nothing recorded": 130_000,
}


def parts_of(path):
    return profile([path]).ranks[0].whole.parts


def test_a_step_is_accounted_for(tmp_path):
    (rank,) = profile([one_step().write(tmp_path / "t.json")]).ranks
    assert rank.whole.parts == WHOLE
    assert rank.whole.total == sum(WHOLE.values()) == 1_000_000
    assert rank.whole.hidden_communication == 50_000


def test_files_archives_and_folders_are_the_same_trace(tmp_path):
    text = one_step().text().encode()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rank0.json").write_bytes(text)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "two.json.gz").write_bytes(gzip.compress(text[:70]) + gzip.compress(text[70:]))
    (tmp_path / "list.json").write_text(json.dumps(json.loads(text)["traceEvents"]))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + text)
    for name, mode in (("t.tar", "w"), ("t.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            member = tarfile.TarInfo("in/rank0.json")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    for name in (
        "folder",
        "t.json.gz",
        "two.json.gz",
        "list.json",
        "bom.json",
        "t.tar",
        "t.tar.gz",
    ):
        assert parts_of(tmp_path / name) == WHOLE, name


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_pieces_of_any_size_are_one_document(size):
    text = one_step().text().encode()
    pieces = (text[i : i + size] for i in range(0, len(text), size))
    found = list(JsonStream(pieces, "t").entries())
    assert [value for key, value in found if not key] == json.loads(text)["traceEvents"]


def test_names_of_old_versions_are_read(tmp_path):
    """torch before 1.12: Kernel, Runtime, and Operator also for annotations."""
    names = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime"}
    names |= {"cpu_op": "Operator", "user_annotation": "Operator"}
    chrome = one_step()
    for event in chrome.events:
        event["cat"] = names[event["cat"]]
    assert parts_of(chrome.write(tmp_path / "old.json")) == WHOLE


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        (1712195495506161, 1712195495506161000),
        ("1712195495506161.2", 1712195495506161200),
        ("1428625731622.25", 1428625731622250),
        ("0.0004", 0),
        ("1.2345", 1234),
        ("1e3", 1_000_000),
        ("-3.5", -3500),
        ("1e400", None),
        ("1e999999999", None),
        ("9" * 50, None),
        (10**30, None),
        (None, None),
        (True, None),
        ([], None),
    ],
)
def test_times_are_exact_integers(written, ns):
    assert nanoseconds(written) == ns


def test_a_nanosecond_survives_a_date_of_today(tmp_path):
    """In float64 the spacing of 1.7e15 µs is 0.25 µs."""
    base = 1712195495506161
    chrome = Chrome()
    chrome.step(1, base, base + 10)
    text = chrome.kernel("k", base, base + 1)
    text["ts"], text["dur"] = "TS", 0.001
    path = tmp_path / "t.json"
    path.write_text(chrome.text().replace('"TS"', f"{base}.003"))
    assert parts_of(path)["compute"] == 1


BROKEN = {
    "empty": "",
    "not JSON": "hello",
    "a number": "3",
    "cut": '{"traceEvents": [{"ph": "X", "cat": "kernel"',
    "cut between events": '{"traceEvents": [{"ph": "X"},',
    "no end": '{"traceEvents": []',
    "deep": '{"traceEvents": [' + "[" * 200_000,
    "deep objects": '{"a": ' + '{"a": ' * 100_000,
    "long number": '{"a": ' + "1" * 10_000 + "}",
    "no comma": '{"traceEvents": [{} {}]}',
    "comma at the end": '{"traceEvents": [{},]}',
    "more after the end": '{"traceEvents": []} x',
    "numbers for events": '{"traceEvents": [1, 2]}',
    "key that is no text": '{1: 2, "traceEvents": []}',
    "no events": '{"schemaVersion": 1}',
    "no work": '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "a", "ts": 1, "dur": 2}]}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_files_are_refused_with_a_reason(name, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(BROKEN[name])
    assert main(["profile", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "expected bad.json: " in shown.err
    assert "remedy: " in shown.err


@pytest.mark.parametrize("dur", ["NaN", "Infinity", "-1", '"x"', "null", "[]", "1e999"])
def test_times_that_are_none_refuse_a_kernel_and_leave_out_a_host_slice(dur, tmp_path):
    text = one_step().text()
    kernel = text.replace('"ts": 300, "dur": 300', f'"ts": 300, "dur": {dur}')
    assert kernel != text
    (tmp_path / "kernel.json").write_text(kernel)
    with pytest.raises(ArgumentError, match="finite and not negative"):
        profile([tmp_path / "kernel.json"])
    host = text.replace('"ts": 230, "dur": 70', f'"ts": 230, "dur": {dur}')
    assert host != text
    (tmp_path / "host.json").write_text(host)
    (rank,) = profile([tmp_path / "host.json"]).ranks
    assert rank.notes == ("1 host events are left out: times that are not finite or negative",)
    assert sum(rank.whole.parts.values()) == 1_000_000


def test_nan_in_arguments_bad_bytes_and_missing_threads_are_read(tmp_path):
    text = (
        one_step().text().replace('"bytes": 1000', '"bytes": NaN').replace("sgemm", "sg\udcffemm")
    )
    text = text.replace('"pid": 1, ', "").replace('"tid": 1, ', "")
    (tmp_path / "t.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert parts_of(tmp_path / "t.json") == WHOLE


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "SMALL", 1 << 20)
    bomb = b'{"traceEvents": [' + b" " * (20 << 20) + b"]}"
    for name, data in (("b.json.gz", gzip.compress(bomb)), ("c.json.gz", gzip.compress(bomb)[:-9])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ArgumentError, match="expands"):
            profile([tmp_path / name])
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(one_step().text().encode())[:-20])
    with pytest.raises(ArgumentError, match=r"ends early|end of the file"):
        profile([tmp_path / "cut.json.gz"])
    (tmp_path / "no.json.gz").write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(ArgumentError, match="gzip"):
        profile([tmp_path / "no.json.gz"])
    monkeypatch.setattr(trace_files, "LARGEST_VALUE", 1 << 16)
    (tmp_path / "long.json").write_text('{"traceEvents": [{"name": "' + "a" * (4 << 20))
    with pytest.raises(ArgumentError, match="JSON"):
        profile([tmp_path / "long.json"])


def test_pipes_folders_and_links_are_no_traces(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "empty").mkdir()
    for name in ("pipe.json", "empty", "absent.json"):
        assert main(["profile", str(tmp_path / name)]) == 2, name
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        member = tarfile.TarInfo("a.json")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    assert main(["profile", str(tmp_path / "links.tar")]) == 2
    assert "an archive with traces" in capsys.readouterr().err


def test_crossing_and_nested_slices_cost_linear_time(tmp_path):
    """Every pair of them crosses, or all are nested: n² would be 4 * 10^8 steps."""
    chrome = Chrome()
    for i in range(20_000):
        chrome.operator("a", i, 200_000 + i, tid=1)
        chrome.operator("b", i, 200_000 - i, tid=2)
        chrome.events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{2 * i}",
                "ts": i,
                "dur": 1,
            }
        )
    chrome.write(tmp_path / "t.json")
    begin = time.process_time()
    assert len(profile([tmp_path / "t.json"]).ranks[0].steps) == 20_000
    assert time.process_time() - begin < 20  # n² takes minutes


VALUES = [
    None,
    True,
    "",
    "a",
    "NaN",
    -1,
    0,
    1,
    2**70,
    10**400,
    1.5,
    -0.5,
    1e300,
    [],
    [[]],
    [1, [2]],
    {},
    {"a": 1},
    "[0, 1]",
    "\udc80\x1b[2J",
]


def mutated(draw, chromes):
    """Replace some fields of some events, and of headers, by values of other kinds."""
    for chrome in chromes:
        for _ in range(draw.randint(0, 4)):
            event = draw.choice(chrome.events)
            target = draw.choice(
                [event, event["args"] if isinstance(event.get("args"), dict) else event]
            )
            fields = [
                *target,
                "Input Dims",
                "Input type",
                "Process Group Ranks",
                "correlation",
                "Concrete Inputs",
            ]
            target[draw.choice(fields)] = draw.choice(VALUES)
        if draw.random() < 0.3:
            name = draw.choice(["distributedInfo", "deviceProperties", "baseTimeNanoseconds"])
            chrome.header[name] = draw.choice(
                [*VALUES, {"rank": draw.choice(VALUES), "world_size": draw.choice(VALUES)}]
            )
    return chromes


@pytest.mark.parametrize("seed", range(4))
def test_no_field_of_another_kind_is_an_error_of_ours(seed, tmp_path):
    """A trace is profiled, or refused as no trace: nothing else is raised."""
    from tests.profiling.test_ranks import run_of

    draw = random.Random(seed)
    profiled = 0
    for number in range(60):
        chromes = mutated(draw, [one_step()] if number % 2 else run_of(ranks=2, steps=2))
        for rank, chrome in enumerate(chromes):
            chrome.write(tmp_path / f"rank{rank}.json")
        paths = [tmp_path / f"rank{rank}.json" for rank in range(len(chromes))]
        try:
            found = profile(paths)
        except ArgumentError:
            continue
        profiled += 1
        assert list(lines_of(found))
        assert write_profile_page(found)
    assert profiled > 20


def test_two_traces_of_one_rank_are_refused(tmp_path):
    for name in ("a.json", "b.json"):
        one_step().write(tmp_path / name)
    with pytest.raises(ArgumentError, match="2 traces of rank 0"):
        profile([tmp_path / "a.json", tmp_path / "b.json"])
    Chrome(rank=1, world=2).write(tmp_path / "c.json")


def test_the_rank_is_in_the_trace_or_in_the_name(tmp_path):
    (found,) = read_traces([one_step().write(tmp_path / "worker3_step.json")])
    assert found.rank == 3
    chrome = one_step()
    chrome.header["distributedInfo"] = {"rank": 1, "world_size": 4}
    (found,) = read_traces([chrome.write(tmp_path / "rank7.json")])
    assert (found.rank, found.world) == (1, 4)


def test_a_trace_is_read_without_torch(tmp_path):
    one_step().write(tmp_path / "t.json")
    code = (
        "import sys; from isobit.cli.main import main; "
        f"assert main(['profile', {str(tmp_path / 't.json')!r}, '--json']) in (0, 1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


SMALL = 500_000  # bytes: 14 traces of 7 files, in seconds


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
@pytest.mark.parametrize("largest", [SMALL, pytest.param(10**9, marks=pytest.mark.full)])
def test_public_traces_are_read_and_add_up(largest):
    """25 traces: V100, A100, H100, B200, MI250, MI300X; torch 1.8 to 2.8. Account raises if parts do not add up."""
    files = [file for file in sorted(CORPUS.glob("*.gz")) if file.stat().st_size < largest]
    found = [rank for file in files for rank in profile([file]).ranks]
    assert (len(files), len(found)) == ((7, 14) if largest == SMALL else (18, 25))
    assert all(rank.whole.total > 0 and rank.digest for rank in found)
