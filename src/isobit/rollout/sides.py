"""What one side of a comparison computed: sequences with their log-probabilities, policies and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from isobit.checkpoints.row_digests import RowDigests
from isobit.errors import ArgumentError


@dataclass(frozen=True)
class Policy:
    """How a token's distribution is made from logits. None: not declared.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keeps the k most likely tokens; 0 or -1 keeps all.
        top_p: Keeps the most likely tokens whose probabilities reach p; 1 keeps all.
        normaliser: "kept" if log-probabilities are normalised over what top-k and top-p keep, "full" if over the whole
            vocabulary.
        processors: Names of other logits processors (penalties, bias, min_p, grammar), in order.

    Example:
        >>> isobit.rollout.Policy(temperature=0.8, top_p=0.9).truncates
        True
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    normaliser: str | None = None
    processors: tuple[str, ...] | None = None

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p leaves tokens out."""
        return (self.top_k or 0) > 0 or (self.top_p is not None and self.top_p < 1)


@dataclass(frozen=True)
class Sequence:
    """One completion.

    Attributes:
        id: Its name, the same on both sides.
        prompt: Token ids of the prompt.
        tokens: Token ids of the completion.
        logprobs: log p of each of them, in fp32; None if not computed.
        mask: True for each token that counts in the loss; None for all.
        positions: The position of each token of the completion; None if not recorded.
        rows: Log-probabilities of the whole vocabulary from which each token was taken, [tokens, V]; None if not
            recorded.
        support: The ids that each token was drawn from; None for the whole vocabulary.
        policy: How logits became a distribution.

    Example:
        >>> one = isobit.rollout.Sequence("0", (1, 2), (5, 6), torch.tensor([-1.0, -2.0]))
        >>> one.counts
        tensor([True, True])
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Tensor | None = None
    mask: Tensor | None = None
    positions: tuple[int, ...] | None = None
    rows: Tensor | None = None
    support: tuple[tuple[int, ...], ...] | None = None
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        """Check that every part has one entry per token."""
        count = len(self.tokens)
        for name in ("logprobs", "mask", "positions", "rows", "support"):
            part = getattr(self, name)
            if part is not None and len(part) != count:
                raise ArgumentError(
                    expected=f"{name} of sequence {self.id!r} with one entry for each of {count} tokens",
                    received=f"{len(part)}",
                    remedy="leave out the prompt and padding, and align entries with token_ids",
                )

    @property
    def counts(self) -> Tensor:
        """Which tokens count in the loss, [tokens]."""
        everything = torch.ones(len(self.tokens), dtype=torch.bool)
        return everything if self.mask is None else self.mask.bool()


@dataclass(frozen=True)
class Scored:
    """All that one side computed.

    Attributes:
        sequences: The completions.
        weights: Digests of the weights that it computed with (isobit.rollout.digest_weights); None if not recorded.
        previous: Digests of the weights before these, to tell stale tensors from wrong ones.
        name: How to call it in a report.

    Example:
        >>> one = isobit.rollout.Sequence("0", (1, 2), (5, 6), torch.tensor([-1.0, -2.0]))
        >>> isobit.rollout.compare(isobit.rollout.Scored((one,)), isobit.rollout.Scored((one,))).equal
        True
    """

    sequences: tuple[Sequence, ...]
    weights: Mapping[str, RowDigests] | None = None
    previous: Mapping[str, RowDigests] | None = None
    name: str = ""


def policy_from(values: Mapping[str, object]) -> Policy:
    """Return a policy from a mapping or vLLM's SamplingParams as one; other keys are left out."""
    known = {f.name for f in fields(Policy)}
    found = {name: value for name, value in values.items() if name in known and value is not None}
    if "processors" in found:
        found["processors"] = tuple(str(one) for one in found["processors"])  # type: ignore[attr-defined]
    return Policy(**found)  # type: ignore[arg-type]
