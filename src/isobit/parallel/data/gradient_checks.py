"""Checks of each gradient that autograd delivers to a parameter inside a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from isobit.errors import UnsupportedError
from isobit.ops.share import Share, is_partial

ONE_USE = (
    "call each module once per micro-batch: join its inputs into one call, or give each call a "
    "module of its own that shares the weight"
)
OURS = (
    "compute what is trained by isobit's operators (isobit.nn.Linear, isobit.embedding, "
    "isobit.rms_norm, …), without torch.compile; or freeze it by requires_grad_(False)"
)


class GradientChecks:
    """Requires one gradient per parameter and micro-batch, from one isobit operator.

    See [Note: one delivery per parameter] in ops/share.py. A hook on a leaf sees the sum of all
    uses before it becomes `p.grad`.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Register a hook on each of these (name, leaf) pairs."""
        self._share: Share | None = None
        self._delivered: set[int] = set()
        self._leaves = list(named)
        self._hooks = [self._watch(name, leaf) for name, leaf in self._leaves]

    def _watch(self, name: str, leaf: Tensor) -> RemovableHandle:
        hook: RemovableHandle = leaf.register_hook(partial(self._check, name, id(leaf)))  # type: ignore[no-untyped-call]
        return hook

    def begin(self, share: Share) -> None:
        """Expect one gradient of this share for every parameter.

        Hooks run in the order in which they were registered. Ours is moved behind those that were
        registered later, so that it sees a gradient that another hook has changed.
        """
        self._share = share
        self._delivered.clear()
        for at, (name, leaf) in enumerate(self._leaves):
            if next(reversed(leaf._backward_hooks or {}), None) != self._hooks[at].id:
                self._hooks[at].remove()
                self._hooks[at] = self._watch(name, leaf)

    def end(self) -> None:
        """Stop checking: a backward from here on belongs to the user."""
        self._share = None

    def _check(self, name: str, leaf: int, grad: Tensor) -> None:
        share = self._share
        if share is None:
            return
        if leaf in self._delivered:
            raise UnsupportedError(
                expected="one backward in each micro-batch",
                received=f"a second gradient of {name}",
                remedy="add the losses of a micro-batch, and call backward once",
            )
        if not is_partial(grad, share):
            used = leaf in share.used
            why = (
                "several calls, a stock operator or another micro-batch added"
                if used
                else "a stock operator led"
            )
            raise UnsupportedError(
                expected="a gradient that one isobit operator computed, of the samples of this "
                "micro-batch",
                received=f"the gradient of {name}, to which {why}",
                remedy=f"{ONE_USE}; {OURS}" if used else OURS,
            )
        self._delivered.add(leaf)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
