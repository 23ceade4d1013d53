"""The contracts of a tree of files: found, known by facts cached by content, digested with all they rest on."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from isobit import files
from isobit.contracts.judge.sabotage_names import planted_names
from isobit.contracts.language.contract import Claim, Contract, Obligation, ProofPlan
from isobit.contracts.language.grammar import suggest
from isobit.contracts.language.load import load_contract, parse_contract
from isobit.contracts.language.schema import LEVELS
from isobit.contracts.language.yaml_text import MAX_BYTES
from isobit.contracts.store.ladder import level_number, required_level, unlinked
from isobit.contracts.store.sources import ROOT, Sources, executor_digest, hash_text, machine
from isobit.errors import ContractError

SKIPPED = frozenset({"node_modules", "__pycache__", "build", "dist", "site-packages"})
HOME = ".isobit"
MACHINERY = "isobit.contracts.judge.verify:verify_contract"


@dataclass(frozen=True)
class Entry:
    """What is known of a contract without judging it."""

    path: str
    text_digest: str
    id: str
    version: str
    title: str
    depends_on: tuple[str, ...]
    code: tuple[str, ...]
    required: int  # the level of the contract when every claim reaches its own
    highest: int  # the highest that a claim asks for
    obligations: int
    claims: int
    unlinked: tuple[str, ...]
    subject: str
    subjects: dict[str, str]
    waivers: int
    promised: tuple[str, ...]  # ids of the obligations
    rungs: tuple[Any, ...]  # of each claim what the ladder needs: see `outline`

    def outline(self) -> Contract:
        """The contract as far as levels are computed from it: without texts, inputs and code."""
        claims = []
        for id, linked, relation, level, planted, proof in self.rungs:
            plan = ProofPlan("", proof) if proof else None
            claims.append(
                Claim(id, tuple(linked), relation, level, sabotage=tuple(planted), proof=plan)
            )
        obligations = tuple(Obligation(id, "") for id in self.promised)
        return Contract(self.id, self.version, self.title, obligations, claims=tuple(claims))


@dataclass(frozen=True)
class Broken:
    """A file that is no contract, and why."""

    path: str
    error: ContractError


def find_contracts(folder: Path) -> Iterator[Path]:
    """contract.yaml and *.contract.yaml below a folder, in order; hidden folders are not looked into."""
    if folder.is_file():
        yield folder
        return
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED and not name.startswith(".")
        )
        for name in sorted(names):
            if name == "contract.yaml" or name.endswith(".contract.yaml"):
                yield Path(top, name)


def refuse_link_out(path: Path, folder: Path) -> None:
    """A link in somebody's folder may lead to any file of ours, which a message about its text would then quote."""
    if (
        path.is_symlink()
        and folder.is_dir()
        and not path.resolve().is_relative_to(folder.resolve())
    ):
        raise ContractError(
            expected=f"a contract below {folder}",
            received="a link to a file elsewhere",
            remedy="name the file that it leads to, or copy it",
            where=str(path),
        )


def library() -> Path:
    """The contracts of isobit's own operators, wherever it is installed."""
    return ROOT / "library"


