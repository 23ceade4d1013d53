"""Find the contracts below some folders, and compute the digest of each with everything it depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from isobit.contracts.language.contract import Claim, Contract, Obligation, ProofPlan, planted_names
from isobit.contracts.language.grammar import MAX_BYTES, suggest
from isobit.contracts.language.load import decode, load_contract, parse_contract
from isobit.contracts.language.schema import LEVELS
from isobit.contracts.store.ladder import level_number, required_level, unlinked
from isobit.contracts.store.sources import ROOT, Sources, executor_digest, hash_text, machine
from isobit.errors import ContractError
from isobit.foundation import files

# What is known of a contract without judging it, computed from its text and cached by the text's digest.

FILE = "facts.json"
# Facts are valid while the code that computes them is the same.
_READERS = ("language/*.py", "store/ladder.py", "store/tree.py")
FORM = hash_text(*(p.read_text() for r in _READERS for p in sorted((ROOT / "contracts").glob(r))))
TEXTS = ("id", "version", "title", "subject")
COUNTS = ("required", "highest", "obligations", "claims", "waivers")
LISTS = ("depends_on", "code", "unlinked", "promised")

Facts = dict[str, Any]


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
    highest: int  # the highest level that a claim must reach
    obligations: int
    claims: int
    unlinked: tuple[str, ...]
    subject: str
    subjects: dict[str, str]
    waivers: int
    promised: tuple[str, ...]  # ids of the obligations
    rungs: tuple[Any, ...]  # what the ladder needs of each claim: see `outline`

    def outline(self) -> Contract:
        """Return the fields of the contract that levels depend on: no texts, inputs or code."""
        claims = []
        for id, linked, relation, level, planted, proof in self.rungs:
            plan = ProofPlan("", proof) if proof else None
            claims.append(
                Claim(id, tuple(linked), relation, level, sabotage=tuple(planted), proof=plan)
            )
        obligations = tuple(Obligation(id, "") for id in self.promised)
        return Contract(self.id, self.version, self.title, obligations, claims=tuple(claims))


def facts_of(contract: Contract) -> Facts:
    """Compute the fields of an `Entry` besides path and digest, as JSON holds them."""
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
        "rungs": [rung_of(claim) for claim in contract.claims],
    }


def rung_of(claim: Claim) -> list[Any]:
    """Return a claim's id, obligations, relation, level, sabotage, and what its proof must reject."""
    proof = claim.proof.planted if claim.proof else ""
    return [
        claim.id,
        claim.obligations,
        claim.relation,
        claim.level,
        planted_names(claim),
        proof,
    ]


def entry_from(path: str, digest: str, facts: Facts) -> Entry:
    """Build an entry from facts as JSON holds them."""
    found: Facts = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
    return Entry(path, digest, **found)


