"""Evidence is whole or absent: it is only ever added, survives kill -9, merges by copying, and red wins."""

import json
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from isobit.contracts.evidence import Evidence, Finding, merge_records
from isobit.records import ClaimRecord, Planted, Proof

DIGEST = "0123456789abcdef" * 2


def record(claim: str = "rows", verdict: str = "kept", level: int = 3, detail: str = "") -> ClaimRecord:
    planted = (Planted("one ulp off", True, "1 of 2 differ"),)
    return ClaimRecord(claim, "invariant", verdict, level, 3, 7, 10_000, 5, 0, detail, "", planted, None, 0.25)


def finding(*records: ClaimRecord, digest: str = DIGEST, verdict: str = "kept", date: str = "2027-01-01") -> Finding:
    return Finding("softmax-kernel-v1", digest, "", 3, 3, verdict, records or (record(),), date, "x86_64 linux avx2")


def test_round_trip(tmp_path):
    # U+2028 and U+0085 are line ends to str.splitlines, and none to JSON.
    odd = record("odd", detail="a\u2028b\x85c\nd\te 🙂")
    proved = ClaimRecord("proved", "algebra", "kept", 4, 4, proof=Proof("z3", "all integers", 3))
    written = finding(record(), odd, proved)
    evidence = Evidence(tmp_path)
    path = evidence.write(written)
    assert Evidence(tmp_path).read(DIGEST) == [written]
    assert evidence.has(DIGEST)
    assert not evidence.has("f" * 32)
    (header,) = evidence.headers(DIGEST)
    assert (header["verdict"], header["level"], header["asked"], header["records"]) == ("kept", 3, 3, 3)
    assert path.name == f"{DIGEST}-{blake3(path.read_bytes()).hexdigest()[:32]}.jsonl"
    assert evidence.corrupt == []


def test_nothing_at_all_is_no_evidence(tmp_path):
    evidence = Evidence(tmp_path / "absent")
    assert (evidence.read(DIGEST), evidence.headers(DIGEST), evidence.names()) == ([], [], {})


def spoil(data: bytes, how: str) -> bytes:
    header = json.loads(data.partition(b"\n")[0])
    changed = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "record missing": data.partition(b"\n")[0] + b"\n",
        "one bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "verdict changed": data.replace(b'"broken"', b'"kept"'),
        "not JSON": b"\xff\xfe",
        "other digest": data.replace(header["digest"].encode(), b"f" * 32),
        "a list": b"[]\n",
        "a number": b"5\n",
    }
    return changed[how]


SPOILT = (
    "empty",
    "cut",
    "record missing",
    "one bit",
    "verdict changed",
    "not JSON",
    "other digest",
    "a list",
    "a number",
)


@pytest.mark.parametrize("what", ["read", "headers"])
@pytest.mark.parametrize("how", SPOILT)
def test_corrupt_files_are_set_aside_and_named(tmp_path, how, what):
    evidence = Evidence(tmp_path)
    evidence.write(finding())
    bad = evidence.write(finding(record(verdict="broken"), verdict="broken"))
    bad.write_bytes(spoil(bad.read_bytes(), how))
    again = Evidence(tmp_path)
    for _ in range(2):
        assert len(getattr(again, what)(DIGEST)) == 1
        assert again.corrupt == [str(bad)]  # named once


@pytest.mark.parametrize("how", ["empty", "cut", "record missing", "not JSON", "other digest", "a list", "a number"])
def test_files_that_say_nothing_whole_are_set_aside_whatever_their_name(tmp_path, how):
    evidence = Evidence(tmp_path)
    bad = evidence.write(finding(record(verdict="broken"), verdict="broken"))
    data = spoil(bad.read_bytes(), how)
    bad.unlink()
    bad = bad.with_name(f"{DIGEST}-{blake3(data).hexdigest()[:32]}.jsonl")
    bad.write_bytes(data)
    again = Evidence(tmp_path)
    assert again.read(DIGEST) == []
    assert again.corrupt == [str(bad)]


