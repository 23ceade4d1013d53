"""`isobit.freeze`: keep the packed weights of linear layers."""

from __future__ import annotations

from types import TracebackType

import torch

from isobit.errors import ArgumentError
from isobit.nn.linear import Linear
from isobit.ops.linear.packed import PackedWeight


class Frozen:
    """The packed weights that `freeze` made; `thaw` or the end of a `with` block drops them.

    Example:
        >>> frozen = isobit.freeze(isobit.nn.Linear(64, 32))
        >>> frozen.nbytes > 0
        True
        >>> frozen.thaw()
    """

    def __init__(self, layers: list[Linear]) -> None:
        self._layers = layers

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes."""
        return sum(layer._packed.nbytes for layer in self._layers if layer._packed is not None)

    def thaw(self) -> None:
        """Drop the packed weights; a second call does nothing."""
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
    """Pack the weight of every isobit.nn.Linear in a module, which makes decoding faster and changes no bits.

    A later write to a weight through torch (in place, `.data`, a view, a loaded state dict, a NumPy array) is noticed,
    and the weight is packed again at the next call. A write through a raw address (ctypes, a C extension that kept
    `data_ptr()`) is not: thaw before it. The first write to a frozen weight moves it to new memory.

    Args:
        module: A module that contains isobit.nn.Linear layers.

    Returns:
        The packed weights, which can be used as a context manager.

    Raises:
        ArgumentError: If there is no such layer, or a weight's memory has other owners.
        EngineError: If there are no native kernels for the weight's dtype.

    Example:
        >>> layer = isobit.nn.Linear(64, 32)
        >>> x = torch.randn(1, 64)
        >>> before = layer(x)
        >>> with isobit.freeze(layer):
        ...     torch.equal(layer(x), before)
        True
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
