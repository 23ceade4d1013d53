"""Claims and proofs of layernorm-kernel-v1, and planted wrong layer norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.foundation.records import Proof
from isobit.library import certificates, stock
from isobit.library.claims import Subject
from isobit.library.norms import ELSE, ROWS, feature_question
from isobit.ops.layer_norm import portable
from isobit.ops.layer_norm.op import layer_norm
from isobit.reveal import targets

PROBED, UNPROBED = (54, 502), 10  # elements of the target; the others make the mean zero


def portable_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """Return the portable executor's result: the same order in plain torch operations."""
    return portable.layer_norm(x, weight, bias, eps)[0]


def prove_rows(subject: Subject) -> Proof:
    """Certify the order of the sum of squares, and compare bits, mean included, with the definition."""
    for width in (64, 300, 1025):
        x = draw_values((257, width), "wide", torch.Generator().manual_seed(width))
        ones = torch.ones(width)
        for rows in ROWS:
            pair = (norm(x[:rows], ones, ones) for norm in (subject, portable_layer_norm))
            difference = bits.first_difference(*pair)
            if difference is not None:
                failure = f"rows of {width} against the definition: {difference}"
                return Proof(certificates.ENGINE, "", 1, failure)
    questions = (feature_question(subject, targets.layer_norm, width, UNPROBED) for width in PROBED)
    covers = f"fp32 rows of {list(PROBED)} and {UNPROBED} more, {list(ROWS)} of them: the squares"
    return certificates.prove_orders(questions, f"{covers}, {ELSE}")


def shifted_rows(subject: Subject, case: Case, tally: Tally) -> None:
    """A shift that is exact moves only the mean: a variance by E[x²] − mean² would be inaccurate."""
    x = (case.arguments["x"].float().clamp(-8, 8) * 64).round() / 64
    weight, bias = (case.arguments[name].float() for name in ("weight", "bias"))
    exact = stock.layer_norm(x.double(), weight.double(), bias.double())
    tally.count(case.rows)
    for shift in (0.0, 1024.0, -4096.0):
        error = (subject(x + shift, weight, bias).double() - exact).abs()
        # The mean is off by roundings of the shift, which the scale enlarges; 1e-5 of both is what is allowed.
        allowed = 1e-5 * (1 + abs(shift)) * (1 + exact.abs().amax(-1, keepdim=True))
        tally.true(error <= allowed, f"shifted by {shift}", error)


# ---- planted --------------------------------------------------------------------------------------------

Statistics = Callable[
    [Tensor, float], tuple[Tensor, Tensor]
]  # (fp32 x, eps) -> (x less mean, scale)


def with_statistics(statistics: Statistics) -> Subject:
    """Return a layer norm with other means and scales."""

    def norm(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
    ) -> Tensor:
        rest, scale = statistics(x.float(), eps)
        y = (rest * scale) * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return norm


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each row."""
    return x.mean(-1, keepdim=True)


def _eps_outside(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add eps to the root."""
    rest = x - mean_of(x)
    return rest, 1 / (mean_of(rest.square()).sqrt() + eps)


def _over_the_batch(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Take mean and variance of the whole batch."""
    rest = x - x.mean()
    return rest, (rest.square().mean() + eps).rsqrt()


def _unbiased(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Divide the variance by n − 1."""
    rest = x - mean_of(x)
    variance = rest.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)
    return rest, (variance + eps).rsqrt()


def _one_pass(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Take the variance as E[x²] − mean², which cancels."""
    variance = mean_of(x.square()) - mean_of(x).square()
    return x - mean_of(x), (variance.abs() + eps).rsqrt()


eps_outside, over_the_batch = with_statistics(_eps_outside), with_statistics(_over_the_batch)
unbiased, one_pass = with_statistics(_unbiased), with_statistics(_one_pass)


def without_bias(x: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
    """Leave out the bias."""
    return layer_norm(x, weight, None, **named)


def summed_backwards(x: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
    """Sum in another order where there are few rows."""
    if x.shape[0] >= 8:
        return layer_norm(x, weight, bias, **named)
    turned = None if bias is None else bias.flip(-1)
    return layer_norm(x.flip(-1), weight.flip(-1), turned, **named).flip(-1)