def test_nothing_is_ever_changed(tmp_path):
    evidence = Evidence(tmp_path)
    seen: dict[str, bytes] = {}
    for number in range(20):
        evidence.write(finding(record(level=number % 4), date=f"2027-01-{number + 1:02d}"))
        now = {str(p): p.read_bytes() for p in evidence.folder.rglob("*") if p.is_file()}
        assert seen.items() <= now.items()
        assert len(now) == number + 1
        seen = now
    evidence.write(finding(record(level=0), date="2027-01-01"))  # the same again
    assert {str(p): p.read_bytes() for p in evidence.folder.rglob("*") if p.is_file()} == seen


def test_merge_is_copying(tmp_path):
    here, there = Evidence(tmp_path / "here"), Evidence(tmp_path / "there")
    shared = finding(date="2027-01-01")
    for evidence in (here, there):
        evidence.write(shared)
    here.write(finding(date="2027-01-02"))
    there.write(finding(date="2027-01-03"))
    shutil.copytree(there.folder, here.folder, dirs_exist_ok=True)
    dates = sorted(f.date for f in Evidence(tmp_path / "here").read(DIGEST))
    assert dates == ["2027-01-01", "2027-01-02", "2027-01-03"]


@pytest.mark.parametrize("red", ["broken", "void"])
def test_red_wins(red):
    late = finding(record(level=4), record("other", "could-not-run", 0), date="2027-02-02")
    early = finding(record(verdict=red, level=1), record("other", level=2), date="2027-01-01")
    for order in ((late, early), (early, late)):
        merged = {r.claim: r for r in merge_records(order)}
        assert merged["rows"].verdict == red
        assert (merged["other"].verdict, merged["other"].level) == ("kept", 2)
    higher = merge_records([finding(record(level=2), date="2027-03-03"), finding(record(level=4))])
    assert higher[0].level == 4


WRITER = """
import sys
from pathlib import Path
from isobit.contracts.evidence import Evidence, Finding
from isobit.records import ClaimRecord
home, start = Path(sys.argv[1]), int(sys.argv[2])
evidence = Evidence(home)
for number in range(start, 200):
    records = tuple(ClaimRecord(f"claim-{n}", "holds", "kept", 2, 2, detail="x" * 200) for n in range(40))
    path = evidence.write(Finding("c", f"{number:032x}", "", 2, 2, "kept", records))
    print(path, flush=True)
"""


def run_and_kill(home: Path, start: int, after: float) -> list[str]:
    """Files that the child acknowledged before it was killed."""
    arguments = [sys.executable, "-c", WRITER, str(home), str(start)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        first = child.stdout.readline()  # it is writing now
        with suppress(subprocess.TimeoutExpired):
            child.wait(after)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    # A line cut short by the kill was not acknowledged.
    return [line for line in (first + rest).split("\n")[:-1] if line]


def test_kill_minus_nine_leaves_no_half_file(tmp_path):
    choose = random.Random(9)
    acknowledged: list[str] = []
    kills = 0
    while len(acknowledged) < 200:
        # The last ones may run to their end; at least four are killed within their work.
        after = choose.uniform(0.0, 0.05) if kills < 4 else 30.0 if kills > 12 else choose.uniform(0.05, 0.4)
        acknowledged += run_and_kill(tmp_path, len(acknowledged), after)
        kills += 1
    assert kills > 4
    folder = Evidence(tmp_path).folder
    (folder / "00" / f".{0:032x}-leftover.jsonl.tmp").write_text('{"half": ')
    (folder / "00" / f".{0:032x}-{0:032x}.jsonl").write_text('{"half": ')
    evidence = Evidence(tmp_path)
    names = {name for found in evidence.names().values() for name in found}
    assert set(acknowledged) <= names
    for name in names:
        assert blake3(Path(name).read_bytes()).hexdigest()[:32] == Path(name).stem.partition("-")[2]
    for number in range(200):
        found = evidence.read(f"{number:032x}")
        assert found
        assert all(len(f.records) == 40 for f in found)
    assert evidence.corrupt == []
