"""The folder of evidence: append-only files, named by digest; folders are merged by copying."""

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

from isobit.contracts.language.contract import Claim, Contract, planted_names
from isobit.contracts.store import ladder, opened_files
from isobit.contracts.store.sharing import Store, pull, push
from isobit.contracts.store.sources import machine
from isobit.errors import ArgumentError, EngineError
from isobit.foundation import files
from isobit.foundation.records import ClaimRecord, Planted, Proof
from isobit.order.plan import VERSION

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


# Sign evidence with Ed25519, so that evidence from elsewhere counts only if a trusted key signed it.

PURPOSE = b"isobit evidence, form 2\n"  # a signature made for another purpose does not count
MAKE = "ssh-keygen -t ed25519 -N '' -f isobit-key makes isobit-key and isobit-key.pub; so does openssl, as PEM"


def read_private(path: str) -> Ed25519PrivateKey:
    """Read a private key without a password, in OpenSSH format or PEM."""
    library = _library()
    data, forms = _read(path), library.serialization
    reader = forms.load_ssh_private_key if b"OPENSSH" in data[:64] else forms.load_pem_private_key
    try:
        key = reader(data, None)
    except Exception as error:  # ValueError, TypeError or UnsupportedAlgorithm
        raise _no_key("private", path, str(error)) from None
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        raise _no_key("private", path, type(key).__name__)
    return key  # type: ignore[no-any-return]


def read_public(path: str) -> Ed25519PublicKey:
    """Read a public key, in OpenSSH format or PEM."""
    library = _library()
    data, forms = _read(path), library.serialization
    reader = forms.load_ssh_public_key if data[:4] == b"ssh-" else forms.load_pem_public_key
    try:
        key = reader(data)
    except Exception as error:
        raise _no_key("public", path, str(error)) from None
    if not isinstance(key, library.ed25519.Ed25519PublicKey):
        raise _no_key("public", path, type(key).__name__)
    return key  # type: ignore[no-any-return]


def public_key(name: str) -> Ed25519PublicKey:
    """Return the public key of 64 hexadecimal digits."""
    keys: type[Ed25519PublicKey] = _library().ed25519.Ed25519PublicKey
    return keys.from_public_bytes(bytes.fromhex(name))


def file_name(evidence: str, key: Ed25519PublicKey) -> str:
    """Return the name of a key's signature of an evidence file; several keys may sign one file."""
    return f"{evidence}.{key.public_bytes_raw().hex()[:32]}.sig"


def sign(key: Ed25519PrivateKey, digest: str, last: str) -> str:
    """Sign the last digest of a chain of records, and so all of it."""
    return key.sign(_message(digest, last)).hex()


