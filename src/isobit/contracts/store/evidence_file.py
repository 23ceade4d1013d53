"""Write and read one evidence file: lines of JSON, each with the digest of the line before.

[Note: Evidence files]
The first line describes the judging: contract, digest, subject, level, date, machine, engine, the version of the
order of addition, and the files that the code opened. Each further line is the record of one claim, with the BLAKE3
of the line before under `previous`.
The file is named `DIGEST-LAST.jsonl`, where LAST is the digest of its last line: a line that is changed, moved, added
or removed breaks the chain or the name. No line states a level: `ladder.earned_level` computes it from counts, planted
subjects and proofs. Anyone who can write to the folder can still write a chain; a signature of LAST (signing.py) shows
who judged.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blake3 import blake3

from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.language.sabotage_names import planted_names
from isobit.contracts.store import ladder, opened_files
from isobit.contracts.store.sources import machine
from isobit.foundation.records import ClaimRecord, Planted, Proof
from isobit.order.plan import VERSION

FORM = 3
UNORDERED_FORM = 2  # without the version of the order, which was 1
LARGEST = 64 << 20  # bytes of a file; a larger one is not evidence that we wrote
COUNTS = ("at", "cases", "inputs", "drawn", "compared", "differing")
TEXTS = ("claim", "relation", "verdict", "detail", "replay")
DERIVED = ("level", "required", "if_fails")  # from the rest or from the contract, so never stored
LINE = frozenset({*COUNTS, *TEXTS, "planted", "proof", "seconds", "previous"})
ABOUT = ("contract", "digest", "subject", "date", "machine", "engine")


@dataclass(frozen=True)
class Finding:
    """One judging of one contract: what was judged, where, and a record per claim."""

    contract: str
    digest: str
    subject: str
    asked: int  # the level to judge up to
    records: tuple[ClaimRecord, ...]
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )
    machine: str = field(default_factory=machine)
    engine: str = ""  # the engine that ran, as the judging process found it
    reached: tuple[
        tuple[str, str], ...
    ] = ()  # path and digest of files that the contract's digest does not cover

    @property
    def ran(self) -> bool:
        """Whether every claim could run."""
        return all(record.verdict != "could-not-run" for record in self.records)


class NotEvidence(ValueError):
    """The reason why a file does not count."""


def digest_in(name: str) -> str:
    """Return the digest in the name of a file."""
    return os.path.basename(name).partition("-")[0]


def chain(finding: Finding) -> list[bytes]:
    """Return the lines of a file, each record with the digest of the line before."""
    about = {
        name: value for name, value in vars(finding).items() if name not in ("records", "reached")
    }
    lines = [
        encode(
            {
                "form": FORM,
                "order": VERSION,
                **about,
                "reached": dict(finding.reached),
                "count": len(finding.records),
            }
        )
    ]
    for record in finding.records:
        plain = {name: value for name, value in asdict(record).items() if name not in DERIVED}
        lines.append(encode({"previous": blake3(lines[-1]).hexdigest(), **plain}))
    return lines


def encode(line: dict[str, Any]) -> bytes:
    """Encode a line in ASCII: no character ends a line, and lone surrogates survive."""
    return json.dumps(line).encode("ascii")


def read_plain(name: str, largest: int) -> bytes:
    """Read a regular file of limited size, not through a link; never blocks."""
    handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise NotEvidence("it is not a regular file")
        if found.st_size > largest:
            raise NotEvidence("it is too large")
        return file.read(found.st_size) or b""


def read_chain(name: str) -> list[bytes]:
    """Read the lines of a file, and check the last against the name."""
    data = read_plain(name, LARGEST)
    lines = data.removesuffix(b"\n").split(b"\n")
    if blake3(lines[-1]).hexdigest()[:32] != name[-38:-6]:
        older = is_older(data, name)
        raise NotEvidence(
            "it is of an older form"
            if older
            else "the digest of its last line differs from its name"
        )
    return lines


def is_older(data: bytes, name: str) -> bool:
    """Return whether a file has form 1: its name had the digest of the whole file."""
    return (
        blake3(data).hexdigest()[:32] == name[-38:-6] and b'"form"' not in data.partition(b"\n")[0]
    )


def check_form(header: dict[str, Any]) -> None:
    """Remove form and version of the order from a first line; raise NotEvidence unless both are this version's."""
    form = header.pop("form", None)
    if form not in (FORM, UNORDERED_FORM):
        raise NotEvidence("it is of another form than this version reads")
    order = 1 if form == UNORDERED_FORM else header.pop("order", None)
    if type(order) is not int or order != VERSION:
        raise NotEvidence(
            f"it was judged under version {order!r} of the order of addition, and this is version {VERSION}: "
            "judge again with isobit verify"
        )


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON; raise NotEvidence if a name occurs twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotEvidence("a name occurs twice in one of its lines")
    return found


