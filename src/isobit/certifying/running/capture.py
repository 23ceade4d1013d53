"""Run ordinary wrapper code without a GPU: every `kernel[grid](...)` goes to a receiver instead.

[Note: what is captured]
While a function runs, `JITFunction.run` of Triton is replaced, so that wrapper code, heuristics and tuples of launches
work as they are. `Autotuner.run` is replaced too: the autotuner would choose by time, so each of its configurations is
judged, and here one is chosen by number. A dispatch mode of torch sees every operator: it notes which tensors torch
makes and from what, and raises an error where torch would read what a kernel wrote, since names of expressions do not
pass through torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.certifying.running.compile import triton_package
from isobit.errors import ArgumentError, UnsupportedError

DispatchMode: Any = TorchDispatchMode  # untyped in torch

# These read shapes, not values.
VALUELESS = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("size", "stride", "sym_size", "sym_stride", "is_same_size"),
    )
)
MOVES = frozenset(("aten::clone", "aten::_to_copy", "aten::copy", "aten::cat", "aten::stack"))
CONSTANT = frozenset(
    f"aten::{name}"
    for name in [
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
    ]
)
UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
    ]
)


class Receiver(Protocol):
    """What takes the launches of a function."""

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Take one launch."""

    def knows(self, storage: int) -> bool:
        """Tell whether a storage was an argument of a launch."""

    def wrote(self, storage: int) -> bool:
        """Tell whether a kernel wrote a storage."""


@dataclass(frozen=True)
class Made:
    """A storage that torch made while the function ran.

    Attributes:
        key: its number in the sequence of creation: "tensor 3", or "scratch 0" for uninitialised memory.
        operator: what made it.
        parents: keys of tensors that it was computed from.
        pointwise: whether every element was computed from one element of each parent, or only moved.
        shape: of the tensor that came with it.
    """

    key: str
    operator: str
    parents: tuple[str, ...]
    shape: tuple[int, ...]
    pointwise: bool = True


def storage_of(tensor: torch.Tensor) -> int:
    """Return the number that identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def changed_by(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes in place."""
    found = list[torch.Tensor]()
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else named.get(argument.name)
            leaves = _pytree.tree_leaves(value)
            found += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return found


