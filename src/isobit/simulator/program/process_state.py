"""Process-wide state that each rank owns: random numbers, default dtype, thread count, modules, `sys.argv`.

The scheduler saves it when a rank passes the baton, and restores it when the rank gets the baton again.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from isobit.simulator.program import own_modules, python_random


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
        self.modules = own_modules.Kept()


def numpy_random() -> Any:
    """Return the module `numpy.random`, or None if the program does not use numpy."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def save_state() -> ProcessState:
    """Return the current state of the process."""
    numpy = numpy_random()
    state = ProcessState(
        torch.default_generator.get_state(),
        python_random.save(),
        None if numpy is None else numpy.get_bit_generator(),
        torch.get_default_dtype(),
    )
    state.modules = own_modules.save()
    return state


def restore_state(state: ProcessState) -> None:
    """Make a saved state the current one."""
    torch.default_generator.set_state(state.torch)
    python_random.restore(state.python)
    if state.numpy is not None:
        numpy_random().set_bit_generator(state.numpy)
    if torch.get_default_dtype() != state.dtype:
        torch.set_default_dtype(state.dtype)
    if torch.get_num_threads() != state.threads:
        torch.set_num_threads(state.threads)
    sys.modules["__main__"] = state.main
    sys.argv = state.arguments
    own_modules.restore(state.modules)


def fresh_state(seed: int, index: int) -> ProcessState:
    """Return the state of a new process.

    Torch, Python and numpy start at random, differently in each process: here by `seed` and `index`.
    """
    numpy = numpy_random()
    state = ProcessState(
        torch.Generator().manual_seed(random.Random(f"{seed} {index}").getrandbits(63)).get_state(),
        python_random.seeded(f"{seed} {index}"),
        None if numpy is None else numpy.MT19937([seed, index]),
        torch.float32,
    )
    state.arguments = list(sys.argv)  # a copy: programs remove arguments from it
    return state
