"""The embedding, log-probabilities and cross-entropy, as `isobit check --like` knows them: operators that take ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.library.any_kernel.operators import LogSoftmax
from isobit.library.any_kernel.within import Operator, Values
from isobit.library.stock import IGNORED
from isobit.library.subjects import Subject


def ids_of(places: Tensor, count: int) -> Tensor:
    """Return an id below `count` per row, a function of the bits of its first number in fp32."""
    return bits.as_integers(places[..., 0].detach().float()).long().abs() // 3 % count


def targets_of(places: Tensor, count: int) -> Tensor:
    """Return ids; about one in 17 is ignored."""
    return torch.where(ids_of(places, 17) == 0, IGNORED, ids_of(places, count))


def at_targets(terms: Tensor, targets: Tensor) -> Tensor:
    """Return each row's term at its target; 0 without one."""
    found = terms.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets == IGNORED, 0.0, found)


def active(upstream: Tensor, targets: Tensor) -> Tensor:
    """Return |g| of rows that have a target, else 0, as a column."""
    return torch.where(targets == IGNORED, 0.0, upstream.abs()).unsqueeze(-1)


class Embedding(Operator):
    """`embedding(ids, weight)`: rows of a table, which are copied."""

    FORWARD, BACKWARD = 0, 1

    @staticmethod
    def call(subject: Subject, *drawn: Tensor) -> Tensor:
        """Call with ids that drawn numbers choose."""
        places, weight = drawn
        return subject(ids_of(places, len(weight)), weight)

    @staticmethod
    def reference(ids: Tensor, weight: Tensor) -> Tensor:
        """Return `F.embedding`."""
        return F.embedding(ids, weight)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Tokens of an id are added."""
        return 0, len(given["places"])

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """A copy has no error."""
        return given["weight"].new_zeros(len(given["places"]), given["weight"].shape[-1])

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add |g| of the tokens that have an id."""
        weight = given["weight"]
        ids = ids_of(given["places"], len(weight))
        return {"weight": torch.zeros_like(weight).index_add(0, ids, upstream.abs())}


class CrossEntropy(Operator):
    """`cross_entropy(logits, targets)`: a loss per row, 0 where the target is −100; in fp32, or as the logits."""

    FORWARD, BACKWARD = LogSoftmax.FORWARD, LogSoftmax.BACKWARD
    WIDE_OUTPUT = True

    @staticmethod
    def call(subject: Subject, *drawn: Tensor) -> Tensor:
        """Call with targets that the logits choose."""
        (logits,) = drawn
        return subject(logits, targets_of(logits, logits.shape[-1]))

    @staticmethod
    def reference(logits: Tensor, targets: Tensor) -> Tensor:
        """Return `F.cross_entropy` of each row."""
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Those of log_softmax."""
        return LogSoftmax.sums({"x": given["logits"]})

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Return the magnitude of log_softmax at the target."""
        logits = given["logits"]
        targets = targets_of(logits, logits.shape[-1])
        return at_targets(LogSoftmax.magnitude({"x": logits}), targets)

    @classmethod
    def summed(cls, given: Values) -> Tensor:
        """Return that of log_softmax at the target."""
        logits = given["logits"]
        return at_targets(torch.ones_like(logits), targets_of(logits, logits.shape[-1]))

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Return the magnitude of log_softmax's gradient, for a gradient at the target."""
        logits = given["logits"]
        targets = targets_of(logits, logits.shape[-1])
        at = targets.clamp(min=0).unsqueeze(-1)
        chosen = torch.zeros_like(logits).scatter(-1, at, active(upstream, targets))
        return {"logits": LogSoftmax.gradients({"x": logits}, chosen)["x"]}


class Logprob(Operator):
    """`logprob(hidden, weight, targets)`: log-probabilities of targets; in fp32, or as hidden."""

    FORWARD, BACKWARD = 3, 3
    WIDE_OUTPUT = True

    @staticmethod
    def call(subject: Subject, *drawn: Tensor) -> Tensor:
        """Call with targets that hidden states choose."""
        hidden, weight = drawn
        return subject(hidden, weight, targets_of(hidden, len(weight)))

    @staticmethod
    def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return −cross_entropy of the logits."""
        return -CrossEntropy.reference(hidden @ weight.mT, targets)

    @staticmethod
    def sizes(given: Values) -> tuple[Tensor, Tensor]:
        """Return the logits, and the sums of the magnitudes of their products."""
        hidden, weight = given["hidden"], given["weight"]
        return hidden @ weight.mT, hidden.abs() @ weight.abs().mT

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Products of a logit, its exponentials, then products of its gradient."""
        (rows, k), v = given["hidden"].shape, len(given["weight"])
        return k + v, k + 2 * v + rows

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add log_softmax's terms, the rounding of the target's logit, and that of the others."""
        logits, sizes = Logprob.sizes(given)
        each = LogSoftmax.magnitude({"x": logits}) + sizes + sizes.amax(-1, keepdim=True)
        return at_targets(each, targets_of(given["hidden"], logits.shape[-1]))

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add |g|·(1 at the target + p), times what a rounding of a logit is multiplied by; then of its products."""
        logits, sizes = Logprob.sizes(given)
        targets = targets_of(given["hidden"], logits.shape[-1])
        own, factor = active(upstream, targets), 1 + 2 * sizes.amax(-1, keepdim=True)
        of_logits = own * torch.softmax(logits, -1) * factor
        of_logits.scatter_add_(-1, targets.clamp(min=0).unsqueeze(-1), own)
        return {
            "hidden": of_logits @ given["weight"].abs(),
            "weight": of_logits.mT @ given["hidden"].abs(),
        }
