"""The JSON schema for editors accepts what the loader accepts, and rejects misspelt keys."""

import json
import re

from isobit.contracts.language import grammar
from isobit.contracts.language.load import json_schema, parse_contract
from isobit.contracts.store.sources import ROOT
from tests.contracts.test_language import SMALL

KEYWORDS = frozenset(
    [
        "$schema",
        "title",
        "description",
        "format",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "minLength",
        "maxLength",
        "pattern",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "minimum",
    ]
)
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def accepts(schema: dict, value: object, path: str = "") -> str:
    """Return where a value does not fit, or nothing; only for the keywords that we write."""
    assert set(schema) <= KEYWORDS, set(schema) - KEYWORDS
    for word, fits in (("anyOf", lambda n: n >= 1), ("oneOf", lambda n: n == 1)):
        if word in schema and not fits(sum(not accepts(s, value) for s in schema[word])):
            return f"{path}: {word}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path}: enum"
    if "const" in schema and value != schema["const"]:
        return f"{path}: const"
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(
        isinstance(value, TYPES[t]) and (t == "boolean" or value is not True) for t in wanted
    ):
        return f"{path}: type {wanted}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"{path}: pattern"
    if isinstance(value, (int, float)) and value < schema.get("minimum", value):
        return f"{path}: minimum"
    return accepts_contents(schema, value, path)


def accepts_contents(schema: dict, value: object, path: str) -> str:
    """Do the same for the items of a list or a mapping."""
    found = []
    if isinstance(value, list):
        found = [accepts(schema.get("items", {}), v, f"{path}[{n}]") for n, v in enumerate(value)]
        if len(value) < schema.get("minItems", 0):
            found.append(f"{path}: minItems")
    if isinstance(value, dict):
        own, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        if missing := [key for key in schema.get("required", []) if key not in value]:
            return f"{path}: {missing} missing"
        if other is False and set(value) - set(own):
            return f"{path}: {set(value) - set(own)}"
        found = [accepts(own.get(k, other), v, f"{path}.{k}") for k, v in value.items()]
    return next(filter(None, found), "")


def test_the_schema_accepts_what_the_loader_accepts():
    schema = json.loads(json.dumps(json_schema()))
    ours = [path.read_text() for path in sorted(ROOT.rglob("*contract.yaml"))]
    assert ours
    for text in (SMALL, *ours):
        parse_contract(text, "x")
        assert accepts(schema, grammar.read_yaml(text, "x").plain()) == ""


def test_the_schema_refuses_misspelt_keys():
    schema = json_schema()
    for old, new in (
        ("title:", "titel:"),
        ("limit:", "limmit:"),
        ("relation: accurate", "relation: acurate"),
        ("owner: me, ", ""),
    ):
        assert accepts(schema, grammar.read_yaml(SMALL.replace(old, new, 1), "x").plain())
