"""What a comparison of rollout and trainer found, as records and as a self-contained HTML report; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from isobit.foundation.records import Provenance
from isobit.report.markup import escape
from isobit.report.pages import BASE_STYLE, write_document

CLASSES = ("semantics", "weights", "numerics", "undetermined")
REMEDIES = {
    "sequences": "send the trainer every sequence of the rollout under the same id",
    "prompt": "tokenize once: pass the rollout's prompt_token_ids to the trainer",
    "ids": "pass the rollout's token_ids to the trainer; do not tokenize its text again",
    "shift": "entry t must be log p of token t given the tokens before it, on both sides",
    "mask": "score the same tokens on both sides, the end-of-sequence token included",
    "positions": "count positions inside each sample from its first real token",
    "temperature": "score with the temperature that sampled: isobit.logprobs(..., temperature=T)",
    "truncation": "score the policy that sampled: isobit.logprobs(..., support=kept ids)",
    "tie rule": "break ties by the lowest id on both sides: isobit.sampling",
    "normaliser": "compare log-probabilities that are normalised over the same tokens",
    "processors": "apply the same logits processors on both sides",
    "weights": "send the tensors again, and compare digests before the next rollout",
    "numerics": "run both sides with one order of addition (isobit.enable); isobit audit names the operator",
    "not finite": "look for the first module with a NaN; a token that was drawn has a finite log-probability",
    "weights or numerics": "pass weights= (isobit.rollout.digest_weights) on both sides to tell them apart",
}


@dataclass(frozen=True)
class Finding:
    """One way in which rollout and trainer differ.

    Attributes:
        cause: semantics, weights, numerics, or undetermined.
        kind: What of it: temperature, truncation, shift, a tensor's state, and so on.
        detail: What was found, with its size.
        differ: How many of the things compared differ.
        of: How many were compared.
        first: The first of them.

    Example:
        >>> isobit.rollout.Finding("semantics", "shift", "one token behind").remedy
        'entry t must be log p of token t given the tokens before it, on both sides'
    """

    cause: str
    kind: str
    detail: str
    differ: int = 0
    of: int = 0
    first: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES.get(self.kind, REMEDIES.get(self.cause, ""))


@dataclass(frozen=True)
class RolloutReport:
    """What comparing a rollout with a trainer found.

    Attributes:
        findings: The differences; the cause of the first comes before those of the others.
        metrics: Under the names that RL frameworks log.
        sequences: How many sequences both sides have.
        tokens: How many log-probabilities were compared.
        tokens_differ: How many of them differ in a bit.
        row_values: How many values of full rows were compared.
        row_values_differ: How many of them differ in a bit.
        tensors: How many weights were compared by digests.
        notes: What was not declared or not judged.

    Example:
        >>> isobit.rollout.RolloutReport(()).exit_code  # nothing was compared
        2
    """

    findings: tuple[Finding, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    sequences: int = 0
    tokens: int = 0
    tokens_differ: int = 0
    row_values: int = 0
    row_values_differ: int = 0
    tensors: int = 0
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether log-probabilities were compared and nothing differs."""
        return self.tokens > 0 and not self.findings

    @property
    def cause(self) -> str:
        """The class of the first finding; "" if there is none."""
        return self.findings[0].cause if self.findings else ""

    @property
    def exit_code(self) -> int:
        """0 if equal, 1 if something differs, 2 if nothing was compared."""
        return 0 if self.equal else 1 if self.findings else 2

    @property
    def sentence(self) -> str:
        """The verdict with its denominators."""
        if self.exit_code == 2:
            return "nothing was compared: no token has a log-probability on both sides"
        word = "equal" if self.equal else f"DIFFER ({self.cause}: {self.findings[0].kind})"
        return (
            f"{word}: {self.tokens_differ:,} of {self.tokens:,} log-probabilities differ in "
            f"{self.sequences:,} sequences; {self.row_values_differ:,} of {self.row_values:,} values of "
            f"full rows; {self.tensors:,} weights compared"
        )


STYLE = """
.steps{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:.7rem;padding:0;list-style:none}
.steps li{border:1px solid #8884;border-left:4px solid currentColor;border-radius:8px;padding:.5rem .8rem}
.steps b{display:block}.steps span{color:CanvasText}td.number{text-align:right}
"""
BODY = """<p class="verdict {tone}">{verdict}</p>
<ol class="steps">{steps}</ol>
<h2>What differs</h2>{findings}
<h2>Metrics</h2><p class="mute">Under the names that RL frameworks log.</p><div class="wide">{metrics}</div>
{notes}"""
QUESTIONS = {
    "semantics": "Do both sides compute the same quantity? Ids, shift, mask, positions, temperature, truncation, "
    "normaliser.",
    "weights": "Do both compute it with the same weights? Digests per row.",
    "numerics": "Do they compute it in the same arithmetic? Bits of log-probabilities and full rows.",
}


def write_rollout_page(
    found: RolloutReport, names: tuple[str, str], origin: Provenance | None = None
) -> str:
    """Return the page of one comparison; `names` are those of rollout and trainer."""
    notes = "".join(f"<li>{escape(note)}" for note in found.notes)
    body = BODY.format(
        tone=("good", "bad", "mute")[found.exit_code],
        verdict=escape(found.sentence),
        steps="".join(write_step(found, cause) for cause in QUESTIONS),
        findings=write_findings(found.findings),
        metrics=write_metrics(found.metrics),
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    )
    return write_document(
        f"Rollout {names[0]} and trainer {names[1]}",
        BASE_STYLE + STYLE,
        body,
        origin,
    )


def write_step(found: RolloutReport, cause: str) -> str:
    """Return the box of one class: differs, equal, or not judged."""
    count = sum(one.cause == cause for one in found.findings)
    earlier = {one.cause for one in found.findings} & set(CLASSES[: CLASSES.index(cause)])
    unknown = (
        (cause == "weights" and not found.tensors)
        or (cause == "numerics" and (earlier or found.cause == "undetermined"))
        or not found.tokens
    )
    if count:
        tone, word = "bad", f"{count} {'finding' if count == 1 else 'findings'}"
    elif unknown:
        tone, word = "mute", "not judged"
    else:
        tone, word = "good", "equal"
    return f'<li class="{tone}"><b>{cause}: {word}</b><span>{escape(QUESTIONS[cause])}</span>'


def write_findings(findings: tuple[Finding, ...]) -> str:
    """Return the table of findings, the cause first."""
    if not findings:
        return "<p>Nothing.</p>"
    rows = "".join(
        f"<tr><td>{escape(one.cause)}<td>{escape(one.kind)}<td>{escape(one.detail)}"
        f"<br><span class='mute'>{escape(one.first)}</span><br>{escape(one.remedy)}"
        f"<td class='number'>{one.differ:,} of {one.of:,}"
        for one in findings
    )
    return (
        '<div class="wide"><table><tr><th>class<th>kind<th>what, the first, and what to do<th>differ'
        f"{rows}</table></div>"
    )


def write_metrics(metrics: dict[str, float]) -> str:
    """Return the table of metrics."""
    if not metrics:
        return "<p>None: no token was compared.</p>"
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td class='number'>{value:.6g}"
        for name, value in metrics.items()
    )
    return f"<table><tr><th>metric<th>value{rows}</table>"