def read_cache(home: Path) -> dict[str, Facts]:
    """Read the cache of facts by text digest; a missing, damaged or older cache is empty."""
    try:
        found = json.loads((home / FILE).read_text())
        if found.get("form") != FORM:
            return {}
        return {digest: facts for digest, facts in found["facts"].items() if is_facts(facts)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {}


def write_cache(home: Path, facts: Mapping[str, Facts]) -> None:
    """Write the cache, if the folder exists: a command that only reads does not create it."""
    if home.is_dir():
        files.write_text(home / FILE, json.dumps({"form": FORM, "facts": dict(facts)}))


def is_facts(found: Any) -> bool:
    """Return whether a value from the cache has the form of `facts_of`."""
    if type(found) is not dict or set(found) != {*TEXTS, *COUNTS, *LISTS, "subjects", "rungs"}:
        return False
    subjects, rungs = found["subjects"], found["rungs"]
    return (
        all(type(found[name]) is str for name in TEXTS)
        and all(type(found[name]) is int for name in COUNTS)
        and all(is_texts(found[name]) for name in LISTS)
        and type(subjects) is dict
        and is_texts(list(subjects.values()))
        and type(rungs) is list
        and all(map(is_rung, rungs))
    )


def is_rung(found: Any) -> bool:
    """Return whether a value has the form of `rung_of`."""
    return (
        type(found) is list
        and [type(part) for part in found] == [str, list, str, str, list, str]
        and is_texts([*found[1], *found[4]])
        and found[3] in LEVELS
    )


def is_texts(found: Any) -> bool:
    """Return whether a value is a list of texts."""
    return type(found) is list and all(type(text) is str for text in found)


SKIPPED = frozenset({"node_modules", "__pycache__", "build", "dist", "site-packages"})
HOME = ".isobit"
JUDGE = "isobit.contracts.judge.verify:verify_contract"


@dataclass(frozen=True)
class Broken:
    """A file that is not a valid contract, and why."""

    path: str
    error: ContractError


def find_contracts(folder: Path) -> Iterator[Path]:
    """Yield contract.yaml and *.contract.yaml below a folder, sorted; hidden folders are skipped."""
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
    """Raise for a link that leads out of the folder: a message about the file's text would quote it."""
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
    """Return the folder of the contracts of isobit's own operators."""
    return ROOT / "library"


class Tree:
    """The contracts below some folders by id, and those of isobit's own library, to resolve dependencies.

    Each file is parsed at most once. With `cached`, facts about a text that was parsed before come from
    the cache in `home`; without, every text is parsed, since a cache that came with evidence may be forged.
    """

    def __init__(self, folders: Sequence[Path], home: Path, cached: bool = True) -> None:
        self.home = home
        self.entries: dict[str, Entry] = {}
        self.broken: list[Broken] = []
        self.chosen: list[str] = []
        self._seen: set[str] = set()
        self._contracts: dict[str, Contract] = {}  # by path, those that were parsed
        self._sources = Sources()
        self._digests: dict[str, dict[tuple[str, str], str]] = {}  # by machine
        self._here = machine()
        facts = read_cache(home) if cached else {}
        kept: dict[str, Facts] = {}
        for folder in folders:
            self._add(folder, facts, kept, chosen=True)
        if not any(library() == f or library() in f.parents for f in folders):
            self._add(library(), facts, kept, chosen=False)
        if cached and set(kept) - set(facts):
            write_cache(home, facts | kept)

    def _add(
        self, folder: Path, facts: dict[str, Facts], kept: dict[str, Facts], chosen: bool
    ) -> None:
        for path in find_contracts(folder):
            try:
                refuse_link_out(path, folder)
                entry = self._read(path, facts, kept)
                other = self.entries.get(entry.id)
                if other is not None and Path(other.path).resolve() != path.resolve():
                    raise ContractError(
                        expected="an id that no other contract has",
                        received=f"{entry.id} here and in {other.path}",
                        remedy="rename one",
                        where=str(path),
                    )
            except ContractError as error:
                self.broken.append(Broken(str(path), error))
                continue
            if other is None:
                self.entries[entry.id] = entry
            if chosen and entry.id not in self._seen:
                self._seen.add(entry.id)
                self.chosen.append(entry.id)

    def _read(self, path: Path, facts: dict[str, Facts], kept: dict[str, Facts]) -> Entry:
        name = str(path)
        try:
            data = files.read_bytes(path, MAX_BYTES)
        except OSError as error:
            raise ContractError(
                expected="a readable file",
                received=str(error),
                remedy="make it readable, or remove it",
                where=name,
            ) from None
        digest = blake3(data).hexdigest()[:32]
        found = facts.get(digest) or kept.get(digest)
        if not found:
            contract = replace(parse_contract(decode(data, name), name), path=name)
            self._contracts[name] = contract
            found = facts_of(contract)
        kept[digest] = found
        return entry_from(name, digest, found)

    def load(self, id: str) -> Contract:
        """Return a contract, parsing its file unless that was done before."""
        path = self.entries[id].path
        if path not in self._contracts:
            self._contracts[path] = load_contract(Path(path))
        return self._contracts[path]

    def find(self, id: str) -> Entry:
        """Return the entry of a contract.

        Raises:
            ContractError: There is no such id; the remedy suggests the nearest.
        """
        if id not in self.entries:
            remedy = suggest(id, list(self.entries) or ["(there are none)"])
            if self.broken:
                remedy += f"; or fix {self.broken[0].path}, which is not valid"
            raise ContractError(expected="the id of a known contract", received=id, remedy=remedy)
        return self.entries[id]

    def digest(self, id: str, variant: str = "", on: str = "") -> str:
        """Return the digest of a contract's text, code, executor, machine, judge and dependencies.

        Args:
            id: The contract.
            variant: Another subject, or thorough sizes (`Options.variant`).
            on: The identity of a machine (`sources.machine`), by default this one.
        """
        on = on or self._here
        known = self._digests.setdefault(on, {})
        if (id, variant) not in known:
            for name in self._below(id, known):
                known[name, ""] = self._digest(name, "", on)
            known[id, variant] = self._digest(id, variant, on)
        return known[id, variant]

    def _digest(self, id: str, variant: str, on: str) -> str:
        entry = self.entries[id]
        texts = [entry.text_digest, variant, executor_digest(on), self._sources.digest_of(JUDGE)]
        texts += [self._sources.digest_of(reference) for reference in code_of(entry, variant)]
        return hash_text(*texts, *(self._digests[on][name, ""] for name in entry.depends_on))[:32]

    def files_of(self, id: str, variant: str = "") -> frozenset[Path]:
        """Return the files that the digest covers: the contract, and the source of the code it names."""
        entry = self.entries[id]
        references = (*code_of(entry, variant), JUDGE)
        found = [self._sources.files_of(reference) for reference in references]
        return frozenset({Path(entry.path)}.union(*found))

    def _below(self, id: str, known: Collection[tuple[str, str]]) -> list[str]:
        """Return dependencies at any depth without a digest, deepest first; iterative, as chains may be long."""
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


def code_of(entry: Entry, variant: str) -> tuple[str, ...]:
    """Return the code that a contract names, and the other subject if it is named as code."""
    return (*entry.code, variant.partition(" ")[0]) if ":" in variant else entry.code


def missing(entry: Entry, name: str, known: Collection[str]) -> ContractError:
    """Build the error for a dependency that was not found."""
    return ContractError(
        expected="dependencies that are known contracts",
        received=name,
        remedy=suggest(name, list(known)),
        where=entry.path,
    )