class Tree:
    """Every contract in reach, by id; dependencies resolve against the library too."""

    def __init__(self, folders: Sequence[Path], home: Path, cached: bool = True) -> None:
        """Without `cached`, every text is read anew: a cache that came with evidence may be forged as well."""
        self.home = home
        self.entries: dict[str, Entry] = {}
        self.broken: list[Broken] = []
        self.chosen: list[str] = []
        self._seen: set[str] = set()
        self._sources = Sources()
        self._digests: dict[str, dict[tuple[str, str], str]] = {}  # by machine
        self._here = machine()
        facts = self._read_facts() if cached else {}
        kept: dict[str, Any] = {}
        for folder in folders:
            self._add(folder, facts, kept, chosen=True)
        if not any(library() == f or library() in f.parents for f in folders):
            self._add(library(), facts, kept, chosen=False)
        if cached and set(kept) - set(facts):
            self._write_facts(facts | kept)

    def _add(self, folder: Path, facts: dict[str, Any], kept: dict[str, Any], chosen: bool) -> None:
        for path in find_contracts(folder):
            name = str(path)
            try:
                refuse_link_out(path, folder)
                data = files.read_bytes(path, MAX_BYTES)
                digest = blake3(data).hexdigest()[:32]
                found = facts.get(digest) or kept.get(digest) or read_facts(data, name)
                kept[digest] = found
                entry = entry_from(name, digest, found)
            except OSError as error:
                said = ContractError(
                    expected="a readable file", received=str(error), remedy="mend it", where=name
                )
                self.broken.append(Broken(name, said))
                continue
            except ContractError as error:
                self.broken.append(Broken(name, error))
                continue
            other = self.entries.get(entry.id)
            if other is not None and Path(other.path).resolve() != path.resolve():
                said = ContractError(
                    expected="each id once",
                    received=f"{entry.id} here and in {other.path}",
                    remedy="rename one",
                    where=name,
                )
                self.broken.append(Broken(name, said))
                continue
            if other is None:
                self.entries[entry.id] = entry
            if chosen and entry.id not in self._seen:
                self._seen.add(entry.id)
                self.chosen.append(entry.id)

    def load(self, id: str) -> Any:
        """The whole contract."""
        return load_contract(Path(self.entries[id].path))

    def find(self, id: str) -> Entry:
        """By id, or a refusal that knows the nearest."""
        if id not in self.entries:
            raise ContractError(
                expected="the id of a contract in reach",
                received=id,
                remedy=suggest(id, list(self.entries) or ["(there are none)"]),
            )
        return self.entries[id]

    def digest(self, id: str, subject: str = "", on: str = "") -> str:
        """BLAKE3 over text, bound source, executor, machine, the judging code, and the dependencies' digests.

        `on` is the identity of a machine (`sources.machine`), this one by default.
        """
        on = on or self._here
        known = self._digests.setdefault(on, {})
        if (id, subject) not in known:
            for name in self._below(id, known):
                known[name, ""] = self._digest(name, "", on)
            known[id, subject] = self._digest(id, subject, on)
        return known[id, subject]

    def _digest(self, id: str, subject: str, on: str) -> str:
        entry = self.entries[id]
        parts = [
            entry.text_digest,
            subject,
            executor_digest(on),
            self._sources.digest_of(MACHINERY),
        ]
        parts += [self._sources.digest_of(reference) for reference in code_of(entry, subject)]
        return hash_text(*parts, *(self._digests[on][name, ""] for name in entry.depends_on))[:32]

    def files_of(self, id: str, subject: str = "") -> frozenset[Path]:
        """The files that the digest covers: the contract, and the source of what it binds."""
        entry = self.entries[id]
        found = [
            self._sources.files_of(reference) for reference in (*code_of(entry, subject), MACHINERY)
        ]
        return frozenset({Path(entry.path)}.union(*found))

    def _below(self, id: str, known: Collection[tuple[str, str]]) -> list[str]:
        """What it rests on at any remove and has no digest yet, lowest first; no recursion: chains may be long."""
        found: dict[str, None] = {}
        path: dict[str, None] = {id: None}
        stack = [(id, iter(self.entries[id].depends_on))]
        while stack:
            above, rest = stack[-1]
            for name in rest:
                if name in path:
                    circle = list(path)[list(path).index(name) :]
                    raise ContractError(
                        expected="dependencies without a circle",
                        received=" → ".join((*circle, name)),
                        remedy="remove one depends_on",
                        where=self.entries[above].path,
                    )
                if name not in self.entries:
                    raise missing(self.entries[above], name, self.entries)
                if name not in found and (name, "") not in known:
                    path[name] = None
                    stack.append((name, iter(self.entries[name].depends_on)))
                    break
            else:
                stack.pop()
                del path[above]
                found[above] = None
        return [name for name in found if name != id]

    def dependents(self, id: str) -> set[str]:
        """Every contract that rests on this one, at any remove."""
        users: dict[str, list[str]] = {}
        for entry in self.entries.values():
            for name in entry.depends_on:
                users.setdefault(name, []).append(entry.id)
        found: set[str] = set()
        queue = [id]
        while queue:
            for user in users.get(queue.pop(), []):
                if user not in found:
                    found.add(user)
                    queue.append(user)
        return found

    def _read_facts(self) -> dict[str, Any]:
        try:
            found = json.loads((self.home / "facts.json").read_text())
            return (
                {k: v for k, v in found["facts"].items() if is_facts(v)}
                if found.get("form") == FORM
                else {}
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return {}

    def _write_facts(self, facts: dict[str, Any]) -> None:
        if (
            not self.home.is_dir()
        ):  # evidence makes the folder; a command that only reads leaves no trace
            return
        files.write_text(self.home / "facts.json", json.dumps({"form": FORM, "facts": facts}))


def code_of(entry: Entry, subject: str) -> tuple[str, ...]:
    """What a contract binds, and the other subject that the caller names as code."""
    return (*entry.code, subject.partition(" ")[0]) if ":" in subject else entry.code


def entry_from(path: str, digest: str, facts: dict[str, Any]) -> Entry:
    """Facts as they come from JSON."""
    found: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()
    }
    return Entry(path, digest, **found)


