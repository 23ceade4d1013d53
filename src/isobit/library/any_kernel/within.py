"""How far a kernel may be from exact arithmetic: a bound for every element, from roundings that any kernel may make.

[Note: the bound of an element]
A kernel is compared with a reference in fp64 on the same inputs. The error of an element may be

    (s · u₁₆ + c · u₃₂) · M + n · u₃₂ · T

M is the sum of the magnitudes of the terms that are added to the element, so that cancellation is no excuse and no
fault. n counts the terms of the sums that the element passes: a sum of n terms in fp32, in any order, has an error of
at most n · u₃₂ times the sum of their magnitudes, to first order; T is what that is in the element. It is M unless an
operator says more: the sum of a softmax enters as a relative error, and its terms are not spread by their exponents. In
a row of a vocabulary a bound of n · u₃₂ · M would be larger than the error of a sum in bf16. c is for the other
operations. s counts the values that a kernel may store in the inputs' dtype, the result among them; it is 0 in fp32.
u is the unit roundoff: 2⁻²⁴ in fp32, 2⁻⁸ in bf16, 2⁻¹¹ in fp16.
tolerance-table-v1 (isobit/library/tolerances) derives each bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.any_kernel.planted import Planted
from isobit.library.claims import Subject

Values = dict[str, Tensor]
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# A stored exponential or sigmoid below its dtype's least normal number may be taken for zero. In fp32 that is where
# |x| < 89, and swiglu multiplies it by |gate| and by |up| < 6.
TIMES_LEAST = 89 * 6
UPSTREAM = 50  # the stream of random numbers that upstream gradients are drawn from


class Operator(Planted):
    """An operator: its reference, the magnitudes of its terms, and how many values a kernel may store."""

    # Values that are stored in 16 bits on the way to the output, and to a gradient.
    FORWARD: ClassVar[int]
    BACKWARD: ClassVar[int]
    OTHER: ClassVar[int] = 16  # c of the note: an exponential, a root, a division, a few products
    WIDE_OUTPUT: ClassVar[bool] = False  # whether the output may be fp32 for 16-bit inputs

    @staticmethod
    def call(subject: Subject, *drawn: Tensor) -> Tensor:
        """Call a kernel with what it takes instead of the drawn arguments; the contract names it too."""
        return subject(*drawn)

    @staticmethod
    def magnitude(given: Values) -> Tensor:
        """Add the magnitudes of the terms of each element of the output."""
        raise NotImplementedError

    @classmethod
    def summed(cls, given: Values) -> Tensor:
        """Return T of the note: what the roundings of the output's sums are relative to."""
        return cls.magnitude(given)

    @staticmethod
    def gradients(given: Values, upstream: Tensor) -> Values:
        """Add the magnitudes of the terms of each element of each argument's gradient."""
        raise NotImplementedError

    @staticmethod
    def sums(given: Values) -> tuple[int, int]:
        """Return n of the note, of the output and of the gradients."""
        raise NotImplementedError

    @classmethod
    def overflow(cls, subject: Subject, case: Case, tally: Tally) -> None:
        """The output is within the bound where values are large, and may be zero instead of next to nothing."""
        cls.forward(subject, case, tally, TIMES_LEAST * torch.finfo(case.dtype).smallest_normal)

    @classmethod
    def forward(cls, subject: Subject, case: Case, tally: Tally, slack: float = 0.0) -> None:
        """The output is within the bound of exact arithmetic, and `slack` more."""
        tally.count(case.rows)
        wide = {name: t.double() for name, t in case.arguments.items()}
        found = subject(*case.arguments.values())
        exact = cls.call(cls.reference, *wide.values())
        limit = cls.output_bound(case.dtype, wide) + slack
        dtype = torch.float32 if cls.WIDE_OUTPUT and found.dtype == torch.float32 else case.dtype
        compare(found, exact, limit, dtype, tally, "the output")

    @classmethod
    def backward(cls, subject: Subject, case: Case, tally: Tally) -> None:
        """Every argument's gradient is within the bound of exact arithmetic."""
        tally.count(case.rows)
        wide = {name: t.double() for name, t in case.arguments.items()}
        exactly = partial(cls.call, cls.reference)
        upstream = case.draw(tuple(exactly(*wide.values()).shape), UPSTREAM)
        limits = cls.gradient_bounds(case.dtype, wide, upstream.double())
        found = differentiate(subject, case.arguments, upstream, list(limits))
        exact = differentiate(exactly, wide, upstream.double(), list(limits))
        for name, limit in limits.items():
            compare(found[name], exact[name], limit, case.dtype, tally, f"the gradient of {name}")

    @classmethod
    def output_bound(cls, dtype: torch.dtype, given: Values) -> Tensor:
        """Return the bound of each element of the output: see [Note: the bound of an element]."""
        of_sums = factor(torch.float32, 0, cls.sums(given)[0]) * cls.summed(given)
        return factor(dtype, cls.FORWARD, cls.OTHER) * cls.magnitude(given) + of_sums

    @classmethod
    def gradient_bounds(cls, dtype: torch.dtype, given: Values, upstream: Tensor) -> Values:
        """Return the bounds of each argument's gradient."""
        times = factor(dtype, cls.BACKWARD, cls.sums(given)[1] + cls.OTHER)
        return {name: times * size for name, size in cls.gradients(given, upstream).items()}


def factor(dtype: torch.dtype, stored: int, operations: int) -> float:
    """Return s · u₁₆ and u₃₂ times the operations."""
    of_storage = 0.0 if dtype == torch.float32 else stored * ROUNDOFF[dtype]
    return of_storage + operations * ROUNDOFF[torch.float32]


def differentiate(
    function: Callable[..., Tensor], given: Values, upstream: Tensor, names: list[str]
) -> Values:
    """Return the gradients of the named arguments."""
    leaves = {name: t.detach().clone().requires_grad_(name in names) for name, t in given.items()}
    with torch.enable_grad():
        output = function(*leaves.values())
    # A copy: a backward may write to the gradient that it is given.
    given_grad = upstream.to(output.dtype, copy=True)
    found = torch.autograd.grad(output, [leaves[name] for name in names], given_grad)
    return dict(zip(names, found, strict=True))


def compare(
    found: Tensor, exact: Tensor, limit: Tensor, dtype: torch.dtype, tally: Tally, what: str
) -> None:
    """Require a shape, the dtype of the inputs, and an error within the limit of every element."""
    if found.shape != exact.shape or found.dtype != dtype:
        tally.compared += 1
        tally.fail(
            f"{what} is {list(found.shape)} {found.dtype}, expected {list(exact.shape)} {dtype}"
        )
        return
    kind = torch.finfo(dtype)
    error = (found.detach().double() - exact).abs()
    allowed = limit + kind.smallest_normal * kind.eps  # the least subnormal
    kept = (error <= allowed) & found.isfinite()
    tally.true(kept, f"{what} over its bound, in bounds", error / allowed)
