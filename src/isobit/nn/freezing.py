"""`isobit.freeze`: keep the packed weights of linear layers."""

from __future__ import annotations

from types import TracebackType

import torch

from isobit.errors import ArgumentError
from isobit.nn.linear import PACKED, Linear
from isobit.ops.linear.packed import PackedWeight, WatchedWeight

ENABLED = "_isobit_state"  # on a model that isobit.enable prepared


class Frozen:
    """The packed weights that `freeze` made; `thaw` or the end of a `with` block drops them.

    Example:
        >>> frozen = isobit.freeze(isobit.nn.Linear(64, 32))
        >>> frozen.nbytes > 0
        True
        >>> frozen.thaw()
    """

    def __init__(self) -> None:
        self._layers: list[torch.nn.Linear] = []
        self._tied: list[torch.nn.Embedding] = []

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes; a weight that several layers have is packed for each."""
        return sum(layer.__dict__[PACKED].nbytes for layer in self._layers)

    def add(self, layer: torch.nn.Linear) -> None:
        """Pack the weight of a layer, or share the form that an earlier `freeze` made."""
        hold(layer, PackedWeight)
        self._layers.append(layer)

    def add_tied(self, table: torch.nn.Embedding) -> None:
        """Watch the table of an embedding that is also the weight of a frozen layer: a write moves it."""
        hold(table, WatchedWeight)
        self._tied.append(table)

    def thaw(self) -> None:
        """Drop the packed weights; a second call does nothing."""
        layers, self._layers, self._tied = [*self._layers, *self._tied], [], []
        for layer in layers:
            watched = layer.__dict__[PACKED]
            watched.holders -= 1
            if not watched.holders:
                del layer.__dict__[PACKED]
                watched.release()

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


def hold(layer: torch.nn.Module, kind: type[WatchedWeight]) -> None:
    """Watch the weight of a layer, or count one more holder of what an earlier `freeze` made."""
    if layer.__dict__.get(PACKED) is None:  # a copy of a frozen layer has None
        layer.__dict__[PACKED] = kind(layer.weight)  # type: ignore[arg-type]
    layer.__dict__[PACKED].holders += 1


def freeze(module: torch.nn.Module) -> Frozen:
    """Pack the weights of linear layers, which makes decoding faster and changes no bits.

    Layers are the isobit.nn.Linear of a module, or all linear layers of a model that isobit.enable prepared. They read
    packed weights where no gradient of the weight is taken.

    A later write to a weight through torch (in place, `.data`, a view, a loaded state dict, a NumPy array) is noticed,
    and the weight is packed again at the next call. A write through a raw address (ctypes, a C extension that kept
    `data_ptr()`) is not: thaw before it. The first write to a frozen weight moves it to new memory.

    Other threads may write weights while calls run, as a server does that receives weights during a rollout. Every call
    that begins after a write has returned reads what was written. A call of a layer that runs while its weight is
    written in place may read a part of the write, as it may without `freeze`; no later call does. Where a weight is
    replaced (`module.weight.data = new`, `load_state_dict(..., assign=True)`), each call without gradients reads the
    old or the new weight, never a mixture. A model has many layers: for tokens of one version of all weights, let no
    call run during the update. Two threads must not write one weight at once, and where gradients are taken nothing
    may be written meanwhile. A collective or an operator of your own that writes asynchronously has to end first,
    unless it writes to `weight.data`.

    A copy of a frozen layer (`copy.deepcopy`, pickle, `torch.save`) is not frozen.

    Args:
        module: A module that contains isobit.nn.Linear layers, or an enabled model.

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
    is_enabled = any(ENABLED in part.__dict__ for part in module.modules())  # it may be wrapped
    kind = torch.nn.Linear if is_enabled else Linear
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kind)}
    if not layers:
        raise ArgumentError(
            expected="a module with isobit.nn.Linear layers, or a model that isobit.enable prepared",
            received=type(module).__name__,
            remedy="replace torch.nn.Linear by isobit.nn.Linear.sharing(layer), or enable the model first",
        )
    frozen = Frozen()
    try:
        for name, layer in layers.items():
            pack(frozen, name, layer)
        weights = {id(layer.weight) for layer in layers.values()}
        for table in module.modules() if is_enabled else ():
            if isinstance(table, torch.nn.Embedding) and id(table.weight) in weights:
                frozen.add_tied(table)
    except BaseException:
        frozen.thaw()
        raise
    return frozen


def pack(frozen: Frozen, name: str, layer: torch.nn.Linear) -> None:
    """Add a layer to the frozen ones, or raise with its name."""
    try:
        frozen.add(layer)
    except ArgumentError as error:
        copied = "copy the weights first, as those that from_pretrained maps from a file: "
        every = "for p in module.parameters(): p.data = p.data.clone()"
        raise ArgumentError(
            expected=error.expected,
            received=f"{name}: {error.received}" if name else error.received,
            remedy=copied + every if ".clone()" in error.remedy else error.remedy,
        ) from error
