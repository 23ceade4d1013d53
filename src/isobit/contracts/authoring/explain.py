"""Describe a contract in words: what it promises, and the evidence for each promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from isobit.contracts.language.contract import (
    Claim,
    Contract,
    Equation,
    Inputs,
    Obligation,
    Params,
    default_sabotage,
)
from isobit.contracts.store.ladder import contract_level, contract_verdict
from isobit.foundation.records import RUNGS, ClaimRecord, ContractStatus, Section

ENGINES = {
    "enumeration": "enumeration of every case",
    "order": "order certificate",
    "z3": "Z3",
    "bitwuzla": "Bitwuzla",
    "interval": "interval arithmetic",
}


def explain(contract: Contract, status: ContractStatus) -> tuple[Section, ...]:
    """Return sections: about, equations, obligations with their claims and evidence, inputs, waivers."""
    records = {record.claim: record for record in status.claims}
    found = [_about(contract, status)]
    found += [_equation(name, equation) for name, equation in contract.equations.items()]
    for obligation in contract.obligations:
        claims = tuple(claim for claim in contract.claims if obligation.id in claim.obligations)
        found.append(_obligation(contract, obligation, claims, records))
        found += [_claim(claim, records.get(claim.id)) for claim in claims]
    for name, inputs in contract.inputs.items():
        found.append(Section(f"inputs {name}", say_inputs(inputs), "inputs", name))
    for waiver in contract.waivers:
        words = f"{waiver.reason}; owner {waiver.owner}, until {waiver.expires}"
        found.append(Section(f"waiver of {waiver.claim}", (words,), "waiver", waiver.claim))
    return tuple(found)


def say_list(words: Sequence[object]) -> str:
    """Join words as in `a, b and c`."""
    texts = [str(word) for word in words]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def say_sizes(sizes: Sequence[int]) -> str:
    """Write sizes as contracts do: `1..257` for three or more consecutive ones."""
    runs: list[list[int]] = []
    for size in sorted(set(sizes)):
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _about(contract: Contract, status: ContractStatus) -> Section:
    lines = [
        f"judged: {status.subject or contract.subject or 'no subject, so nothing can be judged'}",
        f"depends on: {say_list(contract.depends_on) or 'no other contract'}",
        f"level L{status.level}, must reach L{status.required} ({RUNGS[f'L{status.required}']}): {status.verdict}",
    ]
    if status.detail:
        lines.append(status.detail)
    if contract.subjects:
        lines.append(
            "other subjects: " + ", ".join(f"{n} ({code})" for n, code in contract.subjects.items())
        )
    lines += [f"see {reference}" for reference in contract.references]
    return Section(
        f"{contract.id} {contract.version}: {contract.title}", tuple(lines), "about", contract.id
    )


def _equation(name: str, equation: Equation) -> Section:
    texts = (("", equation.formula), ("on ", equation.domain), ("giving ", equation.codomain))
    return Section(
        f"equation {name}", tuple(word + text for word, text in texts if text), "equation", name
    )


def _obligation(
    contract: Contract,
    obligation: Obligation,
    claims: tuple[Claim, ...],
    records: Mapping[str, ClaimRecord],
) -> Section:
    # The level of an obligation is the level of the contract reduced to it.
    alone = replace(contract, obligations=(obligation,), claims=claims)
    found = [records[claim.id] for claim in claims if claim.id in records]
    status = f"{contract_verdict(alone, found)}, at L{contract_level(alone, found)}"
    lines = (obligation.text, status if claims else f"{status}: it has no claim")
    return Section(f"obligation {obligation.id}", lines, "obligation", obligation.id)


def _claim(claim: Claim, record: ClaimRecord | None) -> Section:
    evidence = say_evidence(record) if record else ("not-judged: no evidence that counts",)
    causes = (f"if it fails: {claim.if_fails}",) if claim.if_fails else ()
    return Section(f"claim {claim.id}", (say_claim(claim), *causes, *evidence), "claim", claim.id)


def say_claim(claim: Claim) -> str:
    """Describe a claim in one sentence: promise, inputs, sabotage and level."""
    promise = say_promise(claim)
    clauses = [f"{claim.id}: {f'{claim.text} ({promise})' if claim.text else promise}"]
    if claim.inputs:
        clauses.append(f"drawn from {', '.join(claim.inputs)}")
    planted = claim.sabotage or default_sabotage(claim.relation, claim.params)
    if planted or claim.control:
        clauses.append(f"must catch {', '.join((*planted, *claim.control))}")
    proved = (
        f", proved by {ENGINES.get(claim.proof.engine, claim.proof.engine)}" if claim.proof else ""
    )
    clauses.append(f"must reach {claim.level}{proved}")
    return "; ".join(clauses)


def say_inputs(inputs: Inputs) -> tuple[str, ...]:
    """Describe inputs: shapes, sizes, dtypes, values and edges."""
    shapes = ", ".join(
        f"{name}[{', '.join(map(str, axes))}]" for name, axes in inputs.arguments.items()
    )
    sizes = "; ".join(f"{name} = {say_sizes(values)}" for name, values in inputs.sizes.items())
    options = ", ".join(f"{name}={value!r}" for name, value in inputs.options.items())
    drawn = f"{inputs.values} values in {say_list(inputs.dtypes)}"
    edges = f"edges: {', '.join(inputs.edges)}" if inputs.edges else ""
    thorough = "; ".join(
        f"{name} = {say_sizes(values)}" for name, values in inputs.thorough.items()
    )
    lines = (
        shapes,
        sizes,
        drawn,
        edges,
        options and f"with {options}",
        thorough and f"thoroughly: {thorough}",
    )
    return tuple(line for line in lines if line)


def say_promise(claim: Claim) -> str:
    """Describe what the relation of a claim promises."""
    params = claim.params
    what = judged(params)
    within = f"within {params.get('limit', 0):g} {params.get('unit', '')}".strip()
    match claim.relation:
        case "invariant":
            return f"bits of {what} do not change under {', '.join(params['under'])}"
        case "accurate" | "gradient":
            return f"{what} is {within} of {params['against']}, computed in fp64"
        case "parity":
            return f"{what} agrees with {params['against']} " + (
                within if "limit" in params else "to the bit"
            )
        case "bound":
            ends = (("at least", "low"), ("at most", "high"))
            return f"each output is {say_list([f'{words} {params[end]:g}' for words, end in ends if end in params])}"
        case "sums_to":
            return f"the last axis of the output sums to {params['total']:g} {within}"
        case "monotone":
            return f"the output does not decrease along the last axis where {params['argument']} does not"
        case "roundtrip":
            return f"{params['inverse']} brings the first argument back from the output, to the bit"
        case "refuses":
            return f"each call of {params['calls']} raises {params['error']} with a message"
        case "launches":
            loads = params["loads"]
            often = "once" if loads == 1 else f"{loads} times"
            return f"each call launches a kernel with its own sizes, of a binary that is loaded {often}"
        case "certified":
            sizes = [f"{len(params['rows'])} row counts"] if "rows" in params else []
            sizes += [
                f"{name} {', '.join(map(str, v))}" for name, v in params.get("vary", {}).items()
            ]
            return f"compiled for {', '.join(params['targets'])}, a row has one expression at {say_list(sizes)}"
        case "algebra":
            ranges = [say_range(name, *ends[:2]) for name, ends in params["integers"].items()]
            return f"{params['predicate']} is true for all {say_list(ranges)}"
        case "holds":
            return f"{params['predicate']} holds"
    return claim.relation


def say_range(name: str, low: int | None, high: int | None) -> str:
    """Write `k in 1..8`; an end that is None is infinite."""
    return f"{name} in {'−∞' if low is None else low}..{'∞' if high is None else high}"


def judged(params: Params) -> str:
    """Name what is judged: the output, or the gradient of an argument."""
    of = params.get("of", "output")
    return "the output" if of == "output" else f"the gradient of {of}"


def say_evidence(record: ClaimRecord) -> Iterator[str]:
    """Describe what was found of a claim, each number with its denominator."""
    yield (
        f"{record.verdict} at L{record.level} of L{record.required}: "
        f"{record.differing:,} of {record.compared:,} compared differ{f' (at L{record.at})' if record.at else ''}, "
        f"in {record.cases:,} cases of {record.inputs:,} inputs, {record.seconds:.1f} s"
    )
    missed = [p for p in record.planted if not p.caught]
    if record.planted:
        caught = [p.name for p in record.planted if p.caught]
        yield f"planted: {len(caught)} of {len(record.planted)} caught: {', '.join(caught) or 'none'}"
    else:
        yield "planted: none was tried"
    yield from (f"missed: {p.name}: {p.detail}" for p in missed)
    if record.proof:
        proof = record.proof
        engine = ENGINES.get(proof.engine, proof.engine)
        yield f"proof by {engine}, {proof.cases:,} cases, covers {proof.covers or 'nothing'}"
        if proof.failure:
            yield f"the proof fails: {proof.failure}"
    if record.detail:
        yield f"found: {record.detail}"
    if record.replay:
        yield f"replay: {record.replay}"
