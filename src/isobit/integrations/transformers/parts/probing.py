"""Recognise norms and rotations by what they compute: run the stock code, and compare with each formula in fp64."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.transformers.parts.layers import NormFormula
from isobit.integrations.transformers.parts.rotary import STYLES

NAMES_OF_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
WIDTH = 64  # of a norm without a weight
TOLERANCE = 2e-6  # of the largest element of a row, in fp32


def inputs_of(width: int) -> list[Tensor]:
    """Return rows of several sizes, so that eps, its place, and what is subtracted or squared matter."""
    drawn = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    spike = torch.zeros(2, 5, width)
    spike[..., 1] = 3.0
    shifted = drawn + 1.0
    return [
        drawn,
        drawn * 1e-3,
        drawn * 1e-6,
        drawn * 1e3,
        shifted,
        spike,
        torch.zeros(2, 5, width),
    ]


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of an element, relative to the largest element of its row."""
    if found.shape != wanted.shape:
        return float("inf")
    apart = (found.double() - wanted.double()).abs()
    scale = wanted.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    worst = (apart / scale).max().item()
    return worst if worst == worst else float("inf")


def compute_norm(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Compute a norm's formula in fp64."""
    rows = x.double()
    if formula.kind == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + formula.epsilon(module))
    if formula.weight is not None:
        rows = rows * (formula.offset + getattr(module, formula.weight).double())
    return rows if formula.bias is None else rows + getattr(module, formula.bias).double()


@torch.no_grad()
def compare_norm(module: nn.Module, formula: NormFormula) -> float:
    """Return the largest difference between a module's own forward and a formula, over several kinds of input."""
    twin = copy.deepcopy(module)
    if any(parameter.device.type == "meta" for parameter in twin.parameters()):
        twin.to_empty(device="cpu")
    twin.to("cpu").float()
    twin.__dict__.pop("forward", None)
    drawn = torch.Generator().manual_seed(7)
    for parameter in twin.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=drawn))
    weight = None if formula.weight is None else getattr(twin, formula.weight)
    width = WIDTH if weight is None else len(weight)
    return max(
        largest_difference(twin(x), compute_norm(formula, twin, x)) for x in inputs_of(width)
    )


def probe_norm(module: nn.Module) -> NormFormula | None:
    """Return the formula of a norm, or None if the module computes none that is known."""
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    held = dict(module.named_parameters(recurse=False))
    if set(held) - {"weight", "bias"} or any(p.dim() != 1 for p in held.values()):
        return None
    weight = "weight" if "weight" in held else None
    bias = "bias" if "bias" in held else None
    for eps in NAMES_OF_EPS:
        if not isinstance(getattr(module, eps, None), float):
            continue
        forms = [NormFormula("rms", eps, weight), NormFormula("layer", eps, weight, bias)]
        if weight is not None and bias is None:
            forms.append(NormFormula("rms", eps, weight, offset=1.0))
        for form in forms if bias is None else forms[1:2]:
            if form.kind == "layer" and form.weight is None:
                continue  # isobit.layer_norm has a weight
            try:
                if compare_norm(module, form) <= TOLERANCE:
                    return form
            except Exception:  # the stock code of an unknown module may raise anything
                return None
    return None


# ---- rotations ------------------------------------------------------------------------------------------------


def rotated(x: Tensor, angles: Tensor, style: str) -> Tensor:
    """Rotate heads [B, H, T, D] by angles [B, T, r / 2], in fp64."""
    depth = 2 * angles.shape[-1]
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    part, rest = x[..., :depth].double(), x[..., depth:].double()
    if style == "halves":
        low, high = part.chunk(2, -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    else:
        even, odd = part[..., 0::2], part[..., 1::2]
        first, second = even * cos - odd * sin, odd * cos + even * sin
        turned = (
            torch.stack((first, second), -1).flatten(-2)
            if style == "pairs"
            else torch.cat((first, second), -1)
        )
    return torch.cat((turned, rest), -1)


@lru_cache(maxsize=256)
@torch.no_grad()
def probe_rotation(function: Callable[..., Any]) -> str | None:
    """Return the style of a rotation, or None if it computes none that is known."""
    return next((style for style in STYLES if rotates_as(function, style)), None)


def rotates_as(function: Callable[..., Any], style: str) -> bool:
    """Return whether a function rotates in this style, with a table as wide as a head, and with a narrower one."""
    drawn = torch.Generator().manual_seed(3)
    query = torch.randn(2, 3, 5, 16, generator=drawn)
    key = torch.randn(2, 1, 5, 16, generator=drawn)
    for width in (16, 8):
        angles = torch.rand(2, 5, width // 2, generator=drawn) * 3
        table = torch.cat((angles, angles), -1)
        try:
            found = function(query, key, table.cos(), table.sin())
        except Exception:  # the stock code of an unknown function may raise anything
            if width == 16:
                return False
            continue
        wanted = rotated(query, angles, style), rotated(key, angles, style)
        if not isinstance(found, tuple) or len(found) != 2:
            return False
        if any(
            a.shape != b.shape or not torch.allclose(a.double(), b, atol=1e-5)
            for a, b in zip(found, wanted, strict=True)
        ):
            return False
    return True
