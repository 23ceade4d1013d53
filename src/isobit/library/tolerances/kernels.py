"""The least accurate kernels that are still right, and the errors that their roundings can have.

See [Note: the least accurate right kernel] in claims.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.library.any_kernel import operators
from isobit.library.any_kernel.operators import ids_of, repeated, targets_of, turned
from isobit.library.stock import IGNORED

# Values with the error that their roundings can have, to first order.
#
# [Note: errors to first order] A value carries its exact number and two bounds: its error is at most `wide` · u₃₂ +
# `narrow` · u₁₆, if products of roundings are neglected. u₃₂ is the unit roundoff of fp32, u₁₆ that of the dtype in
# which a kernel stores; where that is fp32, `narrow` is not counted, because every operation is rounded to fp32
# already.
#
# - A product, a sum of two and a quotient pass the errors of both on, and are rounded once to fp32.
# - A sum of n terms, in any order, is rounded n − 1 times, each time by at most u₃₂ times the sum of the magnitudes.
# - A function passes the error of its argument on by its slope, and is wrong by 2 ulp, which is at most 4 · u₃₂.
# - `stored` is a value that is written in the inputs' dtype and read again.
#
# The rules are those of Higham, Accuracy and Stability of Numerical Algorithms (2002), chapters 2 to 4.

FUNCTION = 4  # roundoffs of fp32 in the result of exp, log, erf or rsqrt


@dataclass(frozen=True)
class Rounded:
    """An exact value in fp64, and its error in roundoffs of fp32 and of the stored dtype."""

    value: Tensor
    wide: Tensor
    narrow: Tensor

    @staticmethod
    def exact(value: Tensor) -> Rounded:
        """Return a value without an error, such as an argument."""
        return Rounded(value, torch.zeros_like(value), torch.zeros_like(value))

    def stored(self) -> Rounded:
        """Round to the dtype of the inputs."""
        return Rounded(self.value, self.wide, self.narrow + self.value.abs())

    def each(self, move: Callable[[Tensor], Tensor]) -> Rounded:
        """Move numbers without computing: transpose, expand, gather."""
        return Rounded(move(self.value), move(self.wide), move(self.narrow))

    def weighted(self, factor: Tensor | float) -> Rounded:
        """Multiply value and errors by an exact number, without a rounding."""
        size = abs(factor) if isinstance(factor, float) else factor.abs()
        return Rounded(self.value * factor, self.wide * size, self.narrow * size)

    def __add__(self, other: Rounded) -> Rounded:
        value = self.value + other.value
        return Rounded(value, self.wide + other.wide + value.abs(), self.narrow + other.narrow)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + other.weighted(-1.0)

    def __mul__(self, other: Rounded) -> Rounded:
        a, b = self.value.abs(), other.value.abs()
        wide = a * other.wide + b * self.wide + a * b
        return Rounded(self.value * other.value, wide, a * other.narrow + b * self.narrow)

    def __matmul__(self, other: Rounded) -> Rounded:
        a, b = self.value.abs(), other.value.abs()
        terms = self.value.shape[-1]
        wide = a @ other.wide + self.wide @ b + terms * (a @ b)
        return Rounded(self.value @ other.value, wide, a @ other.narrow + self.narrow @ b)

    def sum(self, axis: int) -> Rounded:
        """Add along an axis, which stays as one of length 1."""
        terms = self.value.shape[axis]

        def total(t: Tensor) -> Tensor:
            return t.sum(axis, keepdim=True)

        wide = total(self.wide) + (terms - 1) * total(self.value.abs())
        return Rounded(total(self.value), wide, total(self.narrow))

    def mean(self) -> Rounded:
        """Return the mean of the last axis, whose division is rounded."""
        return self.sum(-1).scaled(1 / self.value.shape[-1])

    def scaled(self, factor: float) -> Rounded:
        """Multiply by a constant."""
        return self * Rounded.exact(torch.tensor(factor, dtype=torch.float64))

    def through(self, value: Tensor, slope: Tensor) -> Rounded:
        """Return a function's value: the argument's error is multiplied by the slope."""
        size = slope.abs()
        wide = size * self.wide + FUNCTION * value.abs()
        return Rounded(value, wide, size * self.narrow)

    def exp(self) -> Rounded:
        """Return e^x; the argument is multiplied by log2(e) first, which is a rounding of it."""
        value = self.value.exp()
        return Rounded(self.value, self.wide + self.value.abs(), self.narrow).through(value, value)

    def log(self) -> Rounded:
        """Return the logarithm."""
        return self.through(self.value.log(), 1 / self.value)

    def rsqrt(self) -> Rounded:
        """Return 1/√x."""
        value = self.value.rsqrt()
        return self.through(value, value / (2 * self.value))

    def erf(self) -> Rounded:
        """Return the error function."""
        slope = 2 / torch.pi**0.5 * (-self.value.square()).exp()
        return self.through(torch.special.erf(self.value), slope)

    def reciprocal(self) -> Rounded:
        """Return 1/x, rounded once."""
        value = 1 / self.value
        size = value.square()
        return Rounded(value, size * self.wide + value.abs(), size * self.narrow)


Errors = dict[str, Rounded]
Given = Mapping[str, Rounded]


def constant(number: float) -> Rounded:
    """Return a constant without an error."""
    return Rounded.exact(torch.tensor(number, dtype=torch.float64))


def transposed(t: Rounded) -> Rounded:
    """Swap the last two axes."""
    return t.each(lambda t: t.mT)


def over_rows(t: Rounded) -> Rounded:
    """Add the first axis."""
    return t.sum(0).each(lambda t: t.squeeze(0))


# ---- products -------------------------------------------------------------------------------------------


def linear(given: Given) -> Rounded:
    """Store the product, then add the bias."""
    return ((given["x"] @ transposed(given["weight"])).stored() + given["bias"]).stored()


def linear_gradients(given: Given, g: Rounded) -> Errors:
    """Store the result alone."""
    return {
        "x": (g @ given["weight"]).stored(),
        "weight": (transposed(g) @ given["x"]).stored(),
        "bias": over_rows(g).stored(),
    }


# ---- norms ----------------------------------------------------------------------------------------------


def inverse_root(x: Rounded, eps: float) -> Rounded:
    """Return 1/√(mean(x²) + eps)."""
    return ((x * x).mean() + constant(eps)).rsqrt()


def rms_norm(given: Given) -> Rounded:
    """Store the scale, x̂ and the result."""
    scale = inverse_root(given["x"], operators.RMS_EPS).stored()
    return ((given["x"] * scale).stored() * given["weight"]).stored()


def rms_norm_gradients(given: Given, g: Rounded) -> Errors:
    """Store x̂, g·w, g·x̂ and the results."""
    scale = inverse_root(given["x"], operators.RMS_EPS)
    unit = (given["x"] * scale).stored()
    inner = (g * given["weight"]).stored()
    of_x = scale * (inner - unit * (inner * unit).mean())
    return {"x": of_x.stored(), "weight": over_rows((g * unit).stored()).stored()}


def layer_norm(given: Given) -> Rounded:
    """Store x − mean, x̂, x̂·w and the result."""
    centred = (given["x"] - given["x"].mean()).stored()
    unit = (centred * inverse_root(centred, operators.LAYER_EPS)).stored()
    return ((unit * given["weight"]).stored() + given["bias"]).stored()


def layer_norm_gradients(given: Given, g: Rounded) -> Errors:
    """Store x̂, g·w, g·x̂ and the results."""
    centred = given["x"] - given["x"].mean()
    scale = inverse_root(centred, operators.LAYER_EPS)
    unit = (centred * scale).stored()
    inner = (g * given["weight"]).stored()
    of_x = scale * (inner - inner.mean() - unit * (inner * unit).mean())
    of_weight = over_rows((g * unit).stored())
    return {"x": of_x.stored(), "weight": of_weight.stored(), "bias": over_rows(g).stored()}


# ---- exponentials ---------------------------------------------------------------------------------------


def shifted(x: Rounded) -> Rounded:
    """Subtract the largest."""
    at = x.value.argmax(-1, keepdim=True)
    return x - x.each(lambda t: t.gather(-1, at))


def normalised(x: Rounded) -> Rounded:
    """Return e^x / Σ e^x."""
    power = x.exp()
    return power * power.sum(-1).reciprocal()


def softmax(given: Given) -> Rounded:
    """Store x − max and the result."""
    return normalised(shifted(given["x"]).stored()).stored()


def softmax_gradients(given: Given, g: Rounded) -> Errors:
    """Store x − max, the output and the result."""
    y = softmax(given)
    return {"x": (y * (g - (y * g).sum(-1))).stored()}


def log_softmax(given: Given) -> Rounded:
    """Store x − max, the logarithm and the result."""
    x = shifted(given["x"]).stored()
    return (x - x.exp().sum(-1).log().stored()).stored()


def log_softmax_gradients(given: Given, g: Rounded) -> Errors:
    """Store the output, Σg and the result."""
    x = shifted(given["x"])
    y = (x - x.exp().sum(-1).log()).stored().exp()
    return {"x": (g - y * g.sum(-1).stored()).stored()}


# ---- elementwise ----------------------------------------------------------------------------------------


def sigmoid(x: Rounded) -> Rounded:
    """Return 1 / (1 + e^−x)."""
    return (constant(1.0) + x.weighted(-1.0).exp()).reciprocal()


def silu_slope(x: Rounded) -> Rounded:
    """Store σ, and σ·(1 + x·(1 − σ))."""
    part = sigmoid(x).stored()
    return (part * (constant(1.0) + x * (constant(1.0) - part))).stored()


def silu(given: Given) -> Rounded:
    """Store σ and the result."""
    return (given["x"] * sigmoid(given["x"]).stored()).stored()


def silu_gradients(given: Given, g: Rounded) -> Errors:
    """Store σ, the slope and the result."""
    return {"x": (g * silu_slope(given["x"])).stored()}


def gelu(given: Given) -> Rounded:
    """Store erf, 1 + erf and the result."""
    x = given["x"]
    part = (constant(1.0) + x.scaled(0.5**0.5).erf().stored()).stored()
    return (x.weighted(0.5) * part).stored()


def gelu_gradients(given: Given, g: Rounded) -> Errors:
    """Store erf, Φ, x·φ, their sum and the result."""
    x = given["x"]
    below = (constant(1.0) + x.scaled(0.5**0.5).erf().stored()).weighted(0.5).stored()
    density = (x * x).weighted(-0.5).exp().scaled((2 * torch.pi) ** -0.5)
    return {"x": (g * (below + (x * density).stored()).stored()).stored()}


def swiglu(given: Given) -> Rounded:
    """Store σ, silu(gate) and the result."""
    return (silu({"x": given["gate"]}) * given["up"]).stored()


def swiglu_gradients(given: Given, g: Rounded) -> Errors:
    """Store g·up, the slope, silu(gate) and the results."""
    of_gate = (g * given["up"]).stored() * silu_slope(given["gate"])
    return {"gate": of_gate.stored(), "up": (g * silu({"x": given["gate"]})).stored()}


# ---- losses ---------------------------------------------------------------------------------------------


def at_targets(terms: Rounded, targets: Tensor) -> Rounded:
    """Return each row's term at its target; 0 without one."""
    return terms.each(lambda t: operators.at_targets(t, targets))


