"""Attention, grouped-query attention and rotary position embedding, as `isobit check --like` knows them."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.any_kernel.within import Operator, Values
from isobit.library.subjects import Subject


class Attention(Operator):
    """`attention(q, k, v)`, causal, of [samples, heads, tokens, depth], as `F.scaled_dot_product_attention`.

    Key heads may be fewer than query heads.
    """

    FORWARD, BACKWARD = 4, 7
    OTHER = 64

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by its formula."""
        return Attention.weights(q, k)[0] @ repeated(v, q)

    @staticmethod
    def weights(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities, and what a rounding of a score is multiplied by, per query."""
        scale, k = q.shape[-1] ** -0.5, repeated(k, q)
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
        sizes = (q.abs() @ k.abs().mT * scale).masked_fill(hidden, 0)
        return torch.softmax(scores, -1), 1 + 2 * sizes.amax(-1, keepdim=True)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """A score, its exponentials and p·v; backward also dP, Σp·dP, and the rows of a group."""
        (tokens, depth), group = given["q"].shape[-2:], heads_of_a_group(given["q"], given["k"])
        return depth + 2 * tokens, 3 * depth + (3 + group) * tokens

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add p·|v|, times what a rounding of a score is multiplied by."""
        weights, factor = Attention.weights(given["q"], given["k"])
        return weights @ repeated(given["v"].abs(), given["q"]) * factor

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add the magnitudes of dS = p·(dP − Σ p·dP), then of its products; the heads of a group are added."""
        q, g = given["q"].abs(), upstream.abs()
        k, v = (repeated(given[name].abs(), q) for name in ("k", "v"))
        plain, factor = Attention.weights(given["q"], given["k"])
        weights = plain * factor
        of_weights = g @ v.mT
        of_scores = weights * (of_weights + (plain * of_weights).sum(-1, keepdim=True))
        of_scores = of_scores * q.shape[-1] ** -0.5
        groups = (given["k"].shape[-3], -1)
        of_k = torch.unflatten(of_scores.mT @ q, -3, groups).sum(-3)
        of_v = torch.unflatten(weights.mT @ g, -3, groups).sum(-3)
        return {"q": of_scores @ k, "k": of_k, "v": of_v}

    @staticmethod
    def decode(subject: Subject, case: Case, tally: Tally) -> None:
        """The last query alone, over all keys, has the bits that it has among the other queries."""
        q, k, v = case.arguments.values()
        whole = subject(q, k, v)
        for length in {1, q.shape[-2] // 2 + 1, q.shape[-2]}:
            last = subject(
                q[..., length - 1 : length, :], k[..., :length, :], v[..., :length, :], False
            )
            tally.same(last, whole[..., length - 1 : length, :], f"token {length - 1} decoded")


def heads_of_a_group(queries: Tensor, keys: Tensor) -> int:
    """Return how many query heads share a key head."""
    return queries.shape[-3] // keys.shape[-3]


def repeated(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the key head of each query head."""
    return keys.repeat_interleave(heads_of_a_group(queries, keys), -3)


class Gqa(Attention):
    """`gqa(q, k, v)`: attention whose query heads share key heads, consecutive heads the same one."""

    BACKWARD = 8  # a group's gradients may be added in the inputs' dtype


class Rope(Operator):
    """`rope(x, cos, sin)`: rotate the halves of a head, as transformers' `apply_rotary_pos_emb`."""

    FORWARD, BACKWARD = 2, 2

    @staticmethod
    def call(subject: Subject, *drawn: Tensor) -> Tensor:
        """Call with angles that are equal in both halves: kernels may read one of them."""
        x, cos, sin = drawn
        return subject(x, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))

    @staticmethod
    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x·cos + turned(x)·sin."""
        return x * cos.unsqueeze(-3) + turned(x) * sin.unsqueeze(-3)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Nothing is added up."""
        return 0, 0

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add |x·cos| and |turned(x)·sin|."""
        return Rope.of(given["x"], given)

    @staticmethod
    def of(x: Tensor, given: Values) -> Tensor:
        """Add the magnitudes of both products; the gradient has the same."""
        cos, sin = (torch.cat([given[n], given[n]], -1).abs().unsqueeze(-3) for n in ("cos", "sin"))
        return x.abs() * cos + turned(x).abs() * sin

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """The gradient of x is the turn back; angles have none."""
        return {"x": Rope.of(upstream, given)}

    @staticmethod
    def decode(subject: Subject, case: Case, tally: Tally) -> None:
        """A token alone has the bits that it has among the others."""
        x, cos, sin = case.arguments.values()
        whole = subject(x, cos, sin)
        for at in {0, x.shape[-2] // 2, x.shape[-2] - 1}:
            one = slice(at, at + 1)
            last = subject(x[..., one, :], cos[..., one, :], sin[..., one, :])
            tally.same(last, whole[..., one, :], f"token {at} decoded")


def turned(x: Tensor) -> Tensor:
    """Return the negated second half, then the first."""
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)
