"""Evidence: append-only files of records chained by digest, named by what they are about; merged by copying.

[Note: the form of a file]
A file is lines of JSON. The first describes the judging: contract, digest, subject, how far it was to go, date,
machine, engine, and the files that the code reached. Each further line is the record of one claim, and holds under
`previous` the BLAKE3 of the line before. The file is named `DIGEST-LAST.jsonl`, LAST being the digest of its last line:
a line that is changed, moved, added or cut off breaks the chain or the name. No line states a level, or where the
contract stands: `ladder.earned_level` derives that from counts, planted subjects and proofs. Whoever can write to the
folder can still write a chain; a signature of LAST (signing.py) shows who judged.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from isobit import files
from isobit.contracts.judge import reach
from isobit.contracts.judge.sabotage_names import planted_names
from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.store import ladder, signing
from isobit.contracts.store.sources import machine
from isobit.records import ClaimRecord, Planted, Proof

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FOLDER = "evidence"
FORM = 2
NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.jsonl")
LARGEST = 64 << 20  # bytes of a file; a larger one is not evidence that we wrote
COUNTS = ("at", "cases", "inputs", "drawn", "compared", "differing")
TEXTS = ("claim", "relation", "verdict", "detail", "replay")
DERIVED = ("level", "required")  # computed from the rest, so never stored
LINE = frozenset({*COUNTS, *TEXTS, "planted", "proof", "seconds", "previous"})
ABOUT = ("contract", "digest", "subject", "date", "machine", "engine")


@dataclass(frozen=True)
class Finding:
    """One judging of one contract: what was judged, where, and a record per claim."""

    contract: str
    digest: str
    subject: str
    asked: int  # the level that it was to go to
    records: tuple[ClaimRecord, ...]
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )
    machine: str = field(default_factory=machine)
    engine: str = ""  # that really ran, as the judging process found it
    reached: tuple[
        tuple[str, str], ...
    ] = ()  # path and digest of files beyond the contract's digest

    @property
    def ran(self) -> bool:
        """No claim could not run."""
        return all(record.verdict != "could-not-run" for record in self.records)


class NotEvidence(ValueError):
    """Why a file does not count."""


class Evidence:
    """The files below one folder. With `keys`, only files that one of them signed count; `signer` signs new files."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER
        self.base = home.parent
        self.keys: tuple[Ed25519PublicKey, ...] = ()
        self.signer: Ed25519PrivateKey | None = None
        self.refused: dict[str, str] = {}  # file -> why it does not count
        self._names: dict[str, list[str]] | None = None
        self._hashes: dict[str, str] = {}

    def write(self, finding: Finding) -> Path:
        """One file, whole or not at all; nothing that exists is ever changed."""
        digest, lines = finding.digest, chain(finding)
        folder = self.folder / digest[:2]
        folder.mkdir(parents=True, exist_ok=True)
        last = blake3(lines[-1]).hexdigest()
        path = folder / f"{digest}-{last[:32]}.jsonl"
        files.write_text(path, b"\n".join(lines).decode() + "\n")
        if self.signer is not None:
            signed = folder / signing.file_name(path.name, self.signer.public_key())
            files.write_text(signed, signing.sign(self.signer, digest, last) + "\n")
        self._names = None
        self._hashes.clear()
        return path

    def names(self) -> dict[str, list[str]]:
        """Files by the digest they are about, from the directory alone."""
        if self._names is None:
            found: dict[str, list[str]] = {}
            if self.folder.is_dir():
                with os.scandir(self.folder) as shards:
                    for shard in shards:
                        if shard.is_dir(follow_symlinks=False):
                            for name in os.listdir(shard.path):
                                if match := NAME.fullmatch(name):
                                    found.setdefault(match[1], []).append(
                                        os.path.join(shard.path, name)
                                    )
            self._names = found
        return self._names

    def has(self, digest: str) -> bool:
        """Whether there is a file about this digest, whatever it holds."""
        return digest in self.names()

    def read(self, digest: str, contract: Contract) -> list[Finding]:
        """All findings at a digest that count, levels computed; `refused` says of each other file why it does not."""
        found = [self._read_file(name, contract) for name in sorted(self.names().get(digest, ()))]
        return [finding for finding in found if finding is not None]

    def why_not(self, digest: str) -> str:
        """Why files that are there do not count, in a sentence; empty where there are none."""
        reasons = sorted(
            {self.refused[name] for name in self.names().get(digest, ()) if name in self.refused}
        )
        return "; ".join(
            f"evidence is there but does not count: {reason}" for reason in reasons[:3]
        )

    def _read_file(self, name: str, contract: Contract) -> Finding | None:
        try:
            lines = read_chain(name)
            if self.keys:
                self._check_signature(name, blake3(lines[-1]).hexdigest())
            finding = finding_from(lines, digest_in(name), contract)
            if moved := reach.changed(finding.reached, self.base, self._hashes):
                raise NotEvidence(f"{moved} changed since it was judged")
            return finding
        except NotEvidence as reason:
            self.refused[name] = str(reason)
        except RecursionError:
            self.refused[name] = "it is nested too deeply"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.refused[name] = f"it is damaged ({type(error).__name__})"
        return None

    def _check_signature(self, name: str, last: str) -> None:
        folder, file = os.path.split(name)
        reason = "it is not signed by the required key"
        for key in self.keys:
            try:
                text = (
                    read_plain(os.path.join(folder, signing.file_name(file, key)), 1000)
                    .decode("ascii")
                    .strip()
                )
            except (OSError, ValueError):
                continue
            if signing.is_signed(key, digest_in(name), last, text):
                return
            reason = "its signature is false"
        raise NotEvidence(reason)