def chosen(g: Rounded, targets: Tensor, count: int) -> Rounded:
    """Return a gradient at each row's target."""

    def scattered(t: Tensor) -> Tensor:
        active = torch.where(targets == IGNORED, 0.0, t).unsqueeze(-1)
        return t.new_zeros(*t.shape, count).scatter(-1, targets.clamp(min=0).unsqueeze(-1), active)

    return g.each(scattered)


def cross_entropy(given: Given) -> Rounded:
    """Store what log_softmax does."""
    logits = given["logits"]
    targets = targets_of(logits.value, logits.value.shape[-1])
    return at_targets(log_softmax({"x": logits}), targets).weighted(-1.0)


def cross_entropy_gradients(given: Given, g: Rounded) -> Errors:
    """Store what the gradient of log_softmax does; Σg has one term."""
    logits = given["logits"]
    count = logits.value.shape[-1]
    at = chosen(g.weighted(-1.0), targets_of(logits.value, count), count)
    return {"logits": log_softmax_gradients({"x": logits}, at)["x"]}


def logprob(given: Given) -> Rounded:
    """Store the logits, and what log_softmax does."""
    logits = (given["hidden"] @ transposed(given["weight"])).stored()
    targets = targets_of(given["hidden"].value, len(given["weight"].value))
    return at_targets(log_softmax({"x": logits}), targets)


