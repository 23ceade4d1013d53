"""Process-wide state that each rank owns: random numbers, default dtype, thread count, modules, `sys.argv`.

The scheduler saves it when a rank passes the baton, and restores it when the rank gets the baton again.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

# State of modules that each rank owns, as each process would: the script's own modules, and what
# libraries keep.
#
# A module in the script's folder is imported by every rank for itself. Modules of libraries are
# shared, since importing torch once per rank would take too long; of them, the state in `LIBRARIES`
# is each rank's own.

# Dictionaries in which libraries keep the state of the process: module, class, attribute.
LIBRARIES = tuple(
    ("accelerate.state", name, "_shared_state")
    for name in ("PartialState", "AcceleratorState", "GradientState")
)
# Python's locks of modules that are being imported: a rank may pass the baton during an import.
locks: dict[str, Any] = vars(importlib._bootstrap)["_module_locks"]


@dataclass
class Kept:
    """What one rank owns while another rank runs."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    locks: dict[str, Any] = field(default_factory=dict)
    libraries: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)


class Folder:
    """The modules that were imported from a folder since this was made."""

    def __init__(self, path: str) -> None:
        """Start with none."""
        self.path = path.rstrip(os.sep) + os.sep
        self.names: set[str] = set()
        self.seen = set(sys.modules)
        self.size = len(sys.modules)

    def look(self) -> set[str]:
        """Return the names of the folder's modules."""
        if len(sys.modules) != self.size:
            new = sys.modules.keys() - self.seen
            self.seen |= new
            self.names |= {name for name in new if self.has(sys.modules[name])}
            self.size = len(sys.modules)
        return self.names

    def has(self, module: Any) -> bool:
        """Return whether a module's file is in the folder, and not of a package that is installed in it."""
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        return str(path).startswith(self.path) and "site-packages" not in str(path)


_folders: list[Folder] = []


@contextmanager
def modules_of(folder: str) -> Iterator[None]:
    """Give each rank its own modules of a folder; afterwards they are forgotten."""
    _folders.append(Folder(folder))
    try:
        yield
    finally:
        for name in _folders.pop().look():
            sys.modules.pop(name, None)


def shared_states() -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield the state of each library that is loaded."""
    for key in LIBRARIES:
        owner = getattr(sys.modules.get(key[0]), key[1], None)
        state = getattr(owner, key[2], None)
        if isinstance(state, dict):
            yield key, state


def save_modules() -> Kept:
    """Return what the current rank owns."""
    names = _folders[-1].look() if _folders else set()
    return Kept(
        {name: sys.modules[name] for name in names if name in sys.modules},
        {name: locks.pop(name) for name in names if name in locks},
        {key: dict(state) for key, state in shared_states()},
    )


def restore_modules(kept: Kept) -> None:
    """Make what a rank owns the current state of the process."""
    for key, state in shared_states():
        state.clear()
        state.update(kept.libraries.get(key, {}))
    if not _folders:
        return
    for name in _folders[-1].look():
        if name in kept.modules:
            sys.modules[name] = kept.modules[name]
        else:
            sys.modules.pop(name, None)
    _folders[-1].size = len(sys.modules)
    locks.update(kept.locks)


# Save and restore the state of Python's `random` as raw bytes; getstate and setstate are too slow for each switch.
#
# The state follows the header of the object. This is checked once; if it is not so, getstate and setstate are used.

HEADER = object.__basicsize__
WORDS = 625  # the position, then the 624 words of the Mersenne Twister


def address_of(generator: random.Random) -> int:
    """Return where the state of a generator is expected in memory."""
    return id(generator) + HEADER


@cache
def follows_header() -> bool:
    """Return whether the state follows the header, by reading two states both ways."""
    if (
        type(random.Random.getstate).__name__ != "function"
        or random.Random.__basicsize__ < HEADER + 4 * WORDS
    ):
        return False
    for seed in (1, 2):
        generator = random.Random(seed)
        generator.random()
        words = (ctypes.c_uint32 * WORDS).from_address(address_of(generator))
        state = generator.getstate()[1]
        if (*words[1:], words[0]) != state:
            return False
    return True


def save_random() -> Any:
    """Return the state of the shared generator."""
    shared: Any = random._inst
    if not follows_header():
        return shared.getstate()
    return ctypes.string_at(address_of(shared), 4 * WORDS), shared.gauss_next


def restore_random(state: Any) -> None:
    """Set the state of the shared generator."""
    shared: Any = random._inst
    if len(state) != 2:
        shared.setstate(state)
        return
    ctypes.memmove(address_of(shared), state[0], 4 * WORDS)
    shared.gauss_next = state[1]


def seeded(seed: str) -> Any:
    """Return the state of a new generator."""
    generator = random.Random(seed)
    if not follows_header():
        return generator.getstate()
    return ctypes.string_at(address_of(generator), 4 * WORDS), None


class ProcessState:
    """One rank's values of what a process has only once."""

    __slots__ = ("arguments", "dtype", "main", "modules", "numpy", "python", "threads", "torch")

    def __init__(
        self, torch_state: torch.Tensor, python: Any, numpy: Any, dtype: torch.dtype
    ) -> None:
        """Keep the given states, and the current `__main__`, arguments and thread count."""
        self.torch, self.python, self.numpy, self.dtype = torch_state, python, numpy, dtype
        self.main = sys.modules["__main__"]  # pickle looks there for classes of a script
        self.arguments = sys.argv
        self.threads = torch.get_num_threads()
        self.modules = Kept()


def numpy_random() -> Any:
    """Return the module `numpy.random`, or None if the program does not use numpy."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def save_state() -> ProcessState:
    """Return the current state of the process."""
    numpy = numpy_random()
    state = ProcessState(
        torch.default_generator.get_state(),
        save_random(),
        None if numpy is None else numpy.get_bit_generator(),
        torch.get_default_dtype(),
    )
    state.modules = save_modules()
    return state


def restore_state(state: ProcessState) -> None:
    """Make a saved state the current one."""
    torch.default_generator.set_state(state.torch)
    restore_random(state.python)
    if state.numpy is not None:
        numpy_random().set_bit_generator(state.numpy)
    if torch.get_default_dtype() != state.dtype:
        torch.set_default_dtype(state.dtype)
    if torch.get_num_threads() != state.threads:
        torch.set_num_threads(state.threads)
    sys.modules["__main__"] = state.main
    sys.argv = state.arguments
    restore_modules(state.modules)


def fresh_state(seed: int, index: int) -> ProcessState:
    """Return the state of a new process.

    Torch, Python and numpy start at random, differently in each process: here by `seed` and `index`.
    """
    numpy = numpy_random()
    state = ProcessState(
        torch.Generator().manual_seed(random.Random(f"{seed} {index}").getrandbits(63)).get_state(),
        seeded(f"{seed} {index}"),
        None if numpy is None else numpy.MT19937([seed, index]),
        torch.float32,
    )
    state.arguments = list(sys.argv)  # a copy: programs remove arguments from it
    return state


# Replace an attribute of a module or class for the duration of a `with` block.


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute and restore it afterwards."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
