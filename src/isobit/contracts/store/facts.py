"""What is known of a contract without judging it, computed from its text and cached by the text's digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.contracts.language.contract import Claim, Contract, Obligation, ProofPlan
from isobit.contracts.language.sabotage_names import planted_names
from isobit.contracts.language.schema import LEVELS
from isobit.contracts.store.ladder import level_number, required_level, unlinked
from isobit.contracts.store.sources import ROOT, hash_text
from isobit.foundation import files

FILE = "facts.json"
# Facts are valid while the code that computes them is the same.
_READERS = ("language/*.py", "store/ladder.py", "store/facts.py")
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