@dataclass(eq=False)
class Watch(DispatchMode):  # type: ignore[misc]
    """Notes what torch makes, and raises an error where torch reads what a kernel wrote."""

    receiver: Receiver
    made: dict[int, Made] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)  # storages that an operator wrote in place
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check one operator's arguments, call it, and note what it made."""
        kwargs = kwargs or {}
        name = func._schema.name
        given = [v for v in _pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if not func.is_view and name not in VALUELESS:
            self.check(name, given, changed_by(func, args, kwargs))
        found = func(*args, **kwargs)
        known = {storage_of(t) for t in given}
        for tensor in _pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in known:
                self.note(tensor, func, given)
        return found

    def check(self, name: str, given: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
        """Raise an error if an operator reads a kernel's result, or changes a kernel's argument."""
        for tensor in given:
            storage = storage_of(tensor)
            if self.receiver.wrote(storage):
                raise UnsupportedError(
                    expected="no torch operator on what a kernel wrote: names of expressions end there",
                    received=f"{name} on a tensor {list(tensor.shape)} that a kernel wrote",
                    remedy="do it in a kernel, or return the tensor before it",
                )
        for tensor in changed:
            self.filled.add(storage_of(tensor))
            if self.receiver.knows(storage_of(tensor)):
                raise UnsupportedError(
                    expected="inputs that stay as they are between two launches",
                    received=f"{name} changes a tensor {list(tensor.shape)} that a kernel has read",
                    remedy="prepare inputs before the first launch, or use a new tensor",
                )

    def note(self, tensor: torch.Tensor, func: Any, given: list[torch.Tensor]) -> None:
        """Remember a storage that torch made. A copy keeps the key of what it copies.

        With one row a transposed tensor is contiguous and `contiguous()` copies nothing: the key must not change.
        """
        storage, operator = storage_of(tensor), func._schema.name
        if storage in self.made:
            return
        self.alive.append(tensor.untyped_storage())
        if operator == "aten::clone" and (source := self.made.get(storage_of(given[0]))):
            self.made[storage] = source
            return
        kind = "scratch" if operator in UNINITIALISED else "tensor"
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        read = [] if operator in VALUELESS else given
        parents = tuple(self.made[s].key for t in read if (s := storage_of(t)) in self.made)
        pointwise = torch.Tag.pointwise in func.tags or operator in MOVES
        self.made[storage] = Made(
            f"{kind} {number}", operator, parents, tuple(tensor.shape), pointwise
        )

    def is_constant(self, storage: int) -> bool:
        """Tell whether torch filled a storage with one number when it made it, and nothing since."""
        made = self.made.get(storage)
        return made is not None and made.operator in CONSTANT and storage not in self.filled

    def key_of(self, storage: int, outside: dict[int, str]) -> str:
        """Return the key of a storage; those from outside the function are numbered as they come."""
        if storage in self.made:
            return self.made[storage].key
        return outside.setdefault(storage, f"outside {len(outside)}")


@dataclass
class Choices:
    """Which configuration of each autotuned kernel to use; and which there are, once it has run.

    Attributes:
        chosen: kernel -> its configuration as text; a kernel that is not in it uses its first one.
        seen: kernel -> texts of its configurations at these sizes.
        or_first: whether the first one is used where pruning has removed the chosen one; else that is an error.
    """

    chosen: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    or_first: bool = False


_lock = threading.Lock()


@contextmanager
def captured(receiver: Receiver, choices: Choices) -> Iterator[None]:
    """Send every launch to a receiver while the context is open.

    Raises:
        ArgumentError: If another capture is open, or Triton's interpreter is on.
    """
    triton_package()
    from triton import knobs
    from triton.runtime import autotuner, jit

    if knobs.runtime.interpret:
        raise ArgumentError(
            expected="kernels that Triton compiles",
            received="TRITON_INTERPRET, which replaces them by Python",
            remedy="unset TRITON_INTERPRET",
        )
    if not _lock.acquire(blocking=False):
        raise ArgumentError(
            expected="one certificate at a time",
            received="a second one in the same process",
            remedy="wait for the first, or use another process",
        )
    run_kernel, run_autotuner = jit.JITFunction.run, autotuner.Autotuner.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        if not warmup:
            receiver.launch(self, grid, args, named)

    jit.JITFunction.run = run
    autotuner.Autotuner.run = autotuned(choices)
    try:
        yield
    finally:
        jit.JITFunction.run, autotuner.Autotuner.run = run_kernel, run_autotuner
        _lock.release()


def autotuned(choices: Choices) -> Callable[..., Any]:
    """Return what replaces `Autotuner.run`: it uses the configuration that was chosen, without timing."""

    def run(self: Any, *args: Any, **named: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configurations = self.prune_configs(named) if len(self.configs) > 1 else self.configs
        name = self.base_fn.__name__
        choices.seen[name] = tuple(describe(each) for each in configurations)
        texts = choices.seen[name]
        wanted = choices.chosen.get(name, texts[0])
        if choices.or_first and wanted not in texts:
            wanted = texts[0]
        chosen = configurations[texts.index(wanted)]
        everything = {**self.nargs, **named, **chosen.all_kwargs()}
        if chosen.pre_hook is not None:
            chosen.pre_hook(everything)
        self.pre_hook(everything, reset_only=True)
        found = self.fn.run(*args, **named, **chosen.all_kwargs())
        self.nargs = None
        return found

    return run


def describe(configuration: Any) -> str:
    """Return a configuration of the autotuner as text: "BLOCK=64 num_warps=4 num_stages=3"."""
    given = {k: v for k, v in configuration.all_kwargs().items() if (k, v) != ("num_ctas", 1)}
    return " ".join(f"{name}={value}" for name, value in given.items())