def logprob_gradients(given: Given, g: Rounded) -> Errors:
    """Store the logits, their gradient and the results."""
    logits = (given["hidden"] @ transposed(given["weight"])).stored()
    count = len(given["weight"].value)
    targets = targets_of(given["hidden"].value, count)
    active = g.each(lambda t: torch.where(targets == IGNORED, 0.0, t).unsqueeze(-1))
    of_logits = (chosen(g, targets, count) - normalised(shifted(logits)) * active).stored()
    return {
        "hidden": (of_logits @ given["weight"]).stored(),
        "weight": (transposed(of_logits) @ given["hidden"]).stored(),
    }


# ---- attention ------------------------------------------------------------------------------------------


def probabilities(given: Given) -> Rounded:
    """Store the scores and the probabilities."""
    q, k = given["q"], given["k"].each(lambda t: repeated(t, given["q"].value))
    scores = (q @ transposed(k)).scaled(q.value.shape[-1] ** -0.5).stored()
    hidden = torch.ones(scores.value.shape[-2:], dtype=torch.bool).triu(1)
    seen = Rounded(
        scores.value.masked_fill(hidden, -1e9),
        scores.wide.masked_fill(hidden, 0),
        scores.narrow.masked_fill(hidden, 0),
    )
    return normalised(shifted(seen)).each(lambda t: t.masked_fill(hidden, 0)).stored()


