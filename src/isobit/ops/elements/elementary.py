"""The logistic function and the normal distribution in plain torch operations, as csrc/elementary.h has them."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.softmax.portable import exp_nonpositive

# As far as the exponential's chain serves positive arguments, and 1 / (1 + e^-x) is no subnormal.
HIGHEST = {torch.float32: 87.25, torch.float64: 708.0}
FARTHEST = {torch.float32: 16.0, torch.float64: 40.0}  # the normal density is +0 there
AT_ZERO = float.fromhex("0x1.9884533d43651p-2")  # 1 / sqrt(2 pi); fp32 takes it rounded
# The share of the normal distribution beyond a is e^(-a²/2) t (2 + u p(u)), t = 1 / (a + 4), u = a t; the highest power
# first. Relative errors of the fits: 8.3e-9 and 2.8e-14.
P32 = (
    "-0x1.0439a2p-4 0x1.57c3b8p-2 -0x1.23a7acp-1 0x1.5e7f70p-4 0x1.496370p-1 0x1.3e4ffep-2 -0x1.98dab8p+1 "
    "0x1.4ef932p+2 -0x1.18845ep+2"
)
P64 = (
    "-0x1.b2cf68519df6ep-8 0x1.8a4a6c1cdfe28p-5 -0x1.44026703327dfp-3 0x1.4d3d9df2ab61fp-2 -0x1.fcfdcc63b01dbp-2 "
    "0x1.370812e4879e3p-1 -0x1.2595f57ef88b4p-1 0x1.a0a0a9695034ep-2 -0x1.0882fe7bee54ap-2 0x1.119b7c7518e37p-3 "
    "0x1.10a8bba52002ep-5 0x1.f8522f36cb01cp-8 -0x1.c20348d40549ep-3 -0x1.ebbd5523e03fcp-4 0x1.6e9877622848ep-1 "
    "0x1.2e7ca6978590bp-2 -0x1.989d6be4b6432p+1 0x1.4ef7598703b28p+2 -0x1.1884533d469eep+2"
)
P = {
    dtype: tuple(map(float.fromhex, text.split()))
    for dtype, text in ((torch.float32, P32), (torch.float64, P64))
}


def widen(x: Tensor) -> Tensor:
    """In the dtype that arithmetic has."""
    return x if x.dtype == torch.float64 else x.float()


def logistic(x: Tensor) -> tuple[Tensor, Tensor]:
    """e^-x, and 1 + e^-x, by which the logistic function divides."""
    e = torch.where(-x > HIGHEST[x.dtype], torch.inf, exp_nonpositive(-x))
    return e, e + 1.0


def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """s, and 1 - s, by a difference only where that rounds no digit away."""
    e, total = logistic(x)
    s = 1.0 / total
    return s, torch.where(x >= 0, e * s, 1.0 - s)


def normal_share(x: Tensor) -> tuple[Tensor, Tensor]:
    """The share of the standard normal distribution below x, and its density at x."""
    a = x.abs()
    a = torch.where(a > FARTHEST[x.dtype], FARTHEST[x.dtype], a)
    e = exp_nonpositive(a * a * -0.5)
    t = 1.0 / (a + 4.0)
    u = a * t
    p = torch.full_like(u, P[x.dtype][0])
    for coefficient in P[x.dtype][1:]:
        p = p * u + coefficient
    beyond = e * (t * (u * p + 2.0))
    return torch.where(x >= 0, 1.0 - beyond, beyond), e * AT_ZERO
