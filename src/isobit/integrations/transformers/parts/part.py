"""The record of a recognised module: what it is, the function that computes it, and where it was recognised."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """What a module is. See [Note: parts]."""

    name: str  # of the part: linear, rms_norm, attention, …
    # forward(*settings, module, *inputs), at module level; None where the stock forward stays
    forward: Forward | None
    settings: tuple[Any, ...] = ()
    # Where it was recognised, for `isobit families`: a class of torch, a digest, a probe, a registration, plumbing.
    found: str = field(default="", compare=False)
    # Whether the formula was read in a source whose digest is shipped; if not, eight tokens are compared with stock.
    shipped: bool = field(default=True, compare=False)
    # Children whose computation is inside this forward, so that they are never called.
    inside: tuple[str, ...] = ()

    def bind(self, module: nn.Module) -> Any:
        """Return the forward to install on the instance."""
        assert self.forward is not None
        return bind(module, self.forward, *self.settings, part=self)


def bind(module: nn.Module, forward: Forward, *settings: Any, part: Part | None = None) -> Any:
    """Bind a plain function: a partial is copied and pickled with the model, as a closure would not be."""
    bound: Any = partial(forward, *settings, module)
    bound.__signature__ = inspect.signature(module.forward)
    bound.isobit_forward = forward if part is None else part
    return bound


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class as it was before fully_shard."""
    return kind.__bases__[1] if FSDPModule in kind.__bases__ else kind


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, as it was before fully_shard."""
    return plain_class(type(module))
