"""Load contracts: YAML to records, with every name checked against what the file defines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isobit.contracts.language.contract import Claim, Contract
from isobit.contracts.language.grammar import MAX_BYTES, Key, RecordOf, read_yaml
from isobit.contracts.language.schema import (
    CLAIM,
    CLAIM_KEYS,
    CONTRACT,
    NAME,
    PROOF,
    RELATIONS,
    nearest,
)
from isobit.errors import ContractError
from isobit.foundation import files

# Relations that draw tensors.
DRAWING = frozenset(RELATIONS) - {"refuses", "algebra", "certified"}


def load_contract(path: Path) -> Contract:
    """Read and parse a contract file.

    Raises:
        ContractError: The file cannot be read, or is not a valid contract; it names file and line.
    """
    try:
        data = files.read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise ContractError(
            expected="a readable UTF-8 file",
            received=str(error),
            remedy="make it readable, or remove it",
            where=str(path),
        ) from None
    return replace(parse_contract(decode(data, str(path)), str(path)), path=str(path))


def decode(data: bytes, where: str) -> str:
    """Decode the bytes of a contract file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(
            expected="UTF-8", received=str(error), remedy="save it as UTF-8", where=where
        ) from None


def parse_contract(text: str, where: str) -> Contract:
    """Parse the text of a contract; `where` names it in messages."""
    node = read_yaml(text, where)
    contract: Contract = CONTRACT.read(node, "contract", where)
    _Names(contract, where).check()
    return contract


