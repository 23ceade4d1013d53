"""The graph of contracts and their dependencies, as text, Mermaid, JSON or SVG."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.foundation.plain_text import one_line, plain
from isobit.foundation.records import ContractStatus, Provenance, to_json
from isobit.report.markup import as_metadata, escape, facts_of, tone_of

COLOURS = {"good": "#2a7f4f", "warn": "#b08900", "mute": "#7a7a7a", "bad": "#b3261e"}
WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 46, 26, 46


def draw(format: str, contracts: Sequence[ContractStatus], origin: Provenance | None = None) -> str:
    """Draw the graph in one of FORMATS, with its provenance as a comment if the format has comments."""
    drawn = FORMATS[format](contracts)
    if origin is None:
        return drawn
    if format == "svg":
        return drawn.replace(">", f">{as_metadata(origin)}", 1)
    if format == "mermaid":
        notes = [f"%% {one_line(f'{name}: {value}')}" for name, value in facts_of(origin)]
        return "\n".join([*notes, drawn])
    return drawn


def as_text(contracts: Sequence[ContractStatus]) -> str:
    """Write one contract per line, with its dependencies."""
    lines = []
    for contract in contracts:
        below = f"  ← {', '.join(contract.depends_on)}" if contract.depends_on else ""
        lines.append(plain(f"{contract.id}  L{contract.level} {contract.verdict}{below}"))
    return "\n".join(lines)


def as_mermaid(contracts: Sequence[ContractStatus]) -> str:
    """Write a Mermaid diagram."""
    names = {c.id: f"c{i}" for i, c in enumerate(contracts)}
    lines = ["graph BT"]
    lines += [
        f'  {names[c.id]}["{escape(c.id)}<br/>L{c.level} {escape(c.verdict)}"]' for c in contracts
    ]
    lines += [
        f"  {names[c.id]} --> {names[d]}" for c in contracts for d in c.depends_on if d in names
    ]
    lines += [
        f"  style {names[c.id]} stroke:{COLOURS[tone_of(c.verdict)]},stroke-width:2px"
        for c in contracts
    ]
    return "\n".join(lines)


def as_json(contracts: Sequence[ContractStatus]) -> str:
    """Write the nodes as JSON."""
    nodes = [
        {
            "id": c.id,
            "level": c.level,
            "verdict": c.verdict,
            "digest": c.digest,
            "depends_on": c.depends_on,
        }
        for c in contracts
    ]
    return to_json(nodes)


def ranks_of(contracts: Sequence[ContractStatus]) -> dict[str, int]:
    """Return the length of the longest chain of dependencies below each contract."""
    depends = {c.id: list(c.depends_on) for c in contracts}
    ranks: dict[str, int] = {}
    for start in depends:
        stack = [(start, False)]
        while stack:
            name, ready = stack.pop()
            if ready:
                ranks[name] = 1 + max(
                    (ranks.get(d, -1) for d in depends[name] if d in depends), default=-1
                )
            elif name not in ranks:
                ranks[name] = 0  # also stops at a circle, which lint reports
                stack.append((name, True))
                stack += [(d, False) for d in depends[name] if d in depends and d not in ranks]
    return ranks


def as_svg(contracts: Sequence[ContractStatus]) -> str:
    """Draw a picture: contracts without dependencies are at the bottom."""
    ranks, rows = ranks_of(contracts), dict[int, list[ContractStatus]]()
    for contract in contracts:
        rows.setdefault(ranks[contract.id], []).append(contract)
    most, height = max((len(r) for r in rows.values()), default=1), len(rows)
    total_x, total_y = most * (WIDTH + GAP_X) + GAP_X, height * (HEIGHT + GAP_Y) + GAP_Y
    places: dict[str, tuple[float, float]] = {}
    for rank, row in rows.items():
        left = (total_x - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        for i, contract in enumerate(row):
            places[contract.id] = (
                left + i * (WIDTH + GAP_X),
                total_y - (rank + 1) * (HEIGHT + GAP_Y),
            )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_x:.0f} {total_y:.0f}" '
        f'width="{total_x:.0f}" height="{total_y:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    ]
    for contract in contracts:
        x, y = places[contract.id]
        for name in contract.depends_on:
            if name in places:
                u, v = places[name]
                parts.append(
                    f'<line x1="{x + WIDTH / 2:.0f}" y1="{y + HEIGHT:.0f}" x2="{u + WIDTH / 2:.0f}" y2="{v:.0f}" '
                    'stroke="#888" stroke-width="1.5"/>'
                )
    for contract in contracts:
        x, y = places[contract.id]
        colour = COLOURS[tone_of(contract.verdict)]
        parts.append(
            f'<a href="#{escape(contract.id)}"><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="#fff" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x + 10:.0f}" y="{y + 19:.0f}">{escape(contract.id[:32])}</text>'
            f'<text x="{x + 10:.0f}" y="{y + 37:.0f}" fill="{colour}">L{contract.level} '
            f"{escape(contract.verdict)}</text></a>"
        )
    return "\n".join([*parts, "</svg>"])


FORMATS = {"text": as_text, "mermaid": as_mermaid, "json": as_json, "svg": as_svg}
