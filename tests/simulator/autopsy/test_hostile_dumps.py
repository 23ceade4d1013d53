"""Files from strangers: nothing in them runs, and every one that is no dump is refused by name."""

import json
import os
import pickle
import random
import time

import pytest

from isobit.cli.main import main
from isobit.errors import ArgumentError
from isobit.simulator.autopsy.closed_pickle import read_pickle
from isobit.simulator.autopsy.dumps import read_dump
from isobit.simulator.autopsy.examine import LARGEST, examine
from tests.simulator.autopsy.written_dumps import PAIR, call, write


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_is_refused_by_name(protocol, tmp_path):
    proof = tmp_path / "ran"
    data = pickle.dumps({"version": "2.10", "entries": [Evil(str(proof))]}, protocol)
    with pytest.raises(ArgumentError) as found:
        read_pickle(data)
    assert not proof.exists()
    if protocol:
        assert "GLOBAL" in found.value.received
        assert "open" in found.value.received
    pickle.loads(data)["entries"][0].close()
    assert proof.exists()  # the same bytes do run in Python's own unpickler


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, bytearray(2), 1 + 2j, {(1, 2): 3}, {1: 2}])
def test_other_types_are_refused(value):
    with pytest.raises(ArgumentError):
        read_pickle(pickle.dumps({"a": value}, 2))


def test_plain_data_is_read_as_python_does():
    value = {
        "a": [
            1,
            -2,
            2**40,
            2**70,
            1.5,
            None,
            True,
            "é" * 300,
            (),
            (1,),
            (1, 2),
            (1, 2, 3),
            (1,) * 5,
        ]
    }
    for protocol in (2, 3, 4, 5):
        assert read_pickle(pickle.dumps(value, protocol)) == value


def test_bombs_end_quickly():
    begun = time.process_time()
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    shared = (
        b"\x80\x02]q\x00" + b"(h\x00h\x00tq\x00" * 60 + b"."
    )  # 2**60 leaves, if they were counted
    for data in (deep, shared):
        with pytest.raises(ArgumentError):
            read_dump(data, 0)
    for data in (
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of 2**31 places
        b"\x80\x02X\xff\xff\xff\x7fa.",  # a string of 2 GB
        b"\x80\x02}" + b"(h\x00h\x00t" * 3 + b"Ns.",
        b"\x80\x02(" * 10 + b"u.",
        b"[" * 200_000,
    ):
        with pytest.raises(ArgumentError):
            read_dump(data, 0)
    assert time.process_time() - begun < 2.0


def test_every_truncation_and_many_corruptions_are_refused_or_read():
    raw = {"version": "2.10", "pg_config": PAIR, "entries": [call(0, "all_reduce", 1)]}
    data = pickle.dumps(raw, 2)
    for length in range(len(data)):
        with pytest.raises(ArgumentError):
            read_dump(data[:length] or b"\x80", 0)
    drawn, refused = random.Random(0), 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(drawn.randint(1, 4)):
            changed[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            read_dump(bytes(changed), 0)
        except ArgumentError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": "1.5"},
        {"entries": {}},
        {"entries": [[]]},
        {"pg_config": []},
        {"pg_config": {"0": {"ranks": "[0, __import__('os')]"}}},
        {"pg_config": {"0": {"ranks": "[99999999]"}}},
        {"pg_config": {"0": {"ranks": [-1]}}},
        {"entries": [call(0, "all_reduce", 1, state="asleep")]},
        {"entries": [call(0, "all_reduce", 1, record_id="0")]},
        {"entries": [call(0, "all_reduce", True)]},
        {"entries": [call(0, "all_reduce", 1, input_sizes=[4])]},
        {"entries": [call(0, "all_reduce", 1, process_group="0")]},
        {"entries": [call(0, "all_reduce", 1, frames=[{"line": "x"}])]},
        {"entries": [call(0, "all_reduce", 1, profiling_name=None)]},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("text", [False, True])
def test_wrong_types_are_refused(change, text):
    raw = {"version": "2.10", "pg_config": PAIR, "entries": []}
    data = json.dumps(raw | change).encode() if text else pickle.dumps(raw | change, 2)
    read_dump(json.dumps(raw).encode() if text else pickle.dumps(raw, 2), 0)
    with pytest.raises(ArgumentError):
        read_dump(data, 0)


def test_devices_pipes_links_and_large_files(tmp_path):
    write(tmp_path, {0: [call(0, "all_reduce", 1, "started")]})
    os.symlink("/dev/zero", tmp_path / "trace_1")
    os.mkfifo(tmp_path / "trace_2")
    os.symlink(tmp_path, tmp_path / "loop")
    with open(tmp_path / "trace_3", "wb") as file:
        file.write(b"\x80\x02")
        file.truncate(LARGEST + 1)
    os.symlink(tmp_path / "gone", tmp_path / "trace_4")
    autopsy = examine(tmp_path)
    assert sorted(autopsy.evidence.broken) == [1, 2, 3, 4]
    assert autopsy.finding.ranks == (1,)


def test_text_of_a_dump_cannot_control_the_terminal(tmp_path, capsys):
    frames = [{"name": "f\x1b]0;owned\x07\n\x1b[31m", "filename": "a\nb", "line": 1}]
    entry = call(0, "all_reduce\x1b[2J\nrank 5: forged", 1, "started", frames=frames)
    entry["process_group"] = ("0\x1b[1m", "default_pg")
    write(tmp_path, {0: [entry], 1: []}, {"0\x1b[1m": {"ranks": "[0, 1]"}})
    assert main(["autopsy", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert not any(l.strip() == "rank 5: forged" for l in printed.splitlines())


def test_exit_codes_and_json(tmp_path, capsys):
    done, going = [call(0, "all_reduce", 1)], [call(0, "all_reduce", 1, "started")]
    assert main(["autopsy", str(write(tmp_path / "right", {0: done, 1: done}))]) == 0
    assert "show no hang" in capsys.readouterr().out
    assert main(["autopsy", str(write(tmp_path / "hung", {0: going, 1: []})), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["finding"]["ranks"] == [1]
    assert found["dumps"]["0"]["calls"] == 1
    assert found["calls_in_progress"][0]["missing"] == [1]
    (tmp_path / "empty").mkdir()
    assert main(["autopsy", str(tmp_path / "empty")]) == 2
    (tmp_path / "empty" / "trace_0").write_bytes(b"\x80\x02cposix\nsystem\n.")
    assert main(["autopsy", str(tmp_path / "empty")]) == 2
    assert "GLOBAL posix.system" in capsys.readouterr().err
