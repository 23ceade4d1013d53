"""Reads contracts of another, prose form, counts what of them could be run, and writes them in ours without claims."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from isobit.contracts.language.contract import Equation
from isobit.contracts.language.grammar import (
    Key,
    Kind,
    ListOf,
    MapOf,
    RecordOf,
    Scalar,
    Text,
    refuse,
)
from isobit.contracts.language.schema import NAME, PROSE, VERSION
from isobit.contracts.language.yaml_text import Node, read_yaml

# Programs that a test may begin with; a sentence may begin with any other word.
PROGRAMS = {
    *("apr", "b3sum", "bash", "batuta", "cargo", "make", "pmat"),
    *("pv", "pytest", "python", "python3", "realizar", "sh"),
}
# A code reference by itself, as package.module:function, tests/file.py::name or crate::module::name.
CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[\w./-]+\.py(::\w+)+|[a-z_]\w*(::\w+)+")
# What a person has to fill in first: <args>, ${MODEL}, an ellipsis.
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>|\$\{?[A-Za-z_]|\.\.\.|…")
UNSAFE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


@dataclass(frozen=True)
class Promise:
    """An obligation in words; `status: proved` and the like count for nothing and are not kept."""

    id: str
    text: str
    type: str = ""
    formal: str = ""
    tolerance: str = ""
    applies_to: str = ""


@dataclass(frozen=True)
class Prose:
    """A test or a harness as written: what it is about, and what it says is to be done."""

    id: str
    text: str
    obligation: str = ""
    rule: str = ""
    line: int = 0

    @property
    def executable(self) -> bool:
        """Whether a machine could run it as it stands."""
        return is_executable(self.text)


@dataclass(frozen=True)
class Foreign:
    """A contract of the other form."""

    id: str
    version: str
    title: str
    references: tuple[str, ...]
    depends_on: tuple[str, ...]
    equations: Mapping[str, Equation]
    invariants: Mapping[str, tuple[str, ...]]  # in words, of equations
    obligations: tuple[Promise, ...]
    tests: tuple[Prose, ...]
    harnesses: tuple[Prose, ...]

    @property
    def executable(self) -> int:
        """Obligations that a test names by id, and that test is a command or a code reference as it stands."""
        named = {test.obligation for test in self.tests if test.executable}
        return sum(o.id in named for o in self.obligations)


def is_executable(text: str) -> bool:
    """A code reference alone, or command lines alone: each line that is not a comment or the rest of the one before
    begins with a program and leaves nothing to fill in. Whether its exit code judges anything is not asked."""
    if CODE.fullmatch(text.strip()):
        return True
    lines: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("#") or not line.strip():
            continue
        if lines and line[0].isspace():
            lines[-1].append(line)
        else:
            lines.append([line])
    return bool(lines) and all(_is_command(" ".join(parts)) for parts in lines)


def _is_command(line: str) -> bool:
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation mark, as in don't
        return False
    known = bool(words) and (
        words[0] in PROGRAMS or bool(re.fullmatch(r"\.{0,2}/[\w./-]+", words[0]))
    )
    return known and len(words) > 1 and not PLACEHOLDER.search(line)


# ---- the shape -------------------------------------------------------------------------------------------

ANY = Scalar()


@dataclass(frozen=True)
class Unread:
    """Tables and gates, which promise nothing that could be tested."""

    def read(self, node: Node, path: str, where: str) -> Any:
        return node.plain()

    def schema(self) -> dict[str, Any]:
        return {}


def _record(name: str, required: Mapping[str, Kind], optional: Mapping[str, Kind]) -> RecordOf:
    keys = {key: Key(kind, "as text", True) for key, kind in required.items()}
    return RecordOf(
        _lined, {**keys, **{key: Key(kind, "as text") for key, kind in optional.items()}}, name
    )


def _lined(found: dict[str, Any], line: int) -> dict[str, Any]:
    return {**found, "line": line}


def _texts(*names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, PROSE)


METADATA = _record(
    "metadata",
    {"version": VERSION, "description": PROSE},
    {
        **_texts("created", "updated", "author"),
        "references": ListOf(PROSE),
        "depends_on": ListOf(NAME),
        "changelog": Unread(),
    },
)
EQUATION = _record(
    "an equation",
    _texts("formula"),
    {**_texts("domain", "codomain", "description", "measured"), "invariants": ListOf(PROSE)},
)
OBLIGATION = _record(
    "a proof obligation",
    _texts("type", "property"),
    {
        **_texts("formal", "applies_to", "equation", "rationale", "proof_level"),
        "id": NAME,
        "tolerance": ANY,
        "lean": Unread(),
    },
)
OWN_OBLIGATION = _record(
    "an obligation", {"id": NAME, "description": PROSE}, _texts("falsification")
)
INVARIANT = _record("an invariant", _texts("description"), _texts("formula", "note"))
TEST = _record(
    "a falsification test",
    {"id": NAME, **_texts("rule", "prediction", "test", "if_fails")},
    _texts("status", "obligation"),
)
SCENARIO = _record("a scenario", _texts("name", "given", "when", "then"), {})
SCRIPT = _record(
    "a falsification script",
    {"id": NAME, **_texts("rule", "prediction", "test_script", "if_fails")},
    {
        **_texts("contract", "obligation", "resource_estimate"),
        "depends_on": Unread(),
        "applies_to": Unread(),
    },
)
HARNESS = _record(
    "a harness",
    {"id": NAME, **_texts("obligation")},
    {**_texts("property", "strategy", "solver", "harness", "description"), "bound": ANY},
)
TABLES = (
    *(
        "qa_gate",
        "enforcement",
        "kernel_structure",
        "simd_dispatch",
        "verification_summary",
        "gap_register",
    ),
    *("bindings", "conformance", "weight_roles", "role_sets", "constraint_matrix", "architectures"),
)
CONTRACT = _record(
    "a prose contract",
    {"metadata": METADATA},
    {
        "equations": MapOf(EQUATION),
        "proof_obligations": ListOf(OBLIGATION),
        "obligations": ListOf(OWN_OBLIGATION),
        "invariants": MapOf(INVARIANT),
        "falsification_tests": ListOf(TEST),
        "falsification": ListOf(SCENARIO),
        "kani_harnesses": ListOf(HARNESS),
        **dict.fromkeys(TABLES, Unread()),
    },
)
SCRIPTS = _record("falsification scripts", {"tests": ListOf(SCRIPT, 1)}, {})
FILE_ID = Text(r"[A-Za-z][A-Za-z0-9._-]{0,99}", "a file name of letters, digits, dots, dashes")


# ---- reading ---------------------------------------------------------------------------------------------


def read_foreign(text: str, where: str) -> Foreign:
    """A contract or a file of scripts, or a ContractError that says where and what; unknown keys are refused."""
    node = read_yaml(text, where)
    id = FILE_ID.read(Node(PurePath(where).stem, 0), "file name", where)
    if isinstance(node.value, dict) and "tests" in node.value and "metadata" not in node.value:
        return _from_scripts(SCRIPTS.read(node, "file", where), id)
    found: dict[str, Any] = CONTRACT.read(node, "contract", where)
    promises = _promises(found, id)
    if not promises:
        refuse(node, "contract", where, "at least one obligation", "add proof_obligations", "none")
    for name in {p.id for p in promises if [q.id for q in promises].count(p.id) > 1}:
        refuse(node, "contract", where, "each obligation id once", "rename one", name)
    equations: dict[str, Any] = found.get("equations", {})
    return Foreign(
        id,
        found["metadata"]["version"],
        found["metadata"]["description"],
        found["metadata"].get("references", ()),
        found["metadata"].get("depends_on", ()),
        {
            n: Equation(e["formula"], e.get("domain", ""), e.get("codomain", ""))
            for n, e in equations.items()
        },
        {n: tuple(e.get("invariants", ())) for n, e in equations.items()},
        promises,
        tuple(_tests(found)),
        tuple(
            Prose(h["id"], h.get("harness", ""), h["obligation"], h.get("property", ""), h["line"])
            for h in found.get("kani_harnesses", ())
        ),
    )


def _from_scripts(found: dict[str, Any], id: str) -> Foreign:
    """Each script's prediction is an obligation; they have no version."""
    promises = tuple(Promise(t["id"], t["prediction"], "falsification") for t in found["tests"])
    tests = tuple(
        Prose(t["id"], t["test_script"], t["id"], t["rule"], t["line"]) for t in found["tests"]
    )
    return Foreign(id, "0.0.0", id.replace("_", " "), (), (), {}, {}, promises, tests, ())