def finding_from(lines: Sequence[bytes], digest: str, contract: Contract) -> Finding:
    """Build a finding from the lines of a file: check types, chain and claims, and compute levels."""
    header, *found = json.loads(b"[%b]" % b",".join(lines), object_pairs_hook=unique_names)
    check_form(header)
    if header["digest"] != digest or header["contract"] != contract.id:
        raise NotEvidence("it is about another contract")
    asked, reached, count = header.pop("asked"), header.pop("reached"), header.pop("count")
    if (
        type(asked) is not int
        or set(header) != set(ABOUT)
        or not all(type(v) is str for v in header.values())
    ):
        raise NotEvidence("its first line has other types")
    if len(reached) > opened_files.MANY:
        raise NotEvidence("it names too many files")
    if not all(type(v) is str for v in reached.values()):
        raise NotEvidence("its first line has other types")
    if not found or not count == len(found) == len(lines) - 1:
        raise NotEvidence("it has fewer or more records than were written")
    claims = {claim.id: (claim, frozenset(planted_names(claim))) for claim in contract.claims}
    records = []
    for before, line in zip(lines, found, strict=False):
        if line["previous"] != blake3(before).hexdigest():
            raise NotEvidence("its chain is broken")
        about = claims.pop(line["claim"], None)
        if about is None:
            raise NotEvidence("it records a claim that the contract does not have, or one twice")
        records.append(record_from(line, *about))
    return Finding(
        asked=asked, reached=tuple(sorted(reached.items())), records=tuple(records), **header
    )


def record_from(line: dict[str, Any], claim: Claim, expected: frozenset[str]) -> ClaimRecord:
    """Build the record of a claim, with the level that it earns."""
    if line.keys() != LINE:
        raise NotEvidence("a record has other fields")
    for name in COUNTS:
        if type(line[name]) is not int or not 0 <= line[name] < 2**63:
            raise NotEvidence("a record has invalid counts")
    for name in TEXTS:
        if type(line[name]) is not str:
            raise NotEvidence("a record has other types")
    if line["verdict"] not in ladder.JUDGED:
        raise NotEvidence("a record has an unknown verdict")
    if type(line["seconds"]) not in (int, float) or not math.isfinite(line["seconds"]):
        raise NotEvidence("a record has no duration")
    del line["previous"]
    line["planted"] = tuple([planted_from(p) for p in line["planted"]])
    line["proof"] = proof_from(line["proof"]) if line["proof"] else None
    try:
        level = ladder.earned_level(claim, expected, line)
    except ValueError as error:
        raise NotEvidence(f"the record of {claim.id} contradicts itself: {error}") from None
    return ClaimRecord(level=level, required=ladder.level_number(claim.level), **line)


def planted_from(found: dict[str, Any]) -> Planted:
    """Build a `Planted` record."""
    planted = Planted(**found)
    if (
        type(planted.caught) is not bool
        or type(planted.name) is not str
        or type(planted.detail) is not str
    ):
        raise NotEvidence("a record has other types")
    return planted


def proof_from(found: dict[str, Any]) -> Proof:
    """Build a `Proof` record."""
    proof = Proof(**found)
    if type(proof.cases) is not int or not all(
        type(t) is str for t in (proof.engine, proof.covers, proof.failure)
    ):
        raise NotEvidence("a record has other types")
    return proof
