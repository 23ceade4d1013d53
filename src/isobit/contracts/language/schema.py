"""The contract file format: its records, the keys they may have, and the parameters of each relation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobit.contracts.language.contract import (
    Claim,
    Contract,
    Equation,
    Inputs,
    Obligation,
    ProofPlan,
    Waiver,
)
from isobit.contracts.language.grammar import (
    Choice,
    Date,
    Key,
    Kind,
    ListOf,
    MapOf,
    Node,
    Number,
    RecordOf,
    Scalar,
    Text,
    refuse,
    suggest,
)

LEVELS = ("L0", "L1", "L2", "L3", "L4")
DTYPES = ("float32", "bfloat16", "float16", "float64")
VALUES = ("normal", "wide", "large", "logits", "unit", "positive", "cancelling")
EDGES = ("zeros", "subnormals", "infinities", "nans", "ties", "huge", "tiny", "empty", "single")
UNITS = ("ulp", "abs", "rel", "norm")
TRANSFORMS = (
    "batch",
    "position",
    "neighbours",
    "padding",
    "chunking",
    "packing",
    "cache",
    "layout",
    "threads",
)
ENGINES = ("enumeration", "order", "z3", "bitwuzla", "interval", "compiled")

NAME = Text(r"[A-Za-z][A-Za-z0-9._-]{0,99}", "a name of letters, digits, dots, dashes")
REFERENCE = Text(
    r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z]\w*(\.[A-Za-z]\w*)*",
    "code as package:function (no leading underscore)",
)
VERSION = Text(r"[0-9]{1,6}\.[0-9]{1,6}\.[0-9]{1,6}", "a version as 1.0.0")
PROSE = Text()
CAUSES = Text("", "text of 1 to 1,000 characters", 1000)


@dataclass(frozen=True)
class TransformWord:
    """A built-in transform by name, or the user's own as package:function."""

    def read(self, node: Node, path: str, where: str) -> str:
        kind: Kind = REFERENCE if ":" in str(node.value) else Choice(TRANSFORMS)
        return kind.read(node, path, where)  # type: ignore[no-any-return]

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [Choice(TRANSFORMS).schema(), REFERENCE.schema()]}


@dataclass(frozen=True)
class OneOrMore:
    """A value, or a list of values."""

    kind: Kind

    def read(self, node: Node, path: str, where: str) -> tuple[Any, ...]:
        many = ListOf(self.kind, 1)
        return many.read(
            node if isinstance(node.value, list) else Node([node], node.line), path, where
        )

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.kind.schema(), ListOf(self.kind, 1).schema()]}


MOST_SIZES = 100_000


@dataclass(frozen=True)
class SizeList:
    """Integers, and ranges such as 1..257."""

    def read(self, node: Node, path: str, where: str) -> tuple[int, ...]:
        words: tuple[int | str, ...] = ListOf(Scalar(), 1).read(node, path, where)
        found: list[int] = []
        for word in words:
            match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", str(word))
            if match is None or not 0 <= (
                more := int(match[2] or match[1]) - int(match[1])
            ) < MOST_SIZES - len(found):
                expected = f"whole numbers, or runs as 1..257, at most {MOST_SIZES:,} of them"
                refuse(node, path, where, expected, "write sizes", repr(word))
            found += range(int(match[1]), int(match[1]) + more + 1)
        return tuple(found)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "minItems": 1, "items": {"type": ["integer", "string"]}}


LIMIT = Key(Number(0.0), "the largest error allowed", True)
UNIT = Key(
    Choice(UNITS),
    "of the limit: ulp of the result, abs, rel(ative), norm (relative to the row's largest)",
    True,
)
AGAINST = Key(REFERENCE, "the reference as package:function", True)
OF = Key(NAME, "output (default), or the argument whose gradient is judged")

# The parameters of each relation, besides the keys that every claim has.
RELATIONS: dict[str, dict[str, Key]] = {
    "invariant": {"under": Key(ListOf(TransformWord(), 1), "what must not matter", True), "of": OF},
    "accurate": {"against": AGAINST, "limit": LIMIT, "unit": UNIT, "of": OF},
    "parity": {
        "against": AGAINST,
        "limit": Key(Number(0.0), "the largest difference allowed; without it, bits must agree"),
        "unit": Key(Choice(UNITS), "of the limit"),
    },
    "gradient": {
        "of": Key(NAME, "the argument", True),
        "against": AGAINST,
        "limit": LIMIT,
        "unit": UNIT,
    },
    "bound": {
        "low": Key(Number(), "outputs are at least this"),
        "high": Key(Number(), "outputs are at most this"),
    },
    "sums_to": {"total": Key(Number(), "of the last axis", True), "limit": LIMIT},
    "monotone": {"argument": Key(NAME, "whose order along the last axis is kept", True)},
    "roundtrip": {"inverse": Key(REFERENCE, "undoes the subject, bit for bit", True)},
    "refuses": {
        "error": Key(REFERENCE, "the exception that must be raised", True),
        "calls": Key(
            REFERENCE, "yields (description, positional, keyword) of calls that must raise", True
        ),
    },
    "launches": {
        "loads": Key(Number(1, whole=True), "how often the kernel's binary may be loaded", True)
    },
    "algebra": {
        "predicate": Key(REFERENCE, "(subject, **integers) -> bool", True),
        "integers": Key(
            MapOf(ListOf(Scalar(), 2), 1), "name: [low, high], null for no limit", True
        ),
        "draw": Key(
            REFERENCE, "(random.Random) -> dict of integers, to draw the integers that matter"
        ),
    },
    "certified": {
        "targets": Key(ListOf(NAME, 1), "GPUs to compile for, such as sm_90", True),
        "rows": Key(SizeList(), "row counts, passed to the subject as rows"),
        "vary": Key(
            MapOf(ListOf(Scalar(), 1), 1), "parameter of the subject: the values that it may have"
        ),
    },
    "holds": {"predicate": Key(REFERENCE, "(subject, case, tally) -> None", True)},
}