def is_signed(key: Ed25519PublicKey, digest: str, last: str, signature: str) -> bool:
    """Return whether the key made this signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature), _message(digest, last))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(digest: str, last: str) -> bytes:
    return PURPOSE + f"{digest}\n{last}\n".encode()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _no_key("", path, str(error)) from None


def _no_key(kind: str, path: str, received: str) -> ArgumentError:
    expected = f"an Ed25519 {kind} key without a password in {path}".replace("  ", " ")
    return ArgumentError(expected=expected, received=received[:200], remedy=MAKE)


def _library() -> Any:
    try:
        from types import SimpleNamespace

        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise EngineError(
            expected="the package cryptography, which signs and checks evidence",
            received=str(error),
            remedy="pip install cryptography, or isobit's extra: sign",
        ) from None
    return SimpleNamespace(serialization=serialization, ed25519=ed25519)


# Write and read one evidence file: lines of JSON, each with the digest of the line before.
#
# [Note: Evidence files] The first line describes the judging: contract, digest, subject, level, date, machine,
# engine, the version of the order of addition, and the files that the code opened. Each further line is the record of
# one claim, with the BLAKE3 of the line before under `previous`. The file is named `DIGEST-LAST.jsonl`, where LAST is
# the digest of its last line: a line that is changed, moved, added or removed breaks the chain or the name. No line
# states a level: `ladder.earned_level` computes it from counts, planted subjects and proofs. Anyone who can write to
# the folder can still write a chain; a signature of LAST (signing.py) shows who judged.

FORM = 3
UNORDERED_FORM = 2  # without the version of the order, which was 1
LARGEST = 64 << 20  # bytes of a file; a larger one is not evidence that we wrote
COUNTS = ("at", "cases", "inputs", "drawn", "compared", "differing")
TEXTS = ("claim", "relation", "verdict", "detail", "replay")
DERIVED = ("level", "required", "if_fails")  # from the rest or from the contract, so never stored
LINE = frozenset({*COUNTS, *TEXTS, "planted", "proof", "seconds", "previous"})
ABOUT = ("contract", "digest", "subject", "date", "machine", "engine")


@dataclass(frozen=True)
class JudgedContract:
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


def chain(finding: JudgedContract) -> list[bytes]:
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


def finding_from(lines: Sequence[bytes], digest: str, contract: Contract) -> JudgedContract:
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
    return JudgedContract(
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
        self.store: Store | None = None
        self.is_behind = False  # whether the store did not answer, and lacks evidence of this run
        self._names: dict[str, list[str]] | None = None
        self._hashes: dict[str, str] = {}

    def share(self, url: str) -> None:
        """Share evidence with a store: take what it has, put what it lacks; new evidence is put as it is written."""
        self.store = Store(url)
        pull(self.store, self.folder)
        push(self.store, self.folder)
        self._names = None

    def write(self, finding: JudgedContract) -> Path:
        """Write a new file atomically; existing files are never changed."""
        digest, lines = finding.digest, chain(finding)
        folder = self.folder / digest[:2]
        folder.mkdir(parents=True, exist_ok=True)
        last = blake3(lines[-1]).hexdigest()
        path = folder / f"{digest}-{last[:32]}.jsonl"
        files.write_text(path, b"\n".join(lines).decode() + "\n")
        if self.signer is not None:
            signed = folder / file_name(path.name, self.signer.public_key())
            files.write_text(signed, sign(self.signer, digest, last) + "\n")
            self._put(signed)
        self._put(path)
        self._names = None
        self._hashes.clear()
        return path

    def _put(self, path: Path) -> None:
        """Put a file into the store, if there is one. If it does not answer, the run goes on; see `catch_up`."""
        if self.store is None or self.is_behind:
            return
        try:
            self.store.write(f"{path.parent.name}/{path.name}", path.read_bytes())
        except ArgumentError:
            self.is_behind = True

    def catch_up(self) -> None:
        """Put what the store lacks because it did not answer.

        Raises:
            ArgumentError: If it still does not answer; the evidence is in the local folder.
        """
        if self.store is not None and self.is_behind:
            push(self.store, self.folder)
            self.is_behind = False

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

    def about(self, name: str) -> dict[str, str]:
        """Return the texts of a file's first line; empty if it cannot be read."""
        try:
            header = json.loads(read_chain(name)[0])
            return {key: header[key] for key in ABOUT if type(header.get(key)) is str}
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}

    def has(self, digest: str) -> bool:
        """Return whether there is a file for this digest."""
        return digest in self.names()

    def read(self, digest: str, contract: Contract) -> list[JudgedContract]:
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

    def _read_file(self, name: str, contract: Contract) -> JudgedContract | None:
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
                    read_plain(os.path.join(folder, file_name(file, key)), 1000)
                    .decode("ascii")
                    .strip()
                )
            except (OSError, ValueError):
                continue
            if is_signed(key, digest_in(name), last, text):
                return
            reason = "its signature is false"
        raise NotEvidence(reason)


def merge_records(findings: Sequence[JudgedContract]) -> tuple[ClaimRecord, ...]:
    """Keep one record per claim: a red one, else the highest level kept, else the latest."""
    best: dict[str, tuple[tuple[bool, bool, int, str], ClaimRecord]] = {}
    for finding in findings:
        for record in finding.records:
            red = record.verdict in ladder.RED
            rank = (red, record.verdict == "kept", record.level, finding.date)
            if record.claim not in best or rank > best[record.claim][0]:
                best[record.claim] = rank, record
    return tuple(record for _, record in best.values())