def attention(given: Given) -> Rounded:
    """Store the scores, the probabilities and the result."""
    v = given["v"].each(lambda t: repeated(t, given["q"].value))
    return (probabilities(given) @ v).stored()


def attention_gradients(given: Given, g: Rounded) -> Errors:
    """Store scores, probabilities, their gradients, each head's dk and dv, and the results."""
    q = given["q"]
    k, v = (given[name].each(lambda t: repeated(t, q.value)) for name in ("k", "v"))
    p = probabilities(given)
    of_p = (g @ transposed(v)).stored()
    of_scores = (p * (of_p - (p * of_p).sum(-1))).scaled(q.value.shape[-1] ** -0.5).stored()
    return {
        "q": (of_scores @ k).stored(),
        "k": over_a_group(transposed(of_scores), q, given["k"]),
        "v": over_a_group(transposed(p), g, given["k"]),
    }


def over_a_group(left: Rounded, right: Rounded, keys: Rounded) -> Rounded:
    """Add the products of the heads that share a key head: in one sum, or each stored and then added."""
    groups = (keys.value.shape[-3], -1)
    heads = (left @ right).stored().each(lambda t: torch.unflatten(t, -3, groups))
    if heads.value.shape[-3] == 1:
        return heads.each(lambda t: t.squeeze(-3))
    total = heads.sum(-3).each(lambda t: t.squeeze(-3)).stored()
    left = left.each(lambda t: torch.unflatten(t, -3, groups).transpose(-3, -2).flatten(-2))
    right = right.each(lambda t: torch.unflatten(t, -3, groups).flatten(-3, -2))
    wide = torch.maximum(total.wide, (left @ right).wide)
    return Rounded(total.value, wide, total.narrow)


# ---- rotation and lookup --------------------------------------------------------------------------------


def rotated(x: Rounded, given: Given, back: bool) -> Rounded:
    """Store both products and their sum."""
    cos, sin = (
        given[name].each(lambda t: torch.cat([t, t], -1).unsqueeze(-3)) for name in ("cos", "sin")
    )
    other = x.each(turned)
    signed = Rounded(-other.value if back else other.value, other.wide.abs(), other.narrow.abs())
    return ((x * cos).stored() + (signed * sin).stored()).stored()


def rope(given: Given) -> Rounded:
    """Turn forward."""
    return rotated(given["x"], given, back=False)


def rope_gradients(given: Given, g: Rounded) -> Errors:
    """Turn back."""
    return {"x": rotated(g, given, back=True)}


def embedding(given: Given) -> Rounded:
    """Copy rows."""
    ids = ids_of(given["places"].value, len(given["weight"].value))
    return given["weight"].each(lambda t: t[ids])


def embedding_gradients(given: Given, g: Rounded) -> Errors:
    """Add a row's tokens, then store it: a product with ones."""
    ids = ids_of(given["places"].value, len(given["weight"].value))
    ones = torch.nn.functional.one_hot(ids, len(given["weight"].value)).double()
    return {"weight": (Rounded.exact(ones.mT.contiguous()) @ g).stored()}
