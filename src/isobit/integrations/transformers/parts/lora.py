"""PEFT's LoRA: a linear layer with adapters next to its weight, or merged into it.

[Note: adapters next to a weight] y = round(base + s₁·B₁(A₁x) + s₂·B₂(A₂x) + …), which is PEFT's formula: base is the
wrapped linear layer, rounded; the adapters are those that are active, in their order; A x and B(A x) are linears in the
adapter's dtype, which is fp32 unless PEFT was told otherwise; the sum is in the wider dtype. Layers that share x are
computed at once: dX is one sum over all base weights, and one over all A. `fork` adds the two.

[Note: live state] Which adapters are active, their scaling, and whether they are merged or disabled are attributes that
PEFT changes between calls. Nothing of them is kept: every call reads them, and `adapter_state` is part of the kind of
call that strict mode watches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.dropout import drop_by_layout
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.parts.adapter_kinds import (
    check_adapter,
    check_call,
    parameter_wrappers,
    refuse_variant,
)
from isobit.integrations.transformers.parts.experts import Adapters
from isobit.integrations.transformers.parts.linear import Siblings, alone, share_input
from isobit.integrations.transformers.parts.part import Forward
from isobit.integrations.transformers.residual import fork
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.merged import Adapter, MergedLayer, merged_linear_group
from isobit.ops.linear.op import linear

MODES: tuple[str, ...] = ("beside", "merged")


class LiveAdapter(NamedTuple):
    """An adapter of one layer, as a call reads it; `dropout` is 0 outside of training."""

    weights: Adapter
    dropout: float
    name: str  # of the layer and the adapter, in the key of its dropout mask


class AdaptedSiblings(Siblings):
    """Linear layers that share an input, of which some are wrapped by LoRA. `wrappers` has None for the others."""

    def __init__(
        self,
        layers: tuple[nn.Linear, ...],
        groups: int,
        wrappers: tuple[Any, ...],
        names: tuple[str, ...],
        mode: str,
    ) -> None:
        super().__init__(layers, groups)
        self.wrappers, self.names, self.mode = wrappers, names, mode

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AdaptedSiblings)
            and super().__eq__(other)
            and self.mode == other.mode
            and all(a is b for a, b in zip(self.wrappers, other.wrappers, strict=True))
        )

    __hash__ = Siblings.__hash__

    def compute(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of some of the layers, with their adapters."""
        live = [self.live(layer) for layer in layers]
        if not any(live):
            return self.compute_base(x, layers)
        if self.mode == "merged":
            return self.compute_merged(x, layers, live)
        return self.compute_beside(x, layers, live)

    def live(self, layer: nn.Linear) -> list[LiveAdapter]:
        """Return the adapters that a call of a layer adds."""
        at = next(at for at, one in enumerate(self.layers) if one is layer)
        wrapper = self.wrappers[at]
        return [] if wrapper is None else list(live_adapters(wrapper, self.names[at]))

    def compute_base(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """Compute the wrapped layers as a model without adapters does."""
        if len(self.layers) == 1:
            return (alone(layers[0], x),)
        return share_input(x, layers, self.groups)

    def compute_beside(
        self, x: Tensor, layers: tuple[nn.Linear, ...], live: Sequence[Sequence[LiveAdapter]]
    ) -> tuple[Tensor, ...]:
        """Compute base layers and adapters, and add them; see [Note: adapters next to a weight]."""
        every = [adapter for adapters in live for adapter in adapters]
        dtypes = list(dict.fromkeys(adapter.weights.a.dtype for adapter in every))
        x, *inputs = fork(x, 1 + len(dtypes))
        products: dict[int, Tensor] = {}
        for dtype, given in zip(dtypes, inputs, strict=True):
            chosen = [adapter for adapter in every if adapter.weights.a.dtype == dtype]
            for adapter, low in zip(chosen, low_ranks(given.to(dtype), chosen), strict=True):
                b, bias = adapter.weights.b, adapter.weights.bias
                products[id(adapter)] = linear(low, b, bias, samples=current_layout().samples)
        outputs = []
        for base, adapters in zip(self.compute_base(x, layers), live, strict=True):
            total = base
            for adapter in adapters:
                total = total + products[id(adapter)] * adapter.weights.scale
            outputs.append(total.to(base.dtype))
        return tuple(outputs)

    def compute_merged(
        self, x: Tensor, layers: tuple[nn.Linear, ...], live: Sequence[Sequence[LiveAdapter]]
    ) -> tuple[Tensor, ...]:
        """Compute the layers with merged weights; see [Note: merged adapters]."""
        for adapter in (adapter for adapters in live for adapter in adapters):
            if adapter.dropout:
                raise UnsupportedError(
                    expected="adapters without dropout where they are merged: a weight has no mask per token",
                    received=f"lora_dropout={adapter.dropout} in training at {adapter.name}",
                    remedy="set lora_dropout=0 in LoraConfig, or isobit.enable(model, adapters='beside')",
                )
        merged = [
            MergedLayer(layer.weight, layer.bias, tuple(adapter.weights for adapter in adapters))
            for layer, adapters in zip(layers, live, strict=True)
        ]
        samples = current_layout().samples
        return merged_linear_group(x, merged, groups=self.groups, samples=samples)


def forward_lora(
    siblings: AdaptedSiblings, module: Any, x: Tensor, *given: Any, **named: Any
) -> Tensor:
    """Compute a layer with adapters; with siblings, the first that is called with x computes all of them."""
    check_call(given, named)
    return siblings.output_of(module.base_layer, x)


def forward_adapted_experts(
    forward: Forward, mode: str, module: Any, x: Tensor, *given: Any, **named: Any
) -> Tensor:
    """Compute experts with adapters of their weights, which PEFT merges into them at every call."""
    check_call((), named)
    wrappers = parameter_wrappers(module)
    adapters = Adapters(adapters_of_experts(wrappers), mode == "merged")
    return forward(wrappers[-1].base_layer, x, *given, adapters=adapters)  # type: ignore[no-any-return]


def adapters_of_experts(wrappers: Sequence[Any]) -> dict[str, tuple[Adapter, ...]]:
    """Return the adapters that a call adds to each weight of experts, by its name."""
    return {
        wrapper.parameter_name: tuple(
            one.weights for one in live_adapters(wrapper, f"experts.{wrapper.parameter_name}")
        )
        for wrapper in wrappers
    }


def low_ranks(x: Tensor, adapters: Sequence[LiveAdapter]) -> list[Tensor]:
    """Return A x of each adapter. Those without dropout read one x; each mask makes an input of its own."""
    layout = current_layout()
    plain = [adapter for adapter in adapters if not adapter.dropout]
    dropped = [adapter for adapter in adapters if adapter.dropout]
    uses = iter(fork(x, bool(plain) + len(dropped)))
    found: dict[int, Tensor] = {}
    if plain:
        weights = [adapter.weights.a for adapter in plain]
        lows = linear_group(next(uses), weights, samples=layout.samples)
        found.update((id(adapter), low) for adapter, low in zip(plain, lows, strict=True))
    for adapter in dropped:
        kept = drop_by_layout(layout, next(uses), adapter.dropout, adapter.name)
        found[id(adapter)] = linear(kept, adapter.weights.a, samples=layout.samples)
    return [found[id(adapter)] for adapter in adapters]


# ---- live state ---------------------------------------------------------------------------------------------


def live_adapters(wrapper: Any, name: str) -> Iterator[LiveAdapter]:
    """Yield the adapters that a call of a layer adds, in their order; none if they are disabled or merged by PEFT."""
    if wrapper.disable_adapters:
        if wrapper.merged:
            raise UnsupportedError(
                expected="adapters that are not merged by PEFT, where they are disabled",
                received=f"{name} with {wrapper.merged_adapters} merged into its weight, which PEFT would subtract now",
                remedy="call model.unmerge_adapter() first; it does not restore the weight's bits: "
                "isobit.enable(model, adapters='merged') merges without writing the weight",
            )
        return
    if wrapper.merged:
        return
    for adapter in wrapper.active_adapters:
        if adapter not in wrapper.lora_A:
            continue
        if wrapper.lora_variant.get(adapter) is not None:
            refuse_variant(name, wrapper.lora_variant[adapter])
        down, up = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
        dropout = wrapper.lora_dropout[adapter]
        check_adapter(f"{name}.{adapter}", down, up, dropout)
        share = getattr(dropout, "p", 0.0) if dropout.training else 0.0
        weights = Adapter(down.weight, up.weight, wrapper.scaling[adapter], up.bias)
        yield LiveAdapter(weights, share, f"{name}.{adapter}")


def adapter_state(wrappers: Sequence[Any]) -> tuple[Any, ...]:
    """Return what decides which adapters a call computes, and how: a part of its kind."""
    return tuple(
        (
            tuple(module.active_adapters),
            module.disable_adapters,
            tuple(module.merged_adapters),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in wrappers
    )


def is_tuner_layer(module: nn.Module) -> bool:
    """Return whether this is a layer of PEFT that has adapters, or a module to save."""
    return "_active_adapter" in vars(module) and "_disable_adapters" in vars(module)


def active_module(module: Any) -> Any:
    """Return the copy that PEFT's wrapper of a module to save calls now; another module is returned as it is."""
    if "modules_to_save" not in module._modules:
        return module
    if module.disable_adapters or not module.active_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]


def plain_name(name: str) -> str:
    """Return the name that a module to save, or its original, has in the model without PEFT."""
    head, found, _ = name.partition(".modules_to_save.")
    return head if found else name.removesuffix(".original_module")