class _Names:
    """Checks that every id is unique and that every name is defined."""

    def __init__(self, contract: Contract, where: str) -> None:
        self.contract, self.where = contract, where

    def check(self) -> None:
        contract = self.contract
        obligations = tuple(o.id for o in contract.obligations)
        claims = tuple(c.id for c in contract.claims)
        for what, ids in (("obligation", obligations), ("claim", claims)):
            for name in [i for i, count in Counter(ids).items() if count > 1]:
                self.refuse(0, f"each {what} id once", name, "rename one")
        known = dict.fromkeys(
            obligations
        )  # a set that keeps its order: a contract may have thousands
        for obligation in contract.obligations:
            if obligation.equation:
                self.known(obligation.equation, contract.equations, "equation", obligation.line)
        for claim in contract.claims:
            for name in claim.obligations:
                self.known(name, known, "obligation", claim.line)
            self.check_claim(claim)
        for waiver in contract.waivers:
            self.known(waiver.claim, dict.fromkeys(claims), "claim", waiver.line)
        for name, inputs in contract.inputs.items():
            self.check_inputs(name, inputs)
        for name in contract.subjects:
            if not re.fullmatch(NAME.pattern, name):
                self.refuse(
                    0, "names of subjects of letters, digits, dots, dashes", repr(name), "rename it"
                )
        if contract.id in contract.depends_on:
            self.refuse(0, "contracts other than itself in depends_on", contract.id, "remove it")

    def check_claim(self, claim: Claim) -> None:
        if claim.relation in DRAWING:
            if not claim.inputs:
                remedy = "name one of the contract's inputs"
                self.refuse(claim.line, f"inputs of claim {claim.id}", "none", remedy)
            for name in claim.inputs:
                self.known(name, self.contract.inputs, "inputs", claim.line)
                self.check_of(claim, tuple(self.contract.inputs[name].arguments))
        if claim.relation == "bound" and not {"low", "high"} & set(claim.params):
            self.refuse(claim.line, "low, high or both", "neither", "add low or high")
        if claim.params.get("low", float("-inf")) > claim.params.get("high", float("inf")):
            self.refuse(
                claim.line, f"low of claim {claim.id} to be at most high", "more", "swap them"
            )
        if claim.relation == "parity" and ("limit" in claim.params) != ("unit" in claim.params):
            expected = f"limit and unit of claim {claim.id}, or neither"
            self.refuse(claim.line, expected, "one of them", "add the other")
        if claim.relation in ("refuses", "launches") and claim.level != "L2":
            expected = f"L2 in {claim.id}: {claim.relation} draws nothing"
            self.refuse(claim.line, expected, claim.level, "use L2")
        if claim.relation == "certified" and (
            claim.level == "L3" or not {"rows", "vary"} & set(claim.params)
        ):
            expected = f"L2 or L4 in {claim.id}, and rows, vary or both: certified draws nothing"
            received = claim.level if claim.level == "L3" else "neither rows nor vary"
            self.refuse(claim.line, expected, received, "add what may vary; L4 needs a proof")
        for name, pair in claim.params.get("integers", {}).items():
            if len(pair) != 2:
                expected = f"integers.{name}: [low, high]"
                self.refuse(claim.line, expected, f"{len(pair)} values", "null is no limit")
        if claim.level == "L4" and claim.proof is None:
            expected = f"a proof for L4 of claim {claim.id}"
            self.refuse(claim.line, expected, "none", "add proof:, or use L3")
        proof = claim.proof
        if proof is not None:
            if proof.engine == "enumeration" and not proof.by:
                self.known(proof.inputs, self.contract.inputs, "inputs", claim.line)
            elif proof.engine == "compiled" and claim.relation != "certified":
                expected = f"relation certified for engine compiled of claim {claim.id}"
                self.refuse(claim.line, expected, claim.relation, "use another engine")
            elif proof.engine not in ("z3", "compiled") and not proof.by:
                self.refuse(
                    claim.line, f"by: a function for engine {proof.engine}", "none", "name it"
                )

    def check_of(self, claim: Claim, arguments: tuple[str, ...]) -> None:
        """Check the name of an argument: misspelt, the output would be judged in place of its gradient."""
        of = str(claim.params.get("argument" if claim.relation == "monotone" else "of", "output"))
        if of not in arguments and (of != "output" or claim.relation in ("gradient", "monotone")):
            self.refuse(
                claim.line, f"of claim {claim.id}: an argument", repr(of), nearest(of, arguments)
            )

    def check_inputs(self, name: str, inputs: Any) -> None:
        for argument, axes in inputs.arguments.items():
            for axis in axes:
                if isinstance(axis, str):
                    self.known(axis, inputs.sizes, f"size in inputs.{name}.{argument}", 0)
                elif not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
                    expected = f"axes of {argument} as sizes or whole numbers"
                    self.refuse(0, expected, repr(axis), "name a size")
        first = next(iter(inputs.arguments.values()), ())
        if "empty" in inputs.edges and not inputs.rows:
            expected = f"rows: in inputs.{name}, which the edge empty sets to 0"
            self.refuse(0, expected, "none", "name the size")
        if "single" in inputs.edges and not (first and isinstance(first[-1], str)):
            expected = f"a size as last axis in inputs.{name}, for the edge single"
            self.refuse(0, expected, repr(first), "name it")
        if "output" in inputs.arguments:
            self.refuse(0, f"another name for an argument in inputs.{name}", "output", "call it x")
        for size in (inputs.rows, *inputs.thorough):
            if size:
                self.known(size, inputs.sizes, f"size in inputs.{name}", 0)

    def known(self, name: str, defined: Mapping[str, Any], what: str, line: int) -> None:
        if name not in defined:
            shown = name if len(name) <= 100 else name[:99] + "…"
            self.refuse(line, f"a known {what}", repr(shown), nearest(name, tuple(defined)))

    def refuse(self, line: int, expected: str, received: str, remedy: str) -> None:
        raise ContractError(
            expected=expected, received=received, remedy=remedy, where=self.where, line=line
        )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the format (`isobit lint --schema`), from the tables of the parser."""
    schema = CONTRACT.schema()
    variants = [_claim_schema(relation, keys) for relation, keys in RELATIONS.items()]
    schema["properties"]["claims"] = {"type": "array", "items": {"oneOf": variants}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "isobit contract",
        **schema,
    }


def _claim_schema(relation: str, keys: dict[str, Key]) -> dict[str, Any]:
    record = RecordOf(CLAIM.build, {**CLAIM_KEYS, "proof": Key(PROOF, "for L4"), **keys}, "a claim")
    schema = record.schema()
    schema["properties"]["relation"] = {"const": relation}
    return schema