def _claim_keys(node: Node) -> Mapping[str, Key]:
    relation = node.value.get("relation") if isinstance(node.value, dict) else None
    return RELATIONS.get(str(relation.value), {}) if relation is not None else {}


CLAIM_KEYS = {
    "id": Key(NAME, "unique in the contract", True),
    "obligations": Key(ListOf(NAME, 1), "the obligations that this claim makes executable", True),
    "relation": Key(Choice(tuple(RELATIONS)), "what is compared with what", True),
    "level": Key(Choice(LEVELS[2:]), "the rung that the claim must reach", True),
    "text": Key(PROSE, "in words"),
    "inputs": Key(
        OneOrMore(NAME),
        "one or several of the contract's inputs; the first also serves L3 and sabotage",
    ),
    "sabotage": Key(
        ListOf(Text(), 0), "planted wrong subjects: built-in names or package:function"
    ),
    "control": Key(ListOf(REFERENCE), "subjects that must break the claim, such as stock kernels"),
    "if_fails": Key(CAUSES, "likely causes, and what to look at first; shown if it is broken"),
}


def _split_params(found: dict[str, Any], line: int) -> Claim:
    own = {key: found.pop(key) for key in list(found) if key not in CLAIM_KEYS and key != "proof"}
    return Claim(**found, params=own, line=line)


def _plainly(record: type) -> Any:
    return lambda found, line: record(**found)


def _with_line(record: type) -> Any:
    return lambda found, line: record(**found, line=line)


PROOF = RecordOf(
    _plainly(ProofPlan),
    {
        "engine": Key(Choice(ENGINES), "what proves it", True),
        "planted": Key(
            Text(),
            "a wrong subject for which the proof must fail: built-in name or package:function",
            True,
        ),
        "by": Key(REFERENCE, "(subject) -> isobit.foundation.records.Proof"),
        "inputs": Key(NAME, "for enumeration: inputs whose every value is tried"),
    },
    "a proof",
)
CLAIM = RecordOf(
    _split_params, {**CLAIM_KEYS, "proof": Key(PROOF, "for L4")}, "a claim", _claim_keys
)
SIZES = MapOf(SizeList())
INPUTS = RecordOf(
    _plainly(Inputs),
    {
        "arguments": Key(
            MapOf(ListOf(Scalar())),
            "name: [sizes of its axes], in the order the subject takes them",
            True,
        ),
        "sizes": Key(SIZES, "size name: the values it is tried at", True),
        "dtypes": Key(ListOf(Choice(DTYPES), 1), "of all arguments (default float32)"),
        "values": Key(Choice(VALUES), "how values are drawn (default normal)"),
        "edges": Key(ListOf(Choice(EDGES)), "patterns written over drawn values"),
        "rows": Key(NAME, "the size that counts independent rows"),
        "options": Key(MapOf(Scalar()), "keyword arguments, which are not drawn"),
        "thorough": Key(SIZES, "sizes for --thorough"),
    },
    "inputs",
)
EQUATION = RecordOf(
    _plainly(Equation),
    {
        "formula": Key(PROSE, "what is computed", True),
        "domain": Key(PROSE, "on what"),
        "codomain": Key(PROSE, "giving what"),
    },
    "an equation",
)
OBLIGATION = RecordOf(
    _with_line(Obligation),
    {
        "id": Key(NAME, "unique in the contract", True),
        "text": Key(PROSE, "the promise in words", True),
        "equation": Key(NAME, "one of the contract's equations"),
    },
    "an obligation",
)
WAIVER = RecordOf(
    _with_line(Waiver),
    {
        "claim": Key(NAME, "the claim that is waived", True),
        "reason": Key(PROSE, "why", True),
        "owner": Key(PROSE, "who is responsible", True),
        "expires": Key(Date(), "the last day it is valid", True),
    },
    "a waiver",
)
CONTRACT = RecordOf(
    _plainly(Contract),
    {
        "id": Key(NAME, "unique in the tree, as softmax-kernel-v1", True),
        "version": Key(VERSION, "of the contract, as 1.0.0", True),
        "title": Key(PROSE, "in one line", True),
        "subject": Key(REFERENCE, "the code that is judged"),
        "subjects": Key(
            MapOf(REFERENCE), "other code to try it on: `isobit verify --subject NAME`"
        ),
        "call": Key(
            REFERENCE,
            "(subject, *arguments) -> output: makes the subject's arguments of drawn ones",
        ),
        "operator": Key(Text(r"\w+::\w+", "namespace::name"), "the torch operator, for opcheck"),
        "output": Key(ListOf(Scalar()), "the sizes of the output's axes, for L1"),
        "depends_on": Key(ListOf(NAME), "ids of contracts that this one depends on"),
        "references": Key(ListOf(PROSE), "papers, issues"),
        "equations": Key(MapOf(EQUATION), "name: formula, domain, codomain"),
        "obligations": Key(ListOf(OBLIGATION, 1), "what is promised", True),
        "inputs": Key(MapOf(INPUTS), "name: what claims draw from"),
        "claims": Key(ListOf(CLAIM), "the promises, executable"),
        "waivers": Key(ListOf(WAIVER), "claims not kept for now"),
    },
    "a contract",
)


def nearest(word: str, known: tuple[str, ...]) -> str:
    """Suggest a name that the file itself defines."""
    return suggest(word, known) if known else "the contract defines none"
