"""Ten thousand contracts, or a million records, are read in seconds."""

import statistics
import subprocess
import sys

import pytest

from isobit.contracts.store.evidence import Evidence, JudgedContract
from isobit.contracts.workspace import Workspace
from tests.contracts.written_contracts import record_of, write

COUNT = 10_000
TIMED = """
import sys, time
from pathlib import Path
started = time.process_time()
from isobit.contracts.options import Options
from isobit.contracts.workspace import Workspace
workspace = Workspace([Path(sys.argv[1])])
entries = workspace.choose([])
assert len(entries) == int(sys.argv[3]), len(entries)
if sys.argv[2] == "stale":
    found = workspace.stale(entries, Options(level=2))
else:
    found = [e for e in entries if workspace.status(e).verdict != "kept"]
assert workspace.evidence.refused == {}
print(len(found), time.process_time() - started)
"""


def timed(folder, what: str) -> tuple[int, float]:
    """In a fresh process, imports included: how many are not settled, and the seconds of its core."""
    arguments = [sys.executable, "-c", TIMED, str(folder), what, str(COUNT)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    return int(found[0]), float(found[1])


def grow(folder, claims=("c",)) -> Workspace:
    """Half of them are one chain, the others a binary tree."""
    for n in range(COUNT):
        below = (
            ()
            if n in (0, COUNT // 2)
            else (f"c{n - 1}",)
            if n < COUNT // 2
            else (f"c{(n + COUNT // 2 - 1) // 2}",)
        )
        write(
            folder / f"{n % 100:02d}",
            f"c{n}",
            depends_on=below,
            title=f"contract {n}",
            claims=claims,
        )
    return Workspace([folder])


@pytest.mark.full
def test_ten_thousand_contracts(tmp_path, capsys):
    workspace = grow(tmp_path)
    plain = Evidence(tmp_path / ".isobit")
    for entry in workspace.choose([]):
        quickly(
            plain, JudgedContract(entry.id, workspace.tree.digest(entry.id), "", 2, (record_of(),))
        )
    runs = [timed(tmp_path, "stale") for _ in range(4)]
    assert {count for count, _ in runs} == {0}
    seconds = statistics.median(second for _, second in runs[1:])
    with capsys.disabled():
        print(f"\n{COUNT:,} contracts: stale in {seconds:.2f} s (first {runs[0][1]:.2f} s)")
    assert seconds < 6.0
    write(tmp_path / "00", "c0", title="other")
    assert timed(tmp_path, "stale")[0] == COUNT // 2


@pytest.mark.full
def test_a_million_records(tmp_path, capsys):
    claims = tuple(f"claim-{n}" for n in range(25))
    workspace = grow(tmp_path, claims)
    records = tuple(record_of(detail="x" * 40, claim=claim) for claim in claims)
    plain = Evidence(tmp_path / ".isobit")
    for entry in workspace.choose([]):
        for day in range(4):
            quickly(
                plain,
                JudgedContract(
                    entry.id, workspace.tree.digest(entry.id), "", 2, records, f"2027-01-{day}"
                ),
            )
    runs = [timed(tmp_path, "status") for _ in range(3)]
    assert {count for count, _ in runs} == {0}
    seconds = statistics.median(second for _, second in runs)
    with capsys.disabled():
        print(f"\n1,000,000 records: status of {COUNT:,} contracts in {seconds:.2f} s")
    assert (
        seconds < 60.0
    )  # every record is read, hashed and checked: levels are never taken from a header


def quickly(evidence: Evidence, finding: JudgedContract) -> None:
    """As Evidence.write, without waiting for the disk: these need not survive anything."""
    from isobit.foundation import files

    keep = files.write_text
    files.write_text = lambda path, text: path.write_text(text) and None
    try:
        evidence.write(finding)
    finally:
        files.write_text = keep
