"""Write verdicts for other tools, as JUnit XML and SARIF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax import saxutils

from isobit.foundation.plain_text import one_line, plain
from isobit.foundation.records import ClaimRecord, ContractStatus, Provenance
from isobit.report.markup import escape, facts_of

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def describe(claim: ClaimRecord) -> str:
    """Describe a claim in one line, with its counts."""
    text = f"{claim.verdict}: {claim.differing:,} of {claim.compared:,} differ, {claim.inputs:,} inputs, L{claim.level}"
    parts = (
        text,
        claim.detail,
        claim.if_fails and f"likely causes: {claim.if_fails}",
        claim.replay and f"replay: {claim.replay}",
    )
    return plain(". ".join(part for part in parts if part))


def quoteattr(text: str) -> str:
    """Quote an attribute of XML, without characters that XML cannot contain."""
    return saxutils.quoteattr(one_line(text))


def as_junit(contracts: Sequence[ContractStatus], origin: Provenance | None = None) -> str:
    """Write a suite per contract and a case per claim; not kept is a failure, could not run an error."""
    facts = facts_of(origin) if origin else ()
    notes = [
        f"      <property name={quoteattr(name)} value={quoteattr(value)}/>"
        for name, value in facts
    ]
    about = ["    <properties>", *notes, "    </properties>"] if notes else []
    suites = []
    for contract in contracts:
        cases = []
        for claim in contract.claims:
            inner = ""
            if claim.verdict != "kept":
                tag = "error" if claim.verdict == "could-not-run" else "failure"
                text = describe(claim)
                inner = f"<{tag} type={quoteattr(claim.verdict)} message={quoteattr(text[:500])}>{escape(text)}</{tag}>"
            head = f'<testcase classname={quoteattr(contract.id)} name={quoteattr(claim.claim)} time="{claim.seconds}">'
            cases.append(f"    {head}{inner}</testcase>")
        if contract.verdict != "kept" and all(
            "<failure" not in c and "<error" not in c for c in cases
        ):
            text = quoteattr(contract.detail or contract.verdict)
            cases.append(
                f'    <testcase classname={quoteattr(contract.id)} name="contract"><error message={text}/></testcase>'
            )
        failed = sum("<failure" in c for c in cases)
        errors = sum("<error" in c for c in cases)
        head = f'  <testsuite name={quoteattr(contract.id)} tests="{len(cases)}" failures="{failed}" errors="{errors}">'
        suites.append("\n".join([head, *about, *cases, "  </testsuite>"]))
    start = ['<?xml version="1.0" encoding="UTF-8"?>', '<testsuites name="isobit">']
    return "\n".join([*start, *suites, "</testsuites>\n"])


def as_sarif(contracts: Sequence[ContractStatus], origin: Provenance) -> str:
    """Write a result for every claim that is not kept, at its contract's file; likely causes are the rule's help."""
    results = []
    causes = {
        one_line(f"{contract.id}/{claim.claim}"): plain(claim.if_fails)
        for contract in contracts
        for claim in contract.claims
        if claim.if_fails
    }
    for contract in contracts:
        found = [
            (f"{contract.id}/{c.claim}", c.verdict, describe(c))
            for c in contract.claims
            if c.verdict != "kept"
        ]
        if contract.verdict != "kept" and not found:  # an empty result would read as a pass
            found = [
                (contract.id, contract.verdict, plain(f"{contract.verdict}: {contract.detail}"))
            ]
        for rule, verdict, text in found:
            results.append(
                {
                    "ruleId": one_line(rule),
                    "level": "note" if verdict == "waived" else "error",
                    "message": {"text": text},
                    "locations": [
                        {"physicalLocation": {"artifactLocation": {"uri": one_line(contract.path)}}}
                    ],
                }
            )
    names = [str(r["ruleId"]) for r in results]
    rules = [
        {"id": name} | ({"help": {"text": causes[name]}} if name in causes else {})
        for name in names
    ]
    call = {
        "commandLine": one_line(origin.command),
        "endTimeUtc": origin.date.replace("+00:00", "Z"),
        "executionSuccessful": True,
    }
    run = {
        "tool": {"driver": {"name": "isobit", "version": origin.isobit, "rules": rules}},
        "invocations": [call],
        "properties": {name: one_line(value) for name, value in facts_of(origin)},
        "results": results,
    }
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [run]}, indent=2)
