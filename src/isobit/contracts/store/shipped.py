"""Read and write the evidence that is shipped inside isobit's wheel.

[Note: Shipped evidence]
`isobit verify isobit` takes minutes, so after an installation nothing is judged yet. The wheel
therefore holds what was found on one machine, in `isobit/library/evidence.json`. `isobit contract status`
shows it and names that machine. The verdict on this machine is still "not-judged", and shipped evidence
counts nowhere: `verify` ignores it, and exit codes ignore it.

Evidence of this machine depends on everything that runs, torch and the processor included. Shipped
evidence depends on the files in the wheel: the contract, isobit's own source files, the sources of
the kernels, and the same of the contracts that it depends on. If one of them differs from what was
judged, the evidence is stale and is not shown.

A release signs the file (`packaging/ship_evidence.py --sign KEY`): the signature is over all of it, and the public key
is in the documentation, not in the wheel. With the package cryptography, evidence whose signature is false is not
shown; without it, the key is named as not checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from isobit.contracts.store import ladder
from isobit.contracts.store.evidence import (
    Evidence,
    JudgedContract,
    NotEvidence,
    chain,
    check_form,
    finding_from,
    is_signed,
    merge_records,
    public_key,
    sign,
)
from isobit.contracts.store.opened_files import ABSENT
from isobit.contracts.store.sources import ROOT, hash_text
from isobit.contracts.store.tree import Entry, Tree, library
from isobit.errors import EngineError
from isobit.foundation import files
from isobit.foundation.records import Shipped

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FILE = library() / "evidence.json"
FORM = 1
LARGEST = 16 << 20  # bytes
SHIPPED = "shipped"  # in a signature, where one of a chain has the digest of a contract


@dataclass(frozen=True)
class Origin:
    """Where shipped evidence was made; `torch` and `python` are versions."""

    cpu: str
    commit: str
    date: str
    torch: str
    python: str


class ShippedEvidence:
    """The findings of one file, for the contracts of isobit's own library; never written by a command."""

    def __init__(self, tree: Tree, path: Path = FILE) -> None:
        self.tree = tree
        self.stale: dict[str, str] = {}  # contract -> why its shipped evidence is not shown
        self._path = path
        self._digests: dict[str, str] = {}
        self._known: dict[str, Shipped | None] = {}
        self._found: dict[str, Any] | None = None

    def status_of(self, entry: Entry) -> Shipped | None:
        """Return what was found of a contract, or None where nothing was shipped or it is stale."""
        if entry.id not in self._known:
            self._known[entry.id] = self._status_of(entry)
        return self._known[entry.id]

    def _status_of(self, entry: Entry) -> Shipped | None:
        known = self._read().get("contracts", {}).get(entry.id)
        if known is None or not is_own(entry):
            return None
        try:
            signed_by = self.signed_by()
            lines = [line.encode("ascii") for line in known["lines"]]
            check_form(json.loads(lines[0]))
            if known["kernels"] != kernel_sources():
                raise NotEvidence("the kernels were built from other sources")
            if known["source"] != self.source_digest(entry.id):
                raise NotEvidence("the contract or the code that it binds has changed")
            finding = finding_from(lines, json.loads(lines[0])["digest"], entry.outline())
            origin = Origin(**self._read()["origin"])
            weak = self._weakest(entry)
        except (NotEvidence, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            self.stale[entry.id] = str(error)
            return None
        records = merge_records([finding])
        verdict = ladder.contract_verdict(entry.outline(), records)
        level = ladder.contract_level(entry.outline(), records)
        if weak != "kept":
            verdict, level = ladder.worst([verdict, "could-not-run"]), 0
        return Shipped(verdict, level, engine=finding.engine, signed_by=signed_by, **asdict(origin))

    def signed_by(self) -> str:
        """Return the key that signed the file, in hexadecimal; empty if none did. A false signature raises."""
        if "signature" not in self._read():
            return ""
        name = str(self._read()["signature"]["key"])
        try:
            key = public_key(name)
        except EngineError:
            return f"{name} (not checked: pip install cryptography)"
        if not self.is_signed_by(key):
            raise NotEvidence("the signature of the file is false")
        return name

    def is_signed_by(self, key: Ed25519PublicKey) -> bool:
        """Return whether the holder of a key signed the whole file."""
        signature = self._read().get("signature")
        text = signature.get("signature") if isinstance(signature, dict) else None
        return isinstance(text, str) and is_signed(key, SHIPPED, contents(self._read()), text)

    def _weakest(self, entry: Entry) -> str:
        """Return the worst shipped verdict of the contracts that one depends on."""
        found = {name: self.status_of(self.tree.entries[name]) for name in entry.depends_on}
        missing = [name for name, status in found.items() if status is None]
        if missing:
            raise NotEvidence(f"none is shipped of {missing[0]}, which it depends on")
        return ladder.worst(["kept", *(status.verdict for status in found.values() if status)])

    def source_digest(self, id: str) -> str:
        """Return the digest of the files in the wheel for a contract: text, own source, and of what it depends on."""
        if id not in self._digests:
            below = [self.source_digest(name) for name in self.tree.entries[id].depends_on]
            root = (
                ROOT.resolve()
            )  # in a checkout, contracts are found by names relative to the current folder
            own = [
                f"{path.relative_to(root).as_posix()} {hash_of_file(path)}"
                for path in sorted(Path(name).resolve() for name in self.tree.files_of(id))
                if root in path.parents
            ]
            self._digests[id] = hash_text(*own, *below)[:32]
        return self._digests[id]

    def _read(self) -> dict[str, Any]:
        if self._found is None:
            try:
                found = json.loads(files.read_bytes(self._path, LARGEST))
                self._found = found if found["form"] == FORM else {}
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                self._found = {}
        return self._found or {}


def is_own(entry: Entry) -> bool:
    """Return whether a contract is one of isobit's own."""
    return library().resolve() in Path(entry.path).resolve().parents


@lru_cache(maxsize=1000)
def hash_of_file(path: Path) -> str:
    """Return the BLAKE3 of a file's contents."""
    return blake3(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def kernel_sources() -> str:
    """Return the digest of the sources that the native library was built from, as its build noted it."""
    try:
        return str(json.loads((ROOT / "_native.json").read_text())["sources"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def contents(record: dict[str, Any]) -> str:
    """Return the digest of all that a file says, its signature left out."""
    said = {name: part for name, part in record.items() if name != "signature"}
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest()


def export(
    tree: Tree,
    evidence: Evidence,
    origin: Origin,
    path: Path = FILE,
    signer: Ed25519PrivateKey | None = None,
) -> list[str]:
    """Write the evidence of this machine as the file that is shipped; return the contracts that it lacks."""
    shipped, missing = ShippedEvidence(tree, path), []
    contracts: dict[str, Any] = {}
    for entry in own_entries(tree):
        finding = best_finding(evidence.read(tree.digest(entry.id), entry.outline()))
        if finding is None:
            missing.append(entry.id)
            continue
        contracts[entry.id] = {
            "source": shipped.source_digest(entry.id),
            "kernels": kernel_sources(),
            "lines": [line.decode("ascii") for line in chain(finding)],
        }
    record: dict[str, Any] = {"form": FORM, "origin": asdict(origin), "contracts": contracts}
    if signer is not None:
        record["signature"] = {
            "key": signer.public_key().public_bytes_raw().hex(),
            "signature": sign(signer, SHIPPED, contents(record)),
        }
    files.write_text(path, json.dumps(record, indent=1) + "\n")
    return missing


def own_entries(tree: Tree) -> Iterator[Entry]:
    """Return isobit's own contracts, by id."""
    return (entry for _, entry in sorted(tree.entries.items()) if is_own(entry))


def best_finding(findings: list[JudgedContract]) -> JudgedContract | None:
    """Return the latest finding of a whole contract whose code read no file outside the package.

    The finding is returned without the names of files that were looked for: they are paths of this machine.
    """
    whole = [f for f in findings if f.ran and not any(map(is_outside, f.reached))]
    best = max(whole, key=lambda f: (f.asked, f.date), default=None)
    return replace(best, reached=()) if best else None


def is_outside(reached: tuple[str, str]) -> bool:
    """Return whether a file that code reached exists and is more than the metadata of an installed package."""
    name, digest = reached
    return digest != ABSENT and not any(
        part.endswith((".egg-info", ".dist-info")) for part in Path(name).parts
    )
