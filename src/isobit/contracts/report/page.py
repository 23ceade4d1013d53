"""A self-contained HTML page of contracts and their evidence: totals, ladder, graph, and each claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isobit.contracts.report.graph import as_svg
from isobit.foundation.records import (
    RUNGS,
    ClaimRecord,
    ContractStatus,
    Planted,
    Provenance,
    Section,
)
from isobit.report.markup import escape, tone_of
from isobit.report.pages import write_document

# The HTML and style sheet of the page of contracts.

STYLE = """
:root{color-scheme:light dark;--ink:#20252d;--quiet:#667080;--line:#dfe3e9;--panel:#f7f8fa;--card:#fff;
--good:#237a4b;--warn:#956f00;--mute:#6b7280;--bad:#b3261e;--link:#2f5f98}
@media (prefers-color-scheme:dark){:root{--ink:#dde1e8;--quiet:#98a2b3;--line:#343b47;--panel:#1b1f27;--card:#14171d;
--good:#5cc08a;--warn:#d9b13b;--mute:#9aa3b2;--bad:#f2837b;--link:#8db9ee}}
body{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1120px;margin:2rem auto;padding:0 1rem;
color:var(--ink);background:var(--card)}
h1{font-size:1.5rem;margin:0 0 .8rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
h3{font-size:.8rem;margin:1.4rem 0 .4rem;color:var(--quiet);text-transform:uppercase;letter-spacing:.06em}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}p{margin:.3rem 0}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.6rem;margin:0}
.numbers div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}
.numbers dt{color:var(--quiet);font-size:.82rem}.numbers dd{margin:0;font-size:1.1rem;font-weight:600}
.numbers small{font-weight:400;color:var(--quiet);font-size:.85rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.4rem .7rem .4rem 0;vertical-align:middle}
tr{border-bottom:1px solid var(--line)}th{color:var(--quiet);font-weight:500;font-size:.82rem}
.good{--tone:var(--good)}.warn{--tone:var(--warn)}.mute{--tone:var(--mute)}.bad{--tone:var(--bad)}
.chip{display:inline-block;color:var(--tone);border:1px solid currentColor;border-radius:99px;padding:0 .6rem;
font-size:.8rem;line-height:1.45rem;font-weight:600;white-space:nowrap;
background:color-mix(in srgb,var(--tone) 10%,transparent)}
.rungs{display:inline-flex;gap:3px;vertical-align:middle}
.rungs i{font:600 .7rem/1.35rem ui-sans-serif,system-ui,sans-serif;width:2.1rem;text-align:center;border-radius:4px;
color:var(--quiet);background:var(--panel);box-shadow:inset 0 0 0 1px var(--line)}
.rungs .full{background:var(--tone);color:var(--card);box-shadow:none}
.rungs .required{outline:2px solid var(--ink);outline-offset:1px}
.quiet{color:var(--quiet);font-size:.88rem}
.graph{overflow:auto;border:1px solid var(--line);border-radius:8px;background:var(--panel);text-align:center}
.graph rect{fill:var(--card)}.graph text:not([fill]){fill:var(--ink)}
details.contract{border:1px solid var(--line);border-left:4px solid var(--tone);border-radius:8px;margin:.7rem 0;
padding:.6rem 1rem}
summary{cursor:pointer}details.contract>summary{display:flex;gap:.8rem;align-items:center;flex-wrap:wrap}
summary b{font-size:1.02rem}summary span.quiet{flex:1 1 16rem}
.place{scroll-margin-top:5rem;padding-top:.5rem;overflow-wrap:anywhere}
code,pre,.formula{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
.formula{background:var(--panel);border-radius:6px;padding:.4rem .7rem;margin:.3rem 0;overflow-wrap:anywhere}
.obligation{margin:1.1rem 0 .4rem}
.claim{border:1px solid var(--line);border-left:3px solid var(--tone);border-radius:6px;padding:.5rem .8rem;
margin:.5rem 0 .5rem .8rem}
.claim header{display:flex;gap:.7rem;align-items:center;flex-wrap:wrap}.claim header code{color:var(--quiet)}
.claim p,.claim ul{margin:.35rem 0;overflow-wrap:anywhere}ul{padding-left:1.1rem}
.claim details{margin:.35rem 0}.tone{color:var(--tone);font-weight:600}
pre{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:.5rem .7rem;margin:.35rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}
.wide{overflow-x:auto}
"""
BODY = """{numbers}
<h2>The ladder</h2>{ladder}
<h2>Dependencies</h2><div class="graph">{graph}</div>
<h2>Contracts</h2>{contracts}"""


OPEN = ("broken", "void", "vacuous")  # shown open


def draw_contracts(
    contracts: Sequence[ContractStatus],
    sections: Mapping[str, Sequence[Section]],
    title: str,
    origin: Provenance | None = None,
) -> str:
    """Return the page; `sections` are the words of each contract by id."""
    ladder = "".join(_row(contract, claims_of(contract, sections)) for contract in contracts)
    rungs = "".join(f"<li><b>L{level}</b> {words}" for level, words in enumerate(RUNGS.values()))
    legend = (
        f'<details class="quiet"><summary>What the levels mean</summary><ul>{rungs}</ul></details>'
    )
    names = ("contract", "level (outlined: required)", "verdict", "claims kept", "sabotage caught")
    heads = f"<tr>{''.join(f'<th>{name}' for name in names)}</tr>"
    body = BODY.format(
        numbers=_numbers(contracts, sections),
        ladder=f'<div class="wide"><table>{heads}{ladder}</table></div>{legend}',
        graph=as_svg(contracts),
        contracts="".join(
            _contract(contract, sections.get(contract.id, ())) for contract in contracts
        ),
    )
    return write_document(
        title,
        STYLE,
        body,
        origin,
    )


def _numbers(contracts: Sequence[ContractStatus], sections: Mapping[str, Sequence[Section]]) -> str:
    claims = [claim for contract in contracts for claim in contract.claims]
    named = sum(claims_of(contract, sections) for contract in contracts)
    planted = [p for claim in claims for p in claim.planted]
    compared, differing = (
        sum(claim.compared for claim in claims),
        sum(claim.differing for claim in claims),
    )
    cells = (
        ("contracts kept", _of(sum(c.verdict == "kept" for c in contracts), len(contracts))),
        ("claims kept", _of(sum(is_kept(claim) for claim in claims), named)),
        ("sabotage caught", _of(sum(p.caught for p in planted), len(planted))),
        ("inputs", f"{sum(claim.inputs for claim in claims):,}"),
        ("elements compared", f"{compared:,}"),
        ("of them differ", f"{differing:,}"),
    )
    return (
        '<dl class="numbers">'
        + "".join(f"<div><dt>{word}<dd>{value}</div>" for word, value in cells)
        + "</dl>"
    )


def claims_of(contract: ContractStatus, sections: Mapping[str, Sequence[Section]]) -> int:
    """Return the number of claims, including those that were never judged and have no record."""
    named = {section.name for section in sections.get(contract.id, ()) if section.kind == "claim"}
    return len(named | {claim.claim for claim in contract.claims})


def is_kept(claim: ClaimRecord) -> bool:
    """Return whether a claim is kept at the level that it must reach."""
    return claim.verdict == "kept" and claim.level >= claim.required


def _of(some: int, all: int) -> str:
    return f"{some:,} <small>of {all:,}</small>"


def _row(contract: ContractStatus, claims: int) -> str:
    kept = sum(is_kept(claim) for claim in contract.claims)
    planted = [p for claim in contract.claims for p in claim.planted]
    cells = (
        f'<a href="#{escape(contract.id)}">{escape(contract.id)}</a>',
        _rungs(contract.level, contract.required, contract.verdict),
        _chip(contract.verdict),
        f"{kept} of {claims}",
        f"{sum(p.caught for p in planted)} of {len(planted)}",
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"


def _rungs(level: int, required: int, verdict: str) -> str:
    reached = -1 if verdict == "unbound" else level
    cells = []
    for rung, words in enumerate(RUNGS.values()):
        kinds = " ".join(["full"] * (rung <= reached) + ["required"] * (rung == required))
        cells.append(f'<i class="{kinds}" title="L{rung}: {words}">L{rung}</i>')
    label = f'aria-label="L{level} reached, L{required} required"'
    return f'<span class="rungs {tone_of(verdict)}" role="img" {label}>{"".join(cells)}</span>'


def _chip(verdict: str, words: str = "") -> str:
    return f'<span class="chip {tone_of(verdict)}">{escape(words or verdict)}</span>'


def _contract(contract: ContractStatus, sections: Sequence[Section]) -> str:
    records = {claim.claim: claim for claim in contract.claims}
    by_kind: dict[str, list[Section]] = {}
    for section in sections:
        by_kind.setdefault(section.kind, []).append(section)
    shown: set[str] = set()
    promises = []
    for section in sections:
        if section.kind == "obligation":
            promises.append(_obligation(section))
        elif section.kind == "claim":
            again = section.name in shown
            promises.append(
                _seen(section.name) if again else _claim(records.get(section.name), section)
            )
            shown.add(section.name)
    promises += [_claim(record, None) for record in contract.claims if record.claim not in shown]
    parts = (
        "".join(f"<ul>{_lines(section.lines, 'li')}</ul>" for section in by_kind.get("about", ())),
        _equations(by_kind.get("equation", ())),
        f"<h3>Obligations and claims</h3>{''.join(promises)}" if promises else "",
        _waivers(by_kind.get("waiver", ())),
        _inputs(by_kind.get("inputs", ())),
    )
    opened = " open" if contract.verdict in OPEN else ""
    detail = f"<p>{escape(contract.detail)}" if contract.detail and not by_kind.get("about") else ""
    # The anchor is inside, so that following a link opens the details.
    return (
        f'<details class="contract {tone_of(contract.verdict)}"{opened}><summary><b>{escape(contract.id)}</b>'
        f'<span class="quiet">{escape(contract.title)}</span>'
        f"{_rungs(contract.level, contract.required, contract.verdict)}{_chip(contract.verdict)}</summary>"
        f'<div class="place" id="{escape(contract.id)}">{detail}{"".join(parts)}'
        f'<p class="quiet">{escape(contract.path)}, version {escape(contract.version)}, '
        f"digest <code>{escape(contract.digest or 'none')}</code></div></details>"
    )


def _lines(lines: Iterable[str], tag: str, kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return "".join(f"<{tag}{classes}>{escape(line)}</{tag}>" for line in lines)


def _equations(sections: Sequence[Section]) -> str:
    shown = "".join(
        f'<div class="formula"><b>{escape(s.name)}</b><br>{"<br>".join(map(escape, s.lines))}</div>'
        for s in sections
    )
    return f"<h3>Equations</h3>{shown}" if sections else ""


def _waivers(sections: Sequence[Section]) -> str:
    shown = "".join(
        f"<p><b>{escape(s.title)}</b>: {escape(' '.join(s.lines))}</p>" for s in sections
    )
    return f"<h3>Waivers</h3>{shown}" if sections else ""


def _inputs(sections: Sequence[Section]) -> str:
    shown = "".join(f"<li><b>{escape(s.name)}</b>: {escape('; '.join(s.lines))}" for s in sections)
    count = f"<summary>{len(sections)} that claims draw from</summary>"
    return f"<h3>Inputs</h3><details>{count}<ul>{shown}</ul></details>" if sections else ""


def _obligation(section: Section) -> str:
    text, *status = section.lines or ("",)
    quiet = _lines(status, "span", "quiet")
    return f'<p class="obligation"><b>{escape(section.name)}</b> {escape(text)} {quiet}</p>'


def _seen(claim: str) -> str:
    return f'<p class="claim mute quiet">claim <b>{escape(claim)}</b>: shown above</p>'


def _claim(record: ClaimRecord | None, section: Section | None) -> str:
    if record is None:
        assert section is not None
        head = f"<header><b>{escape(section.name)}</b>{_chip('not-judged')}</header>"
        return f'<div class="claim mute">{head}{_lines(section.lines, "p")}</div>'
    sentence = (
        section.lines[0].removeprefix(f"{record.claim}: ") if section and section.lines else ""
    )
    counts = (
        f"<b>{record.differing:,}</b> of <b>{record.compared:,}</b> compared differ, in {record.cases:,} cases of "
        f"{record.inputs:,} inputs, {record.seconds:.1f} s"
    )
    verdict = "below-level" if record.verdict == "kept" and not is_kept(record) else record.verdict
    words = f"kept to L{record.level} only" if verdict != record.verdict else verdict
    return (
        f'<div class="claim {tone_of(verdict)}"><header><b>{escape(record.claim)}</b>{_chip(verdict, words)}'
        f"{_rungs(record.level, record.required, verdict)}<code>{escape(record.relation)}</code></header>"
        f'{_lines([sentence] if sentence else [], "p")}<p class="quiet">{counts}</p>'
        f"{_planted(record.planted)}{_proof(record)}{_found(record)}</div>"
    )


def _planted(planted: Sequence[Planted]) -> str:
    if not planted:
        return '<p class="quiet">Sabotage: none was tried</p>'
    items = "".join(
        f'<li><span class="tone {"good" if p.caught else "bad"}">{"caught" if p.caught else "missed"}</span> '
        f'{escape(p.name)} <span class="quiet">{escape(p.detail)}</span>'
        for p in sorted(planted, key=lambda p: p.caught)
    )
    caught = sum(p.caught for p in planted)
    opened = "" if caught == len(planted) else " open"
    return f"<details{opened}><summary>Sabotage: {caught} of {len(planted)} caught</summary><ul>{items}</ul></details>"


def _proof(record: ClaimRecord) -> str:
    proof = record.proof
    if proof is None:
        return ""
    word, tone = ("Proved", "good") if proof.kept else ("Not proved", "bad")
    failure = f"<pre>{escape(proof.failure)}</pre>" if proof.failure else ""
    covers = escape(proof.covers or "nothing")
    return (
        f'<p><span class="tone {tone}">{word}</span> by <b>{escape(proof.engine)}</b>, {proof.cases:,} cases; '
        f"covers {covers}</p>{failure}"
    )


def _found(record: ClaimRecord) -> str:
    """Write the counter-example or the reason for no verdict, likely causes, and the command that shows it again."""
    repeated = record.proof is not None and record.detail == record.proof.failure
    detail = f"<pre>{escape(record.detail)}</pre>" if record.detail and not repeated else ""
    replay = (
        f'<p class="quiet">Show it again:</p><pre>{escape(record.replay)}</pre>'
        if record.replay
        else ""
    )
    causes = f"<p><b>Likely causes:</b> {escape(record.if_fails)}</p>" if record.if_fails else ""
    return detail + causes + replay
