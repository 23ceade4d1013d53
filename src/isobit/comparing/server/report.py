"""What an audit of a server found, as records and as a self-contained HTML report; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.foundation.records import Provenance, to_json
from isobit.report.markup import escape, tone_of
from isobit.report.pages import AUDIT_STYLE, write_data, write_document

AXES = {
    "repeats": "the same request again, alone",
    "batch": "one request with several prompts",
    "order": "all prompts at once, in another order of arrival",
    "prefix-cache": "with keys of an earlier request, and without",
    "concurrency": "several requests at a time",
}


@dataclass
class Variant:
    """How answers of one variant differ from those of the same prompts sent alone.

    Attributes:
        axis: A name of `AXES`.
        name: What was varied.
        requests: How many answers were compared.
        tokens: How many tokens were compared, with all their log-probabilities.
        values: How many log-probabilities were compared: of the tokens, and of the most likely ones.
        differ: How many of them differ, or are on one side only.
        changed: In how many answers a token differs. What comes after it is not compared.
        left_out: Tokens that come after such a token.
        largest: The largest distance of two log-probabilities of one token.
        first: The first difference.
        by_prompt: For each prompt (differ, values); changed tokens count as one that differs.
        cached: Tokens that the server took from its prefix cache, if it reports them.
        reason: Why the variant was not judged; "" if it was.
    """

    axis: str
    name: str
    requests: int = 0
    tokens: int = 0
    values: int = 0
    differ: int = 0
    changed: int = 0
    left_out: int = 0
    largest: float = 0.0
    first: str = ""
    by_prompt: tuple[tuple[int, int], ...] = ()
    cached: int | None = None
    reason: str = ""

    def note(self, words: str) -> None:
        """Keep the first difference."""
        self.first = self.first or words

    @property
    def verdict(self) -> str:
        """Return broken, kept or not-judged."""
        if self.differ or self.changed:
            return "broken"
        return "kept" if self.values and not self.reason else "not-judged"


@dataclass(frozen=True)
class ServerAudit:
    """What an audit of a server found.

    Attributes:
        server: Its address.
        model: The model's name there.
        prompts: How many prompts were sent.
        tokens: How many tokens were asked for after each.
        variants: What was varied, grouped by axis.
        compared: What of an answer was compared, in words.
        notes: What limits the comparison.
        provenance: Where the record comes from.
    """

    server: str
    model: str
    prompts: int
    tokens: int
    variants: tuple[Variant, ...]
    compared: str = ""
    notes: tuple[str, ...] = ()
    provenance: Provenance | None = None

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each axis: broken if a variant is, kept if one was judged, else not-judged."""
        found: dict[str, str] = {}
        for one in self.variants:
            both = {found.get(one.axis, "not-judged"), one.verdict}
            found[one.axis] = next(v for v in ("broken", "kept", "not-judged") if v in both)
        return found

    @property
    def exit_code(self) -> int:
        """0 if every axis is kept, 1 if one is broken, 2 if one was not judged or there is none."""
        words = set(self.verdicts.values())
        return 1 if "broken" in words else 0 if words == {"kept"} else 2

    @property
    def sentence(self) -> str:
        """The verdict with its denominators."""
        values, differ = sum(v.values for v in self.variants), sum(v.differ for v in self.variants)
        requests = sum(v.requests for v in self.variants)
        if not values:
            return "nothing was compared, so nothing follows"
        changed = sum(v.changed for v in self.variants)
        size = max(v.largest for v in self.variants)
        counts = f"{differ:,} of {values:,} log-probabilities differ"
        counts += f", by up to {size:.3g}" if size else ""
        counts += f"; tokens differ in {changed:,} of {requests:,} answers"
        broken, missing = (
            [axis for axis, verdict in self.verdicts.items() if verdict == wanted]
            for wanted in ("broken", "not-judged")
        )
        if not broken and not missing:
            return f"kept on {', '.join(self.verdicts)}: {counts}"
        words = [f"BROKEN on {', '.join(broken)}"] if broken else []
        words += [f"not judged: {', '.join(missing)}"] if missing else []
        return f"{'; '.join(words)}: {counts}"


