"""Heads: how a model computes logits from hidden states, known by the source of its forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.parts.digests import ENCODER_HEADS, HEADS, SCORING_HEADS
from isobit.integrations.transformers.parts.part import plain_type
from isobit.integrations.transformers.parts.registry import find_registered
from isobit.integrations.transformers.parts.source import digest_of_class
from isobit.integrations.transformers.refusals import ELSEWHERE

BACKBONE, HEAD, SCORE = "model", "lm_head", "score"
# Kinds of heads that score, of reward models and of critics.
SAMPLES: str = "a score of each sample"
TOKENS: str = "a score of each token"
# Kinds of heads of encoders (task_heads.py).
MASKED: str = "logits of masked tokens"
FIRST_TOKEN: str = "a score of each sample's first token"
EVERY_TOKEN: str = "a score of every token, after a dense layer"
SCORING = (SAMPLES, TOKENS, MASKED, FIRST_TOKEN, EVERY_TOKEN)


@dataclass(frozen=True)
class Head:
    """A language-model head, whose logits are those of `lm_head` divided by `divisor(model)`, or one that scores."""

    kind: str  # plain, divided, multiplied, capped or routed; or one of SCORING
    found: str  # where its source was read
    shipped: bool = True  # see part.Part

    @property
    def is_language_model(self) -> bool:
        """Whether there are logits of next tokens."""
        return self.kind not in SCORING

    def divisor(self, model: Any) -> float:
        """Return what the logits are divided by, from the config as it is now."""
        if self.kind == "divided":
            return float(model.config.logits_scaling)
        if self.kind == "multiplied":
            return 1.0 / float(model.logit_scale)
        return 1.0

    def softcap(self, model: Any) -> float | None:
        """Return the soft cap of the logits, from the config as it is now; None if there is none."""
        cap = model.config.final_logit_softcapping if self.kind == "capped" else None
        return None if cap is None else float(cap)


PLAIN = Head("plain", "")


def find_head(model: Any) -> Head | None:
    """Return the head of a model, None for a backbone, or raise for a head that is not known."""
    linear, backbone = getattr(model, HEAD, None), getattr(model, BACKBONE, None)
    if not isinstance(backbone, nn.Module):
        return None
    kind = plain_type(model)
    registered = find_registered(kind)
    if registered is not None and registered.name == "head":
        return Head(registered.kind, "registered", shipped=False)  # type: ignore[attr-defined]
    digest = digest_of_class(kind)
    if digest in SCORING_HEADS and isinstance(getattr(model, SCORE, None), nn.Module):
        path, what = SCORING_HEADS[digest]
        return Head(SAMPLES if what == "samples" else TOKENS, f"source of {path}")
    if digest in ENCODER_HEADS:
        path, what = ENCODER_HEADS[digest]
        kinds = {"masked": MASKED, "first token": FIRST_TOKEN, "every token": EVERY_TOKEN}
        return Head(kinds[what], f"source of {path}")
    if isinstance(linear, nn.Module) and digest in HEADS:
        path, name = HEADS[digest]
        return Head(name, f"source of {path}")
    remedy = f"enable the backbone: isobit.enable(model.{BACKBONE}), and replace the head"
    if isinstance(linear, nn.Module):
        registering = f"isobit.parts.register({kind.__name__}, isobit.parts.head())"
        remedy += f"; or, if its logits are those of {HEAD}: {registering}"
    raise UnsupportedError(
        expected=f"a head that is known: logits of {HEAD}, plain, or scaled by config.logits_scaling or logit_scale",
        received=f"{kind.__module__}.{kind.__name__}.forward, whose source (digest {digest}) is not known",
        remedy=f"{remedy}; {ELSEWHERE}",
    )
