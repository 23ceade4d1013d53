"""What every operator registers alike: shapes, a gradient, and refusals of what has no order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isobit.errors import UnsupportedError


def refuse_second_order(public: str) -> Callable[..., None]:
    """A gradient's gradient has its own sums, which have no order yet."""

    def refuse(*_: Any) -> None:
        raise UnsupportedError(
            expected="first-order gradients",
            received=f"a gradient of isobit.{public}'s gradient",
            remedy="use torch's own operator where second-order gradients are needed",
        )

    return refuse


def refuse_vmap(public: str) -> Callable[..., None]:
    """vmap hides the batch, which the sample tree must see."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(
            expected="a plain call",
            received=f"torch.func.vmap over isobit.{public}",
            remedy="put the mapped axis into the leading axes, and say samples= if it is not the batch",
        )

    return refuse


def register_operator(
    public: str,
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """One torch operator `isobit::<name>` of the public function; without a gradient, it is one itself."""
    full = f"isobit::{name}"
    torch.library.register_fake(full, fake)
    torch.library.register_vmap(full, refuse_vmap(public))
    torch.library.register_autograd(full, backward or refuse_second_order(public), setup_context=setup_context)
