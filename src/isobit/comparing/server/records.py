"""Records of an audit of a server; without torch, so that reports can be drawn from them."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.foundation.records import Provenance

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
