"""`isobit.reveal.order` and `isobit.reveal.compare_orders`, for targets and for any callable that sums a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.reveal import certificate as certificates
from isobit.reveal import tree as revealing
from isobit.reveal.certificate import OrderComparison
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
    """Reveal the order in which a function adds its terms.

    The function is called with chosen terms, and its results show which terms are added first. Then order and
    arithmetic are replayed on random vectors of many kinds, and must predict every result to the bit.

    Args:
        target: a target of `isobit.reveal.targets`, or a callable that takes a vector and returns its sum (a tensor
            of one element, or a Python or NumPy number).
        n: the number of terms; required for a callable, not allowed to differ from a target's own.
        dtype: the dtype of the vector that a callable is given: fp32, bf16 or fp16.
        arithmetic: probe and replay what each addition does, too. Without it only the order is found.
        progress: called with (stage, done, total).

    Returns:
        The order as a `Tree`.

    Raises:
        ArgumentError: The target cannot be called, or `n` is missing or differs.
        RevealError: It is not a sum, gives other bits the second time, or is not a tree of additions (for example a
            compensated sum).

    Example:
        >>> import torch, isobit
        >>> def left_to_right(x):
        ...     total = x[0]
        ...     for value in x[1:]:
        ...         total = total + value
        ...     return total
        >>> tree = isobit.reveal.order(left_to_right, 6)
        >>> print(tree)
        chain of 6
        >>> tree.branch
        (((((0, 1), 2), 3), 4), 5)
        >>> print(tree.arithmetic)
        fp32 sums, subnormals kept, -0 kept
    """
    return revealing.reveal(accept(target, n, dtype), arithmetic=arithmetic, progress=progress)


def compare_orders(
    target: Callable[..., Target | Callable[[Tensor], Tensor]],
    configurations: Iterable[Any],
    n: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    arithmetic: bool = True,
    progress: Progress | None = None,
) -> OrderComparison:
    """Reveal a target in many configurations and compare the orders.

    Args:
        target: called with each configuration; returns a target, or a callable that sums a vector of `n`.
        configurations: what `target` is called with; a mapping is passed as keywords.
        n: the number of terms, if `target` returns callables.
        dtype: the dtype of the vectors that callables are given.
        arithmetic: as in `order`.
        progress: called with (stage, done, total).

    Returns:
        An `OrderComparison`: the classes of configurations that add alike, and where the others first differ.

    Raises:
        ArgumentError: There are no configurations, or `target` returns something that cannot be probed.
        EngineError: Revealing does not work on this machine (it is checked first on sums of known order).

    Example:
        >>> import isobit
        >>> from isobit.reveal import targets
        >>> sizes = [{"k": 24, "n": 8, "m": m} for m in (1, 4)]
        >>> def ours(k, n, m):
        ...     return targets.linear(k, m, n, function=isobit.linear)
        >>> found = isobit.reveal.compare_orders(ours, sizes)
        >>> found.kept, len(found.classes), found.classes[0].label
        (True, 1, 'm=1, 4')
    """

    def accepted(*given: Any, **named: Any) -> Target:
        return accept(target(*given, **named), n, dtype)

    return certificates.compare_orders(
        accepted, configurations, arithmetic=arithmetic, progress=progress
    )


def accept(target: Any, n: int | None, dtype: torch.dtype) -> Target:
    """Return the target itself, or one made of a callable."""
    if hasattr(target, "sums") and hasattr(target, "n"):
        known: Target = target
        if n is not None and n != target.n:
            raise ArgumentError(
                expected=f"n = {target.n}, the number of terms of the target",
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
