"""Evidence: append-only files of records, named by what they are about and by their content; merged by copying."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from isobit import files
from isobit.contracts.ladder import RED
from isobit.contracts.sources import engine
from isobit.records import ClaimRecord, Planted, Proof

FOLDER = "evidence"
HEADER = frozenset({"contract", "digest", "asked", "level", "verdict", "date"})


@dataclass(frozen=True)
class Finding:
    """One verification of one contract: a header and a record per claim."""

    contract: str
    digest: str
    subject: str
    asked: int  # the level that the verification was to go to
    level: int
    verdict: str
    records: tuple[ClaimRecord, ...]
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )
    engine: str = field(default_factory=engine)
    ran: bool = True  # no claim could not run


class Evidence:
    """The files below one folder."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER
        self.corrupt: list[str] = []
        self._names: dict[str, list[str]] | None = None

    def write(self, finding: Finding) -> Path:
        """One file, whole or not at all; nothing that exists is ever changed."""
        digest = finding.digest
        header = {key: value for key, value in vars(finding).items() if key != "records"}
        header["records"] = len(finding.records)
        lines = [json.dumps(line, ensure_ascii=False) for line in (header, *(asdict(r) for r in finding.records))]
        text = "\n".join(lines) + "\n"
        folder = self.folder / digest[:2]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{digest}-{blake3(text.encode()).hexdigest()[:32]}.jsonl"
        files.write_text(path, text)
        self._names = None
        return path

    def names(self) -> dict[str, list[str]]:
        """Files by the digest they are about, from the directory alone."""
        if self._names is None:
            found: dict[str, list[str]] = {}
            if self.folder.is_dir():
                with os.scandir(self.folder) as shards:
                    for shard in shards:
                        if shard.is_dir():
                            for name in os.listdir(shard.path):
                                if name.endswith(".jsonl") and not name.startswith("."):
                                    found.setdefault(name.partition("-")[0], []).append(os.path.join(shard.path, name))
            self._names = found
        return self._names

    def has(self, digest: str) -> bool:
        """Whether anything is known at this digest."""
        return digest in self.names()

    def read(self, digest: str) -> list[Finding]:
        """All findings at a digest; a file whose content is not what its name says is set aside and named."""
        return [f for name in sorted(self.names().get(digest, [])) if (f := self._read_file(name)) is not None]

    def headers(self, digest: str) -> list[dict[str, Any]]:
        """First lines only, of files that are whole: what a table of many contracts needs."""
        found = []
        for name in self.names().get(digest, []):
            try:
                data = read_whole(name)
                header = json.loads(data[: data.index(b"\n")])
                if header["digest"] != digest or not header.keys() >= HEADER:
                    raise ValueError("header")
                found.append(header)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                self._set_aside(name)
        return found

    def _read_file(self, name: str) -> Finding | None:
        try:
            # By line feeds alone: splitlines also cuts at characters that JSON leaves in texts.
            header, *lines = [json.loads(line) for line in read_whole(name).removesuffix(b"\n").split(b"\n")]
            if header["digest"] != digest_in(name):
                raise ValueError("digest")
            count = header.pop("records")
            if count != len(lines):
                raise ValueError("count")
            return Finding(**header, records=tuple(record_from(line) for line in lines))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._set_aside(name)
            return None

    def _set_aside(self, name: str) -> None:
        if name not in self.corrupt:
            self.corrupt.append(name)


def digest_in(name: str) -> str:
    """The digest that a file is about, by its name."""
    return os.path.basename(name).partition("-")[0]


def read_whole(name: str) -> bytes:
    """A file's bytes, if they are those that its name tells of."""
    with open(name, "rb", buffering=0) as file:
        data = file.readall()
    if blake3(data).hexdigest()[:32] != name[-38:-6]:
        raise ValueError("content")
    return data


def record_from(line: dict[str, Any]) -> ClaimRecord:
    """What `asdict` made."""
    planted = tuple(Planted(**p) for p in line.pop("planted"))
    proof = line.pop("proof")
    return ClaimRecord(**line, planted=planted, proof=Proof(**proof) if proof else None)


def merge_records(findings: Sequence[Finding]) -> tuple[ClaimRecord, ...]:
    """One record a claim: red wins over all, then the highest level kept, then the latest."""
    best: dict[str, tuple[tuple[bool, bool, int, str], ClaimRecord]] = {}
    for finding in findings:
        for record in finding.records:
            red = record.verdict in RED
            rank = (red, record.verdict == "kept", record.level, finding.date)
            if record.claim not in best or rank > best[record.claim][0]:
                best[record.claim] = rank, record
    return tuple(record for _, record in best.values())
