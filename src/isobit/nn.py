"""Modules over the operators, and `freeze`, which keeps packed weights for decoding."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.linear.op import linear_with_packed
from isobit.ops.linear.packed import PackedWeight
from isobit.order.samples import Samples


class Linear(torch.nn.Linear):
    """torch.nn.Linear with one order of addition; parameters, names and state dicts are the same."""

    _packed: PackedWeight | None = None
    _freezes: int = 0

    @classmethod
    def sharing(cls, module: torch.nn.Linear) -> Linear:
        """A layer over the very parameters of a stock one."""
        made = cls(module.in_features, module.out_features, bias=False, device="meta")
        made.weight = module.weight
        made.bias = module.bias
        return made.train(module.training)

    def forward(self, input: Tensor, samples: Samples | None = None) -> Tensor:
        """x · weightᵀ + bias; see isobit.linear."""
        packed = self._packed
        # A compiled graph packs on the fly: it cannot look whether the weight was written.
        current = (
            None if packed is None or torch.compiler.is_compiling() else packed.current(self.weight)
        )
        return linear_with_packed(input, self.weight, self.bias, samples, current)


class Frozen:
    """What `freeze` made: says its memory, and is undone by `thaw` or by leaving the `with` block."""

    def __init__(self, layers: list[Linear]) -> None:
        self._layers = layers

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights."""
        return sum(layer._packed.nbytes for layer in self._layers if layer._packed is not None)

    def thaw(self) -> None:
        """Drops the packed weights; a second call does nothing."""
        layers, self._layers = self._layers, []
        for layer in layers:
            layer._freezes -= 1
            if not layer._freezes:
                layer._packed = None

    def __enter__(self) -> Frozen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.thaw()

    def __repr__(self) -> str:
        return f"Frozen({len(self._layers)} linear layers, {self.nbytes / 2**20:.1f} MiB packed)"


def freeze(module: torch.nn.Module) -> Frozen:
    """Pack the weight of every isobit.nn.Linear in `module`; bits do not change, decoding is faster.

    A later write to a weight that torch makes is seen (in place, through `.data`, a view, a loaded state dict, a NumPy
    array), and the weight is packed anew at the next call. A write through a raw address (ctypes, a C extension that
    kept `data_ptr()`) is not: thaw before it. The first write while frozen moves the weight to new memory.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    if not layers and "_isobit_state" in module.__dict__:
        raise ArgumentError(
            expected="a module with isobit.nn.Linear layers",
            received=f"{type(module).__name__}, a model that isobit.enable prepared",
            remedy="leave freeze out: an enabled model packs weights as it computes, and keeps none packed",
        )
    if not layers:
        raise ArgumentError(
            expected="a module with isobit.nn.Linear layers",
            received=type(module).__name__,
            remedy="replace torch.nn.Linear by isobit.nn.Linear.sharing(layer) first",
        )
    frozen = Frozen([])
    try:
        for layer in layers:
            if layer._packed is None:
                layer._packed = PackedWeight(layer.weight)
            layer._freezes += 1
            frozen._layers.append(layer)
    except BaseException:
        frozen.thaw()
        raise
    return frozen