BODY = """<p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>
<h2>What differs</h2>{table}
<h2>Which prompts</h2>{grid}
<h2>First differences</h2>{firsts}
<h2>What was compared</h2>{compared}
{repeat}"""
GRID_STYLE = (
    ".grid td,.grid th{padding:.12rem .2rem;text-align:center;border:0}.grid th:first-child{text-align:left}"
    ".grid td i{display:block;width:1.3rem;height:1.3rem;border-radius:3px;background:var(--line)}"
    ".grid i.same{background:var(--good)}.grid i.few{background:var(--u2)}.grid i.many{background:var(--u4)}"
)


def write_server_page(found: ServerAudit) -> str:
    """Return the page of one audit. Its `<script id="audit">` is data: the record as JSON."""
    command = found.provenance.command if found.provenance else ""
    body = BODY.format(
        about=escape(
            f"{found.server}; {found.prompts} prompts, {found.tokens} tokens each; every answer against that of the "
            "same prompt alone"
        ),
        tone=("good", "bad", "mute")[found.exit_code],
        conclusion=escape(found.sentence),
        table=write_table(found),
        grid=write_grid(found),
        firsts=write_firsts(found),
        compared="".join(f"<p>{escape(line)}</p>" for line in (found.compared, *found.notes)),
        repeat=f"<h2>Repeat it</h2><pre>{escape(command)}</pre>" if command else "",
    )
    return write_document(
        f"Audit of {found.model}",
        AUDIT_STYLE + GRID_STYLE,
        body,
        found.provenance,
        write_data("audit", to_json(found)),
    )


def write_table(found: ServerAudit) -> str:
    """Return the table of variants, with the verdict of each."""
    heads = ("axis", "what was varied", "verdict", "differ", "max |Δ|", "other tokens", "cached")
    rows, axis = [], ""
    for one in found.variants:
        title = "" if one.axis == axis else f"<b>{escape(one.axis)}</b><br>{escape(AXES[one.axis])}"
        axis = one.axis
        figures = (
            f"{one.differ:,} of {one.values:,}",
            f"{one.largest:.3g}",
            f"in {one.changed:,} of {one.requests:,} answers",
            "" if one.cached is None else f"{one.cached:,} tokens",
        )
        cells = "".join(f'<td class="figure">{"" if one.reason else text}' for text in figures)
        chip = f'<span class="chip {tone_of(one.verdict)}">{one.verdict}</span>'
        rows.append(f'<tr><td class="axis-name">{title}<td>{escape(one.name)}<td>{chip}{cells}')
        if one.reason:
            rows.append(f'<tr><td><td colspan="6" class="reason soft">{escape(one.reason)}')
    head = "".join(f"<th>{name}" for name in heads)
    return f'<div class="wide"><table><tr>{head}{"".join(rows)}</table></div>'


def write_grid(found: ServerAudit) -> str:
    """Return a square per variant and prompt: equal, less than half of the log-probabilities differ, or more."""
    judged = [one for one in found.variants if one.by_prompt]
    if not judged:
        return "<p>None was compared.</p>"
    head = "".join(f"<th>{at}" for at in range(len(judged[0].by_prompt)))
    rows = "".join(
        f"<tr><th>{escape(f'{one.axis}, {one.name}')}{''.join(map(write_square, one.by_prompt))}"
        for one in judged
    )
    legend = "Green: equal. Light: some log-probabilities differ. Dark: more than half. Point at a square for counts."
    return f'<div class="wide"><table class="grid"><tr><th>{head}{rows}</table></div><p class="soft">{legend}</p>'


def write_square(counts: tuple[int, int]) -> str:
    """Return one square; its title has the counts."""
    differ, values = counts
    kind = "" if not values else "same" if not differ else "few" if 2 * differ < values else "many"
    return f'<td><i class="{kind}" title="{differ:,} of {values:,}"></i>'


def write_firsts(found: ServerAudit) -> str:
    """Return the first difference of each variant."""
    items = "".join(f"<li>{write_first(one)}" for one in found.variants if one.first)
    return f'<ul class="plain">{items}</ul>' if items else "<p>None.</p>"


def write_first(one: Variant) -> str:
    """Return the first difference of a variant."""
    return f"<b>{escape(one.axis)}</b>, {escape(one.name)}: <code>{escape(one.first)}</code>"
