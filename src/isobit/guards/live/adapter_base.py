"""The base weights under adapters: those of a PEFT model that nothing trains, and whether their bits change.

[Note: merging does not undo itself] PEFT's `merge_adapter` adds s·B·A to each base weight and rounds the sum to the
weight's dtype; `unmerge_adapter` subtracts the same product and rounds again. The weight that comes back is another one
wherever either rounding was inexact, and each cycle adds to the error. TRL merges and unmerges whenever it sends
weights to vLLM. Nothing raises, and no gradient is involved, so that only the bits of frozen weights show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isobit import bits
from isobit.guards.live.optimizer_checks import local_part, name_some

REMEDY = (
    "merge_adapter() and unmerge_adapter() of PEFT round twice and do not restore the weights; merge into a copy, or "
    "keep the weights and copy them back (docs/how-to/peft.md)"
)


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is PEFT's: one that wraps a layer of the base model, or a module to save."""
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__) and (
        "base_layer" in module._modules or "original_module" in module._modules
    )


def has_merged_adapters(model: nn.Module) -> bool:
    """Return whether adapters are merged now: the base weights are then meant to be others."""
    return any(bool(getattr(module, "merged_adapters", ())) for module in model.modules())


def base_weights(model: nn.Module, trained: Iterable[Tensor] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the frozen parameters of a model with adapters that are not an adapter's own; nothing without adapters.

    Args:
        model: The model.
        trained: Parameters of optimizers, which are left out.
    """
    layers = [(name, module) for name, module in model.named_modules() if is_adapter_layer(module)]
    if not layers:
        return
    kept_out = {id(parameter) for parameter in trained}
    for _, layer in layers:
        for child, module in layer.named_children():
            if child not in ("base_layer", "original_module"):
                kept_out.update(id(parameter) for parameter in module.parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and id(parameter) not in kept_out:
            yield name, parameter


class AdapterBase:
    """The digests of a model's base weights, taken when they are first looked at.

    Args:
        model: The model; one without adapters has no base weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first: dict[str, str] = {}
        self.step = 0  # at which they were first looked at

    @torch.no_grad()
    def changed(self, step: int, trained: Iterable[Tensor] = ()) -> str:
        """Return a sentence if base weights have other bits than at the first look, or nothing.

        While adapters are merged nothing is compared.

        Args:
            step: The number of the step.
            trained: Parameters of optimizers, which are not base weights.
        """
        weights = dict(base_weights(self.model, trained))
        if not weights or has_merged_adapters(self.model):
            return ""
        now = {name: bits.digest(part) for name, part in readable_parts(weights)}
        if not self.first:
            self.first, self.step = now, step
            return ""
        moved = [name for name in now if self.first.get(name, now[name]) != now[name]]
        if not moved:
            return ""
        return (
            f"{len(moved)} of {len(now)} weights of the base have other bits than before step {self.step}, while only "
            f"adapters are trained: {name_some(moved)}; {REMEDY}"
        )


def readable_parts(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank has of each weight; subclasses without memory of their own are left out."""
    for name, weight in weights.items():
        part = local_part(weight)
        if (
            part.layout == torch.strided
            and not part.is_meta
            and not is_traceable_wrapper_subclass(part)
        ):
            yield name, part