# Facts hold while the code that reads them does.
_READERS = ("language/*.py", "store/ladder.py", "store/tree.py", "judge/sabotage_names.py")
FORM = hash_text(*(p.read_text() for r in _READERS for p in sorted((ROOT / "contracts").glob(r))))


def read_facts(data: bytes, where: str) -> dict[str, Any]:
    """From the text; a function of its bytes alone, so it may be cached by their digest."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(
            expected="UTF-8", received=str(error), remedy="save it as UTF-8", where=where
        ) from None
    contract = parse_contract(text, where)
    return {
        "id": contract.id,
        "version": contract.version,
        "title": contract.title,
        "depends_on": list(contract.depends_on),
        "code": list(contract.code()),
        "required": required_level(contract),
        "highest": max((level_number(c.level) for c in contract.claims), default=0),
        "obligations": len(contract.obligations),
        "claims": len(contract.claims),
        "unlinked": list(unlinked(contract)),
        "subject": contract.subject,
        "subjects": dict(contract.subjects),
        "waivers": len(contract.waivers),
        "promised": [o.id for o in contract.obligations],
        "rungs": [
            [
                c.id,
                c.obligations,
                c.relation,
                c.level,
                planted_names(c),
                c.proof.planted if c.proof else "",
            ]
            for c in contract.claims
        ],
    }


TEXTS = ("id", "version", "title", "subject")
COUNTS = ("required", "highest", "obligations", "claims", "waivers")
LISTS = ("depends_on", "code", "unlinked", "promised")


def is_facts(found: Any) -> bool:
    """Whether something from the cache has the form of `read_facts`."""
    if type(found) is not dict or set(found) != {*TEXTS, *COUNTS, *LISTS, "subjects", "rungs"}:
        return False
    plain = all(type(found[name]) is str for name in TEXTS) and all(
        type(found[name]) is int for name in COUNTS
    )
    lists = all(
        type(found[name]) is list and all(type(v) is str for v in found[name]) for name in LISTS
    )
    subjects = type(found["subjects"]) is dict and all(
        type(v) is str for v in found["subjects"].values()
    )
    return (
        plain
        and lists
        and subjects
        and type(found["rungs"]) is list
        and all(map(is_rung, found["rungs"]))
    )


def is_rung(found: Any) -> bool:
    """A claim's id, obligations, relation, level, what is planted, and what its proof must refuse."""
    return (
        type(found) is list
        and [type(part) for part in found] == [str, list, str, str, list, str]
        and all(type(word) is str for word in (*found[1], *found[4]))
        and found[3] in LEVELS
    )


def missing(entry: Entry, name: str, known: Any) -> ContractError:
    """A dependency that is not in reach."""
    return ContractError(
        expected="dependencies in reach",
        received=name,
        remedy=suggest(name, list(known)),
        where=entry.path,
    )