def _promises(found: dict[str, Any], id: str) -> tuple[Promise, ...]:
    fresh = _fresh_ids(found, id)
    promises = [
        Promise(
            o.get("id") or fresh(),
            o["property"],
            o["type"],
            o.get("formal", ""),
            "" if o.get("tolerance") is None else str(o["tolerance"]),
            o.get("equation", o.get("applies_to", "")),
        )
        for o in found.get("proof_obligations", ())
    ]
    promises += [
        Promise(o["id"], o["description"], "obligation") for o in found.get("obligations", ())
    ]
    stated = found.get("invariants", {})
    promises += [
        Promise(fresh(), i["description"], "invariant", i.get("formula", ""))
        for i in stated.values()
    ]
    return tuple(promises)


def _fresh_ids(found: dict[str, Any], id: str) -> Callable[[], str]:
    """SM-001, SM-002, …: by the prefix of the file's own tests, else by the file's name."""
    first = next((t["id"] for t in found.get("falsification_tests", ())), "")
    match = re.fullmatch(r"FALSIFY-([A-Z][A-Z0-9-]*?)-\d+", first)
    prefix = match[1] if match else id.upper()[:80]
    taken = {
        o.get("id") for key in ("proof_obligations", "obligations") for o in found.get(key, ())
    }
    names = (name for n in range(1, 100_000) if (name := f"{prefix}-{n:03d}") not in taken)
    return lambda: next(names)


