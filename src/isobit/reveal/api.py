"""`isobit.reveal.order` and `isobit.reveal.certify`: they take a target, or any callable that sums a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.reveal import certificate as certificates
from isobit.reveal import tree as revealing
from isobit.reveal.certificate import Certificate
from isobit.reveal.target import Progress, Target
from isobit.reveal.targets import sums
from isobit.reveal.tree import Tree


def order(
    target: Target | Callable[[Tensor], Tensor],
    n: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    arithmetic: bool = True,
    progress: Progress | None = None,
) -> Tree:
    """Reveal the order in which a target, or a callable that sums a vector of n, adds its terms.

    With `arithmetic`, what each addition does is probed too, and order and arithmetic together are replayed on random
    terms, to the bit. Raises RevealError where the target is no sum, is not repeatable, or is no tree of additions.
    """
    return revealing.reveal(accept(target, n, dtype), arithmetic=arithmetic, progress=progress)


def certify(
    target: Callable[..., Target | Callable[[Tensor], Tensor]],
    configurations: Iterable[Any],
    n: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    arithmetic: bool = True,
    progress: Progress | None = None,
) -> Certificate:
    """Reveals `target(configuration)` for each configuration: one order, or the classes and where they part.

    A mapping is passed as keywords: `certify(targets.linear, [{"k": 1024, "m": m} for m in (1, 8, 64)])`.
    """

    def accepted(*given: Any, **named: Any) -> Target:
        return accept(target(*given, **named), n, dtype)

    return certificates.certify(accepted, configurations, arithmetic=arithmetic, progress=progress)


def accept(target: Any, n: int | None, dtype: torch.dtype) -> Target:
    """The target itself, or one made of a callable."""
    if hasattr(target, "sums") and hasattr(target, "n"):
        known: Target = target
        if n is not None and n != target.n:
            raise ArgumentError(
                expected=f"n = {target.n}, as the target has it",
                received=f"n = {n}",
                remedy="leave n out",
            )
        return known
    if not callable(target):
        raise ArgumentError(
            expected="a target of isobit.reveal.targets, or a callable that sums a vector",
            received=f"{type(target).__name__}",
            remedy="wrap the sum in a function of one vector",
        )
    if n is None:
        raise ArgumentError(
            expected="n, the number of terms",
            received="a callable alone",
            remedy="pass n, as in isobit.reveal.order(torch.sum, 4096)",
        )
    return sums.of(target, n, dtype)
