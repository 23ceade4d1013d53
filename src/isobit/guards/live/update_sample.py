"""How far a step moves the weights, measured on a sample of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit import bits
from isobit.guards.live.gradient_checks import local_part

MOST = (
    2**22
)  # elements that are copied before a sampled step: 16 MB in fp32, whatever the size of the model


@dataclass(frozen=True)
class Part:
    """The first elements of a parameter, before a step."""

    name: str
    parameter: Tensor
    before: Tensor
    has_gradient: bool


class UpdateSample:
    """Copies parameters before a step, up to MOST elements, and compares them after it.

    Args:
        named: Names, parameters, and whether the learning rate of their group is above zero.
        start: The parameter to start with; a later sample starts where this one ended, at `self.end`.
        least: The norm up to which a gradient is taken for rounding errors, which move nothing.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor, bool]], start: int = 0, least: float = 0.0
    ) -> None:
        self.parts: list[Part] = []
        left, self.end = MOST, start
        for offset in range(len(named)):
            at = (start + offset) % len(named)
            name, parameter, moves = named[at]
            if left <= 0:
                break
            whole = local_part(parameter).reshape(-1)
            flat = whole[:left]
            grad = parameter.grad
            given = False
            if grad is not None and moves and not grad.is_sparse:
                given = float(local_part(grad).reshape(-1)[:left].float().norm()) > least
            self.parts.append(Part(name, parameter, flat.clone(), given))
            left -= flat.numel()
            self.end = (at + 1) % len(named)

    @torch.no_grad()
    def compare(self) -> tuple[float, list[str]]:
        """Return ‖change‖ / ‖weights‖, and the parameters that have a gradient and did not change."""
        moved = weight = 0.0
        still = []
        for part in self.parts:
            now = local_part(part.parameter).reshape(-1)[: part.before.numel()]
            moved += float((now.double() - part.before.double()).square().sum())
            weight += float(part.before.double().square().sum())
            if part.has_gradient and bits.equal(now, part.before):
                still.append(part.name)
        return (math.sqrt(moved / weight) if weight else 0.0), still
