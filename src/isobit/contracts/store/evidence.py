"""The folder of evidence: append-only files, named by digest; folders are merged by copying."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from isobit.contracts.language.contract import Contract
from isobit.contracts.store import ladder, opened_files, signing
from isobit.contracts.store.evidence_file import (
    Finding,
    NotEvidence,
    chain,
    digest_in,
    finding_from,
    read_chain,
    read_plain,
)
from isobit.foundation import files
from isobit.foundation.records import ClaimRecord

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FOLDER = "evidence"
NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.jsonl")


class Evidence:
    """The files below a folder. With `keys`, only files signed by one of them count; `signer` signs new ones."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER
        self.base = home.parent
        self.keys: tuple[Ed25519PublicKey, ...] = ()
        self.signer: Ed25519PrivateKey | None = None
        self.refused: dict[str, str] = {}  # file -> why it does not count
        self._names: dict[str, list[str]] | None = None
        self._hashes: dict[str, str] = {}

    def write(self, finding: Finding) -> Path:
        """Write a new file atomically; existing files are never changed."""
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
        """Return files by the digest in their name, without opening them."""
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
        """Return whether there is a file for this digest."""
        return digest in self.names()

    def read(self, digest: str, contract: Contract) -> list[Finding]:
        """Return the valid findings of a digest; `refused` has the reason for each other file."""
        found = [self._read_file(name, contract) for name in sorted(self.names().get(digest, ()))]
        return [finding for finding in found if finding is not None]

    def why_not(self, digest: str) -> str:
        """Return why the files of a digest do not count; empty if there are none."""
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
            if moved := opened_files.changed(finding.reached, self.base, self._hashes):
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


def merge_records(findings: Sequence[Finding]) -> tuple[ClaimRecord, ...]:
    """Keep one record per claim: a red one, else the highest level kept, else the latest."""
    best: dict[str, tuple[tuple[bool, bool, int, str], ClaimRecord]] = {}
    for finding in findings:
        for record in finding.records:
            red = record.verdict in ladder.RED
            rank = (red, record.verdict == "kept", record.level, finding.date)
            if record.claim not in best or rank > best[record.claim][0]:
                best[record.claim] = rank, record
    return tuple(record for _, record in best.values())
