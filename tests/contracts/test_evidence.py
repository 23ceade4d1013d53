"""Evidence is whole or absent: it is only ever added, survives kill -9, merges by copying, and red wins."""

import json
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3

from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.store.evidence import Evidence, chain, merge_records
from tests.contracts.evidence_made import DIGEST, finding, read, record


def test_round_trip(tmp_path):
    # U+2028 and U+0085 are line ends to str.splitlines, and none to JSON; a lone surrogate has no UTF-8.
    odd = record("odd", detail="a\u2028b\x85c\nd\te \udcff")
    (tmp_path / "table.txt").write_text("5")
    held = (("table.txt", blake3(b"5").hexdigest()), ("table2.txt", "absent"))
    written = finding(record(), odd, record("proved", level=4), engine="bf16 amx", reached=held)
    evidence = Evidence(tmp_path / ".isobit")
    path = evidence.write(written)
    assert read(tmp_path / ".isobit") == ([written], {})
    assert evidence.has(DIGEST)
    assert not evidence.has("f" * 32)
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    assert path.name == f"{DIGEST}-{blake3(lines[-1]).hexdigest()[:32]}.jsonl"
    for before, line in pairwise(lines):
        assert json.loads(line)["previous"] == blake3(before).hexdigest()


def test_no_level_and_no_verdict_of_the_contract_is_stored(tmp_path):
    lines = [json.loads(line) for line in chain(finding(record(), record("proved", level=4)))]
    assert not {"level", "required", "verdict", "kept"} & lines[0].keys()
    assert not {"level", "required"} & (lines[1].keys() | lines[2].keys())


def test_nothing_at_all_is_no_evidence(tmp_path):
    assert read(tmp_path / "absent") == ([], {})


def test_nothing_is_ever_changed(tmp_path):
    evidence = Evidence(tmp_path)
    seen: dict[str, bytes] = {}
    for number in range(20):
        evidence.write(finding(record(level=1 + number % 3), date=f"2027-01-{number + 1:02d}"))
        now = {str(p): p.read_bytes() for p in evidence.folder.rglob("*") if p.is_file()}
        assert seen.items() <= now.items()
        assert len(now) == number + 1
        seen = now
    evidence.write(finding(record(level=1), date="2027-01-01"))  # the same again
    assert {str(p): p.read_bytes() for p in evidence.folder.rglob("*") if p.is_file()} == seen


def test_merge_is_copying(tmp_path):
    here, there = Evidence(tmp_path / "here"), Evidence(tmp_path / "there")
    shared = finding(date="2027-01-01")
    for evidence in (here, there):
        evidence.write(shared)
    here.write(finding(date="2027-01-02"))
    there.write(finding(date="2027-01-03"))
    shutil.copytree(there.folder, here.folder, dirs_exist_ok=True)
    dates = sorted(f.date for f in read(tmp_path / "here")[0])
    assert dates == ["2027-01-01", "2027-01-02", "2027-01-03"]


@pytest.mark.parametrize("red", ["broken", "void"])
def test_red_wins(red):
    late = finding(record(level=3), record("other", "could-not-run", 0), date="2027-02-02")
    early = finding(record(verdict=red, level=1), record("other", level=2), date="2027-01-01")
    for order in ((late, early), (early, late)):
        merged = {r.claim: r for r in merge_records(order)}
        assert merged["rows"].verdict == red
        assert (merged["other"].verdict, merged["other"].level) == ("kept", 2)
    higher = merge_records([finding(record(level=2), date="2027-03-03"), finding(record(level=3))])
    assert higher[0].level == 3


WRITER = """
import sys
from pathlib import Path
from isobit.contracts.store.evidence import Evidence, JudgedContract
from isobit.foundation.records import ClaimRecord
home, start = Path(sys.argv[1]), int(sys.argv[2])
evidence = Evidence(home)
for number in range(start, 200):
    records = tuple(ClaimRecord(f"claim-{n}", "holds", "kept", 2, 2, 1, 1, 1, detail="x" * 200) for n in range(40))
    path = evidence.write(JudgedContract("c", f"{number:032x}", "", 2, records))
    print(path, flush=True)
"""


def run_and_kill(home: Path, start: int, after: float) -> list[str]:
    """Files that the child acknowledged before it was killed."""
    arguments = [sys.executable, "-c", WRITER, str(home), str(start)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        first = child.stdout.readline()  # it is writing now
        assert first, "the child wrote nothing"
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
        after = (
            choose.uniform(0.0, 0.05)
            if kills < 4
            else 30.0
            if kills > 12
            else choose.uniform(0.05, 0.4)
        )
        acknowledged += run_and_kill(tmp_path, len(acknowledged), after)
        kills += 1
    assert kills > 4
    folder = Evidence(tmp_path).folder
    (folder / "00" / f".{0:032x}-leftover.jsonl.tmp").write_text('{"half": ')
    (folder / "00" / f".{0:032x}-{0:032x}.jsonl").write_text('{"half": ')
    evidence = Evidence(tmp_path)
    names = {name for found in evidence.names().values() for name in found}
    assert set(acknowledged) <= names
    claims = tuple(Claim(f"claim-{n}", ("O-1",), "holds", "L2", sabotage=("x",)) for n in range(40))
    contract = Contract("c", "1.0.0", "t", (), claims=claims)
    for number in range(200):
        found = evidence.read(f"{number:032x}", contract)
        assert found
        assert all(len(f.records) == 40 for f in found)
    assert evidence.refused == {}