def _tests(found: dict[str, Any]) -> Iterator[Prose]:
    for t in found.get("falsification_tests", ()):
        yield Prose(
            t["id"],
            t["test"],
            t.get("obligation", ""),
            f"{t['rule']}: {t['prediction']}",
            t["line"],
        )
    for o in found.get("obligations", ()):
        if "falsification" in o:
            yield Prose(f"{o['id']}-falsification", o["falsification"], o["id"], "", o["line"])
    for s in found.get("falsification", ()):
        yield Prose(
            s["name"], f"given {s['given']}; when {s['when']}; then {s['then']}", "", "", s["line"]
        )


# ---- writing ---------------------------------------------------------------------------------------------


def to_ours(foreign: Foreign) -> str:
    """YAML of our form: every obligation in words, no claim, so that it stands as unbound until someone binds it."""
    lines = [
        f"id: {quote(foreign.id)}",
        f"version: {quote(foreign.version)}",
        f"title: {quote(foreign.title)}",
    ]
    for key in ("references", "depends_on"):
        # dict.fromkeys: the other form may name a dependency twice
        if words := [w for w in dict.fromkeys(getattr(foreign, key)) if w != foreign.id]:
            lines += [f"{key}:", *(f"  - {quote(word)}" for word in words)]
    if foreign.equations:
        lines.append("equations:")
    for name, equation in foreign.equations.items():
        lines += [f"  {quote(name)}:", f"    formula: {quote(equation.formula)}"]
        lines += [
            f"    {k}: {quote(v)}" for k in ("domain", "codomain") if (v := getattr(equation, k))
        ]
        lines += [f"    # invariant: {quote(said)}" for said in foreign.invariants.get(name, ())]
    lines.append("obligations:")
    for promise in foreign.obligations:
        lines += [f"  - id: {quote(promise.id)}", f"    text: {quote(_in_words(promise))}"]
        if promise.applies_to in foreign.equations and re.fullmatch(
            NAME.pattern, promise.applies_to
        ):
            lines.append(f"    equation: {quote(promise.applies_to)}")
    for what, told in (("test", foreign.tests), ("harness", foreign.harnesses)):
        for prose in told:
            of = f" of {quote(prose.obligation)}" if prose.obligation else ""
            lines.append(
                f"# {what} {quote(prose.id)}{of}: {quote(prose.rule)}; {quote(prose.text)}"
            )
    return "\n".join(lines) + "\n"


def _in_words(promise: Promise) -> str:
    formal = f"; {promise.formal}" if promise.formal else ""
    tolerance = f" (tolerance {promise.tolerance})" if promise.tolerance else ""
    return f"[{promise.type}] {promise.text}{formal}{tolerance}"


def quote(text: str) -> str:
    """A YAML scalar in double quotes: JSON's, with what YAML takes for a line break or refuses written as an escape."""
    return UNSAFE.sub(_escape, json.dumps(text, ensure_ascii=False))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
