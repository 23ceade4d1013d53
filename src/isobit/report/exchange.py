"""Verdicts in the forms that other tools read: JUnit XML and SARIF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from isobit.records import ClaimRecord, ContractStatus

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def said_of(claim: ClaimRecord) -> str:
    """One line about a claim, with its denominators."""
    said = f"{claim.verdict}: {claim.differing:,} of {claim.compared:,} differ, {claim.inputs:,} inputs, L{claim.level}"
    return ". ".join(part for part in (said, claim.detail, claim.replay and f"replay: {claim.replay}") if part)


def plain(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return "".join(c for c in text if c >= " " or c in "\n\t")


def as_junit(contracts: Sequence[ContractStatus]) -> str:
    """A suite a contract, a case a claim; what is not kept is a failure, what could not run an error."""
    suites = []
    for contract in contracts:
        cases = []
        for claim in contract.claims:
            inner = ""
            if claim.verdict != "kept":
                tag = "error" if claim.verdict == "could-not-run" else "failure"
                said = plain(said_of(claim))
                inner = f"<{tag} type={quoteattr(claim.verdict)} message={quoteattr(said[:500])}>{escape(said)}</{tag}>"
            head = f'<testcase classname={quoteattr(contract.id)} name={quoteattr(claim.claim)} time="{claim.seconds}">'
            cases.append(f"    {head}{inner}</testcase>")
        if contract.verdict != "kept" and all("<failure" not in c and "<error" not in c for c in cases):
            said = quoteattr(plain(contract.detail or contract.verdict))
            cases.append(
                f'    <testcase classname={quoteattr(contract.id)} name="contract"><error message={said}/></testcase>'
            )
        failed = sum("<failure" in c for c in cases)
        errors = sum("<error" in c for c in cases)
        head = f'  <testsuite name={quoteattr(contract.id)} tests="{len(cases)}" failures="{failed}" errors="{errors}">'
        suites.append("\n".join([head, *cases, "  </testsuite>"]))
    return "\n".join(
        ['<?xml version="1.0" encoding="UTF-8"?>', '<testsuites name="isobit">', *suites, "</testsuites>\n"]
    )


def as_sarif(contracts: Sequence[ContractStatus], version: str) -> str:
    """A result for every claim that is not kept, at its contract's file."""
    results = []
    for contract in contracts:
        found = [(f"{contract.id}/{c.claim}", c.verdict, said_of(c)) for c in contract.claims if c.verdict != "kept"]
        if contract.verdict != "kept" and not found:  # silence would read as a pass
            found = [(contract.id, contract.verdict, f"{contract.verdict}: {contract.detail}")]
        for rule, verdict, said in found:
            results.append(
                {
                    "ruleId": rule,
                    "level": "note" if verdict == "waived" else "error",
                    "message": {"text": said},
                    "locations": [{"physicalLocation": {"artifactLocation": {"uri": contract.path}}}],
                }
            )
    tool = {"driver": {"name": "isobit", "version": version, "rules": [{"id": r["ruleId"]} for r in results]}}
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [{"tool": tool, "results": results}]}, indent=2)
