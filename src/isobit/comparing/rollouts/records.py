"""Records of a comparison of rollout and trainer; without torch, so that reports can be drawn from them."""

from __future__ import annotations

from dataclasses import dataclass, field

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
