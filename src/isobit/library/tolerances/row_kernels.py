"""The least accurate kernels of products, norms, exponentials and elementwise operators that are still right.

See the note of derivations.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from isobit.library.any_kernel import operators
from isobit.library.tolerances.rounding import Rounded

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
