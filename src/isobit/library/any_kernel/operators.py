"""The operators that `isobit check --like` knows, each with the magnitudes that its tolerance is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.any_kernel.within import Operator, Values
from isobit.library.claims import Subject
from isobit.library.stock import IGNORED

RMS_EPS = 1e-6
LAYER_EPS = 1e-5


def spread(x: Tensor) -> Tensor:
    """Return 1 + the largest difference of an exponential's arguments: their rounding is multiplied by it."""
    return 1 + 2 * x.abs().amax(-1, keepdim=True)


class Linear(Operator):
    """`linear(x, weight, bias)`: a product and a bias, as `F.linear`."""

    FORWARD, BACKWARD = 2, 1
    reference = staticmethod(F.linear)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Each product is one sum."""
        return given["x"].shape[-1], max(len(given["weight"]), len(given["x"]))

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add |x| · |w| and |b|."""
        return F.linear(*(t.abs() for t in given.values()))

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add the products of each gradient."""
        g, x, weight = (t.abs() for t in (upstream, given["x"], given["weight"]))
        return {"x": g @ weight, "weight": g.mT @ x, "bias": g.sum(0)}


class RmsNorm(Operator):
    """`rms_norm(x, weight)`, with eps = 1e-6."""

    FORWARD, BACKWARD = 3, 4

    @staticmethod
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        """Return `F.rms_norm`."""
        return stock.rms_norm(x, weight, RMS_EPS)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """The mean square enters dx three times, half each; the other mean and the rows are added."""
        rows, n = given["x"].shape
        return n, rows + 3 * n

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Squares do not cancel."""
        return RmsNorm.reference(*given.values()).abs()

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add |g·w| and |x̂|·mean|g·w·x̂|, times the scale; and |g·x̂| over the rows."""
        x, weight, g = given["x"].abs(), given["weight"].abs(), upstream.abs()
        scale = (x.square().mean(-1, keepdim=True) + RMS_EPS).rsqrt()
        unit = x * scale
        of_x = scale * (g * weight + unit * (g * weight * unit).mean(-1, keepdim=True))
        return {"x": of_x, "weight": (g * unit).sum(0)}


class LayerNorm(Operator):
    """`layer_norm(x, weight, bias)`, with eps = 1e-5."""

    FORWARD, BACKWARD = 4, 4

    @staticmethod
    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return `F.layer_norm`."""
        return stock.layer_norm(x, weight, bias, LAYER_EPS)

    @staticmethod
    def unit(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return |x̂|, the magnitudes of its terms, the scale, and what a rounding of x − mean is multiplied by in it.

        The variance is a mean of squares of x − mean, whose terms are |x| and mean|x|.
        """
        scale = (x.var(-1, correction=0, keepdim=True) + LAYER_EPS).rsqrt()
        exact = ((x - x.mean(-1, keepdim=True)) * scale).abs()
        terms = (x.abs() + x.abs().mean(-1, keepdim=True)) * scale
        of_scale = 1 + terms.square().mean(-1, keepdim=True).sqrt()
        return exact, terms + exact * of_scale, scale, of_scale

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """As in rms_norm, with the mean that is subtracted."""
        rows, n = given["x"].shape
        return 2 * n, rows + 4 * n

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add the terms of x̂, times |w|, and |b|."""
        _, terms, _, _ = LayerNorm.unit(given["x"])
        return terms * given["weight"].abs() + given["bias"].abs()

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add the three terms of dx, each with the terms of its factors; and the terms of dw and db over the rows."""
        exact, terms, scale, of_scale = LayerNorm.unit(given["x"])
        g = upstream.abs()
        a = g * given["weight"].abs()
        inner = (a * exact).mean(-1, keepdim=True)
        of_x = of_scale * (a + a.mean(-1, keepdim=True) + exact * inner)
        of_x = of_x + terms * inner + exact * (a * terms).mean(-1, keepdim=True)
        return {"x": scale * of_x, "weight": (g * terms).sum(0), "bias": g.sum(0)}


class Softmax(Operator):
    """`softmax(x)` over the last axis."""

    FORWARD, BACKWARD = 2, 3
    reference = staticmethod(stock.softmax)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """The sum of exponentials enters the gradient twice, and Σy·g is one more."""
        n = given["x"].shape[-1]
        return n, 3 * n

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """A rounding of x − max is a relative error of its exponential; in the divisor they are averaged by y."""
        x = given["x"]
        y, distance = torch.softmax(x, -1), x.amax(-1, keepdim=True) - x
        return y * (1 + distance + (y * distance).sum(-1, keepdim=True))

    @classmethod
    def summed(cls, given: Values) -> Tensor:
        """The divisor's error is relative."""
        return torch.softmax(given["x"], -1)

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add |y·g| and y·Σ|y·g|."""
        y, g = torch.softmax(given["x"], -1), upstream.abs()
        return {"x": y * (g + (y * g).sum(-1, keepdim=True)) * spread(given["x"])}


class LogSoftmax(Operator):
    """`log_softmax(x)` over the last axis."""

    FORWARD, BACKWARD = 3, 3
    reference = staticmethod(stock.log_softmax)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """The sum of exponentials, and Σg."""
        n = given["x"].shape[-1]
        return n, 2 * n

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add |x|, the largest |x| and the logarithm of the sum."""
        x = given["x"]
        return x.abs() + spread(x) + torch.logsumexp(x, -1, keepdim=True).abs()

    @classmethod
    def summed(cls, given: Values) -> Tensor:
        """The logarithm makes the sum's relative error absolute."""
        return torch.ones_like(given["x"])

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add |g| and y·Σ|g|."""
        x, g = given["x"], upstream.abs()
        return {"x": g + torch.softmax(x, -1) * g.sum(-1, keepdim=True) * spread(x)}


class Silu(Operator):
    """`silu(x)`."""

    FORWARD, BACKWARD = 2, 4
    reference = staticmethod(stock.silu)

    @staticmethod
    def size(x: Tensor) -> Tensor:
        """Return |silu(x)|, times what a rounding of the exponential's argument is multiplied by."""
        return (x * torch.sigmoid(x)).abs() * (1 + x.abs())

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        """Return the terms of the derivative: σ and |x|·σ·(1 − σ), where 1 − σ may cancel."""
        return torch.sigmoid(x) * (1 + x.abs()) * (1 + x.abs())

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Nothing is added up."""
        return 0, 0

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Return the size of the value."""
        return Silu.size(given["x"])

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Return |g| times the terms of the derivative."""
        return {"x": upstream.abs() * Silu.slope(given["x"])}


class Gelu(Operator):
    """`gelu(x)`, by the error function."""

    FORWARD, BACKWARD = 3, 4
    reference = staticmethod(stock.exact_gelu)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Nothing is added up."""
        return 0, 0

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """1 + erf(x) cancels where x is negative, so that |x| remains."""
        return given["x"].abs()

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add the distribution function, which is at most 1, and |x| times the density."""
        return {"x": upstream.abs() * (1 + given["x"].abs())}


class Swiglu(Operator):
    """`swiglu(gate, up)`: silu(gate) · up."""

    FORWARD, BACKWARD = 3, 5
    reference = staticmethod(stock.swiglu)

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Nothing is added up."""
        return 0, 0

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Return the size of silu(gate) times |up|."""
        return Silu.size(given["gate"]) * given["up"].abs()

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Return the terms of both factors' gradients."""
        g, up = upstream.abs(), given["up"].abs()
        return {"gate": g * up * Silu.slope(given["gate"]), "up": g * Silu.size(given["gate"])}


# The embedding, log-probabilities and cross-entropy, as `isobit check --like` knows them: operators that take ids.


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


# Attention, grouped-query attention and rotary position embedding, as `isobit check --like` knows them.


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
