"""What one side of a comparison computed: sequences with their log-probabilities, policies and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from isobit.comparing.checkpoints.row_digests import RowDigests
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
        for name, dims in (("logprobs", 1), ("mask", 1), ("rows", 2)):
            part = getattr(self, name)
            if part is not None and part.dim() != dims and part.numel():
                raise ArgumentError(
                    expected=f"{name} of sequence {self.id!r} with {dims} dimension{'s' * (dims - 1)}",
                    received=f"{part.dim()}: {list(part.shape)}",
                    remedy="write one number per token; rows have the whole vocabulary",
                )
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
    """Return a policy from a mapping or vLLM's SamplingParams as one; other keys are left out.

    Raises:
        ArgumentError: A value is no number, or not one that the key can have.
    """
    known = {f.name for f in fields(Policy)}
    found = {name: value for name, value in values.items() if name in known and value is not None}
    for name, (form, is_right) in FORMS.items():
        if name in found and not is_right(found[name]):
            raise ArgumentError(
                expected=f"{name}: {form}",
                received=f"{found[name]!r}"[:200],
                remedy="write what the sampler was given, or leave the key out",
            )
    if "processors" in found:
        found["processors"] = tuple(found["processors"])  # type: ignore[arg-type]
    return Policy(**found)  # type: ignore[arg-type]


def is_number(value: object, low: float, high: float) -> bool:
    """Return whether a value is a number between two others; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    return bool(low <= value <= high)  # not for a NaN


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def are_names(value: object) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


LARGEST = 1e30  # of a temperature
FORMS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "temperature": ("a number from 0 on", lambda v: is_number(v, 0, LARGEST)),
    "top_k": (
        "a whole number, -1 or 0 for all",
        lambda v: is_whole(v) and is_number(v, -1, LARGEST),
    ),
    "top_p": ("a number from 0 to 1", lambda v: is_number(v, 0, 1)),
    "normaliser": ("kept or full", lambda v: v in ("kept", "full")),
    "processors": ("a list of names", are_names),
}
