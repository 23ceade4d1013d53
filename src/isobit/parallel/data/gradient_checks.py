"""Looks at each gradient that autograd delivers to a parameter while a share is collected, and refuses a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from isobit.errors import UnsupportedError
from isobit.ops.share import Share, is_partial

ONE_USE = (
    "call each module once per micro-batch: join its inputs into one call, or give each call a module of its own that "
    "shares the weight"
)
OURS = (
    "compute what is trained by isobit's operators (isobit.nn.Linear, isobit.embedding, isobit.rms_norm, …), without "
    "torch.compile; or freeze it by requires_grad_(False)"
)


class Deliveries:
    """Requires one gradient per parameter and micro-batch, from one isobit operator: [Note: one delivery per parameter]

    A hook on the leaf sees the sum of all uses, before it becomes p.grad.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._share: Share | None = None
        self._delivered: set[int] = set()
        self._leaves = list(named)
        self._hooks = [self._watch(name, leaf) for name, leaf in self._leaves]

    def _watch(self, name: str, leaf: Tensor) -> RemovableHandle:
        hook: RemovableHandle = leaf.register_hook(partial(self._check, name, id(leaf)))  # type: ignore[no-untyped-call]
        return hook

    def begin(self, share: Share) -> None:
        """Every parameter waits for its gradient of this share.

        Hooks run in the order in which they were registered. This one is moved behind those that came later, so that
        it sees a gradient that another hook has changed.
        """
        self._share = share
        self._delivered.clear()
        for at, (name, leaf) in enumerate(self._leaves):
            if next(reversed(leaf._backward_hooks or {}), None) != self._hooks[at].id:
                self._hooks[at].remove()
                self._hooks[at] = self._watch(name, leaf)

    def end(self) -> None:
        """A backward from here on is the caller's own."""
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
            raise UnsupportedError(
                expected="a gradient that one isobit operator computed, of the samples of this micro-batch",
                received=f"the gradient of {name}, to which "
                + (
                    "several calls, a stock operator or another micro-batch added"
                    if used
                    else "a stock operator led"
                ),
                remedy=f"{ONE_USE}; {OURS}" if used else OURS,
            )
        self._delivered.add(leaf)

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
