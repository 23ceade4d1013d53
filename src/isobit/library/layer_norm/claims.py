"""What layernorm-kernel-v1 is held to: stock, the portable executor, proofs, and planted wrong layer norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.library.norms.orders import ROWS, feature_question
from isobit.library.questions import prove
from isobit.ops.layer_norm import portable
from isobit.ops.layer_norm.op import layer_norm
from isobit.records import Proof
from isobit.reveal import targets

PROBED, UNPROBED = (54, 502), 10  # elements of the target; the others make the mean zero


def stock(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """torch's own, which knows no samples."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def portable_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """The other executor: the same order in plain torch operations."""
    return portable.layer_norm(x, weight, bias, eps)[0]


def prove_rows(subject: Callable[..., Tensor]) -> Proof:
    """The sum of squares has the defined order; and the bits, mean included, are the portable definition's."""
    for width in (64, 300, 1025):
        x = draw_values((257, width), "wide", torch.Generator().manual_seed(width))
        ones = torch.ones(width)
        for rows in ROWS:
            found = subject(x[:rows], ones, ones)
            difference = bits.first_difference(found, portable_layer_norm(x[:rows], ones, ones))
            if difference is not None:
                return Proof(
                    "order certificate",
                    "",
                    1,
                    f"rows of {width} against the definition: {difference}",
                )
    questions = [feature_question(subject, targets.layer_norm, width, UNPROBED) for width in PROBED]
    return prove(
        questions,
        f"fp32 rows of {list(PROBED)} and {UNPROBED} more, {list(ROWS)} of them: the squares",
    )


def shifted_rows(subject: Callable[..., Tensor], case: Case, tally: Tally) -> None:
    """A shift that is exact moves the mean alone: where the variance is E[x²] − mean², it shows."""
    x = (case.arguments["x"].float().clamp(-8, 8) * 64).round() / 64
    weight, bias = (case.arguments[name].float() for name in ("weight", "bias"))
    exact = stock(x.double(), weight.double(), bias.double())
    tally.count(case.rows)
    for shift in (0.0, 1024.0, -4096.0):
        error = (subject(x + shift, weight, bias).double() - exact).abs()
        # The mean is off by roundings of the shift, which the scale enlarges; 1e-5 of both is what is allowed.
        allowed = 1e-5 * (1 + abs(shift)) * (1 + exact.abs().amax(-1, keepdim=True))
        tally.true(error <= allowed, f"shifted by {shift}", error)


# ---- planted --------------------------------------------------------------------------------------------


def finished(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (x * scale) * weight.float()
    return y if bias is None else y + bias.float()


def eps_outside(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """eps is added to the root."""
    rest = x.float() - x.float().mean(-1, keepdim=True)
    return finished(rest, 1 / (rest.square().mean(-1, keepdim=True).sqrt() + eps), weight, bias).to(
        x.dtype
    )


def over_the_batch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """Mean and variance of the whole batch."""
    rest = x.float() - x.float().mean()
    return finished(rest, (rest.square().mean() + eps).rsqrt(), weight, bias).to(x.dtype)


def unbiased(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """The variance is divided by n − 1."""
    rest = x.float() - x.float().mean(-1, keepdim=True)
    variance = rest.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)
    return finished(rest, (variance + eps).rsqrt(), weight, bias).to(x.dtype)


def one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """The variance is the mean of squares less the square of the mean, which cancels."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return finished(wide - mean, (variance.abs() + eps).rsqrt(), weight, bias).to(x.dtype)


def without_bias(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **named: Any
) -> Tensor:
    """The bias is forgotten."""
    return layer_norm(x, weight, None, eps, **named)


def summed_backwards(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **named: Any
) -> Tensor:
    """The right sums in another order where there are few rows."""
    if x.shape[0] >= 8:
        return layer_norm(x, weight, bias, eps, **named)
    turned = None if bias is None else bias.flip(-1)
    return layer_norm(x.flip(-1), weight.flip(-1), turned, eps, **named).flip(-1)
