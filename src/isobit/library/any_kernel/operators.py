"""The operators that `isobit check --like` knows, each with the magnitudes that its tolerance is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library import stock
from isobit.library.any_kernel.within import Operator, Values

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