def digest_in(name: str) -> str:
    """The digest that a file is about, by its name."""
    return os.path.basename(name).partition("-")[0]


def chain(finding: Finding) -> list[bytes]:
    """The lines of a file, each record holding the digest of the line before."""
    about = {
        name: value for name, value in vars(finding).items() if name not in ("records", "reached")
    }
    lines = [
        encode(
            {"form": FORM, **about, "reached": dict(finding.reached), "count": len(finding.records)}
        )
    ]
    for record in finding.records:
        plain = {name: value for name, value in asdict(record).items() if name not in DERIVED}
        lines.append(encode({"previous": blake3(lines[-1]).hexdigest(), **plain}))
    return lines


def encode(line: dict[str, Any]) -> bytes:
    """In ASCII: no character is a line's end for some reader, and lone surrogates survive."""
    return json.dumps(line).encode("ascii")


def read_plain(name: str, largest: int) -> bytes:
    """The bytes of a regular file, not through a link, which cannot block and has an end."""
    handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise NotEvidence("it is no regular file")
        if found.st_size > largest:
            raise NotEvidence("it is too large")
        return file.read(found.st_size) or b""


def read_chain(name: str) -> list[bytes]:
    """The lines of a file, if every one is what the next, or the name, says."""
    data = read_plain(name, LARGEST)
    lines = data.removesuffix(b"\n").split(b"\n")
    if blake3(lines[-1]).hexdigest()[:32] != name[-38:-6]:
        older = is_older(data, name)
        raise NotEvidence(
            "it is of an older form" if older else "its last line is not what its name says"
        )
    return lines


def is_older(data: bytes, name: str) -> bool:
    """Before form 2 the name held the digest of the whole file, and its first line a verdict and a level."""
    return (
        blake3(data).hexdigest()[:32] == name[-38:-6] and b'"form"' not in data.partition(b"\n")[0]
    )


def finding_from(lines: Sequence[bytes], digest: str, contract: Contract) -> Finding:
    """From the lines of a file: types, chain and claims checked, levels computed."""
    header, *found = json.loads(b"[%b]" % b",".join(lines))
    if header.pop("form", None) != FORM:
        raise NotEvidence("it is of another form than this version reads")
    if header["digest"] != digest or header["contract"] != contract.id:
        raise NotEvidence("it is about another contract")
    asked, reached, count = header.pop("asked"), header.pop("reached"), header.pop("count")
    if (
        type(asked) is not int
        or set(header) != set(ABOUT)
        or not all(type(v) is str for v in header.values())
    ):
        raise NotEvidence("its first line has other types")
    if len(reached) > reach.MANY:
        raise NotEvidence("it names too many files")
    if not all(type(v) is str for v in reached.values()):
        raise NotEvidence("its first line has other types")
    if not found or not count == len(found) == len(lines) - 1:
        raise NotEvidence("it holds fewer or more records than were made")
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
    """What `chain` wrote, with the level that it earns."""
    if line.keys() != LINE:
        raise NotEvidence("a record has other fields")
    for name in COUNTS:
        if type(line[name]) is not int or not 0 <= line[name] < 2**63:
            raise NotEvidence("a record has counts that are none")
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
    """A planted subject: name, caught, detail."""
    planted = Planted(**found)
    if (
        type(planted.caught) is not bool
        or type(planted.name) is not str
        or type(planted.detail) is not str
    ):
        raise NotEvidence("a record has other types")
    return planted


def proof_from(found: dict[str, Any]) -> Proof:
    """A proof: engine, covers, cases, failure."""
    proof = Proof(**found)
    if type(proof.cases) is not int or not all(
        type(t) is str for t in (proof.engine, proof.covers, proof.failure)
    ):
        raise NotEvidence("a record has other types")
    return proof


def merge_records(findings: Sequence[Finding]) -> tuple[ClaimRecord, ...]:
    """One record a claim: red wins over all, then the highest level kept, then the latest."""
    best: dict[str, tuple[tuple[bool, bool, int, str], ClaimRecord]] = {}
    for finding in findings:
        for record in finding.records:
            red = record.verdict in ladder.RED
            rank = (red, record.verdict == "kept", record.level, finding.date)
            if record.claim not in best or rank > best[record.claim][0]:
                best[record.claim] = rank, record
    return tuple(record for _, record in best.values())
