"""Linear layers: alone, split over ranks, and those that share an input, which are computed as one operator."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.parts.part import plain_type
from isobit.integrations.transformers.parts.registry import find_registered
from isobit.nn.linear import read_weight
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear_with_packed
from isobit.ops.swiglu.op import swiglu
from isobit.order.plan import FEATURE_CAP
from isobit.parallel.tensor.linear import column_linear_group, row_linear
from isobit.parallel.tensor.shard import tp_group_of


class Siblings:
    """Linear layers that one composite calls with the same input. `groups`: see isobit.linear_group."""

    def __init__(self, layers: tuple[nn.Linear, ...], groups: int) -> None:
        self.layers, self.groups = layers, groups

    def compute(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of some of the layers, as one operator."""
        return share_input(x, layers, self.groups)

    def output_of(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output of one layer; the first that is called with x computes all of them."""
        pending = current_layout().pending
        held: Round | None = pending.get(self)
        if held is None or layer not in held.left:
            held = pending[self] = Round([], list(self.layers))
        outputs = next((made for of, made in held.made if of is x), None)
        if (
            outputs is None
        ):  # also where a hook changed the input of this layer, or of an earlier one
            made = self.compute(x, tuple(held.left))
            outputs = dict(zip(held.left, made, strict=True))
            held.made.append((x, outputs))
        held.left.remove(layer)
        if not held.left:
            del pending[self]
        return outputs[layer]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Siblings)
            and self.groups == other.groups
            and len(self.layers) == len(other.layers)
            and all(a is b for a, b in zip(self.layers, other.layers, strict=True))
        )

    def __hash__(self) -> int:
        return id(self.layers[0])


def base_linear(module: Any) -> nn.Linear | None:
    """Return the linear layer that a child computes with the composite's own input, or None if it is none."""
    if is_lora(module):
        module = module.base_layer
    if isinstance(module, nn.Module) and plain_type(module) is nn.Linear:
        return cast(nn.Linear, module)
    if isinstance(module, nn.Linear) and is_registered(module):
        return module
    return None


def is_registered(module: nn.Module) -> bool:
    """Return whether the user registered a module's class as a linear layer."""
    formula = find_registered(plain_type(module))
    return formula is not None and formula.name == "linear"


def is_lora(module: Any) -> bool:
    """Return whether this is a linear layer that PEFT wrapped with LoRA."""
    kind = type(module)
    return kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear"


def forward_linear(siblings: Siblings | None, module: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer; with siblings, the first that is called with x computes all of them."""
    return alone(module, x) if siblings is None else siblings.output_of(module, x)


class Round(NamedTuple):
    """One call of each of several siblings: outputs by input, and the layers that were not called yet."""

    made: list[tuple[Tensor, dict[nn.Linear, Tensor]]]
    left: list[nn.Linear]


def alone(module: nn.Linear, x: Tensor) -> Tensor:
    """Compute a layer that shares its input with no other; if it is split over ranks, x is a rank's part."""
    samples, tp_group = current_layout().samples_of(x), tp_group_of(module)
    if tp_group is not None:
        return row_linear(x, module.weight, module.bias, tp_group=tp_group, samples=samples)
    read = read_weight(module)
    return linear_with_packed(x, read.weight, module.bias, samples, read.packed)


def share_input(x: Tensor, layers: tuple[nn.Linear, ...], groups: int) -> tuple[Tensor, ...]:
    """Compute linear layers that share x as one operator, because dX is one sum; `groups` are of the unsplit layers."""
    weights = tuple(layer.weight for layer in layers)
    # All or none: `find_layers` raises otherwise.
    biases = None if layers[0].bias is None else tuple(layer.bias for layer in layers)
    samples, tp_group = current_layout().samples_of(x), tp_group_of(layers[0])
    if tp_group is not None:
        return column_linear_group(
            x, weights, biases, groups=groups, tp_group=tp_group, samples=samples
        )
    # Where gradients are taken, packed forms are not read, and would be packed at every step.
    if not wants_gradient(x, *weights):
        reads = tuple(read_weight(layer) for layer in layers)
        if any(read.snapshot is not None for read in reads):
            return tuple(
                linear_with_packed(x, read.weight, layer.bias, samples, read.packed)
                for layer, read in zip(layers, reads, strict=True)
            )
    return linear_group(x, weights, biases, groups=groups, samples=samples)


def wants_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd would take a gradient of any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def find_layers(
    name: str, parent: Any, children: tuple[str, ...]
) -> tuple[tuple[nn.Linear, ...], int]:
    """Return the layers of a composite that share an input, and the groups of their common dX."""
    layers = []
    for child in children:
        layer = base_linear(getattr(parent, child))
        assert layer is not None
        layers.append(layer)
    if len({layer.bias is None for layer in layers}) > 1:
        raise UnsupportedError(
            expected=f"a bias on all of {', '.join(children)}, or on none",
            received=f"on some, in {name}",
            remedy="add biases of zeros",
        )
    return tuple(layers), count_groups(parent, children, layers)


def count_groups(parent: Any, children: tuple[str, ...], layers: list[nn.Linear]) -> int:
    """Return into how many parts dX is cut, so that a tensor-parallel rank owns whole segments of it.

    Those of attention are its key heads, each with its queries; those of layers of one width are `share_count`.
    """
    rows = [layer.out_features for layer in layers]
    depth = getattr(parent, "head_dim", None)
    if "k_proj" in children and isinstance(depth, int):
        heads = layers[children.index("k_proj")].out_features // depth
        if heads and all(count % heads == 0 for count in rows):
            return heads
        return 1
    return share_count(rows[0]) if len(set(rows)) == 1 else 1


def share_count(features: int) -> int:
    """Return into how many equal parts gate and up are cut for dX: a power of two, at most that of segments.

    So a tensor-parallel rank that owns a share of both owns whole segments of that sum.
    """
    shares = 1
    while shares < FEATURE_CAP and features % (2 * shares) == 0:
        shares *= 2
    return shares


# The gated MLP with silu: gate and up are siblings, and their product is one operator with one rounding.
#
# Gated MLPs with other activations run as composites: the activation is a part, and the product is elementwise.


def forward_swiglu(module: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) · up(x))."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


def forward_packed_swiglu(module: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate) · up), where one layer computes gate and up."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return module.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


def forward_named_swiglu(gate: str, up: str, down: str, module: Any, x: Tensor) -> Tensor:
    """Compute the gated MLP of a registered class, whose layers have other names."""
    left, right = getattr(module, gate)(x), getattr(module, up)(x)
    return getattr(module, down)(swiglu(left, right))  # type: ignore[no-any-return]
