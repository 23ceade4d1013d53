"""What one rank owns while it runs on a thread: its random numbers, environment and default dtype."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from isobit.errors import UnsupportedError
from isobit.simulator import python_random

if TYPE_CHECKING:
    from isobit.simulator.work import RankWork
    from isobit.simulator.world import World

TORCH_SEED = 67280421310721  # what torch gives the default generator of a fresh process
PYTHON, INSTALLED = os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__))
NOT_USERS = (
    os.path.dirname(torch.__file__),
    os.path.dirname(__file__),
    os.path.join(INSTALLED, "typing_extensions"),
    "<frozen",
    "<eval_with_key",
)

_here = threading.local()


class Rank:
    """One rank of a world: the state that a process would own."""

    def __init__(self, world: World, index: int, environment: Mapping[str, str]) -> None:
        self.world, self.index = world, index
        self.environment = {
            **world.plain_environment,
            **{os.fsencode(k): os.fsencode(v) for k, v in environment.items()},
        }
        self.pending: dict[int, RankWork] = {}
        self.calls = 0
        self.communicating = False  # inside a call, where the simulator itself touches buffers
        self.incarnations: dict[str, int] = {}
        self.thread_id = 0
        self.value: Any = None
        self.error: BaseException | None = None
        self.left = False
        self.state = fresh_state(world.seed, index)


class State:
    """Process-wide settings that a switch saves and restores."""

    __slots__ = ("dtype", "main", "numpy", "python", "torch")

    def __init__(self, torch_state: torch.Tensor, python: Any, numpy: Any, dtype: torch.dtype) -> None:
        self.torch, self.python, self.numpy, self.dtype = torch_state, python, numpy, dtype
        self.main = sys.modules["__main__"]  # pickle looks there for what a script defines


def numpy_random() -> Any:
    """numpy's module of random numbers, if the program has numpy at all."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def save_state() -> State:
    numpy = numpy_random()
    return State(
        torch.default_generator.get_state(),
        python_random.save(),
        None if numpy is None else numpy.get_bit_generator(),
        torch.get_default_dtype(),
    )


def restore_state(state: State) -> None:
    torch.default_generator.set_state(state.torch)
    python_random.restore(state.python)
    if state.numpy is not None:
        numpy_random().set_bit_generator(state.numpy)
    if torch.get_default_dtype() != state.dtype:
        torch.set_default_dtype(state.dtype)
    sys.modules["__main__"] = state.main


def fresh_state(seed: int, index: int) -> State:
    """Torch as in a new process, alike on all ranks; what a process seeds by chance (Python, numpy) by the world."""
    numpy = numpy_random()
    return State(
        torch.Generator().manual_seed(TORCH_SEED).get_state(),
        python_random.seeded(f"{seed} {index}"),
        None if numpy is None else numpy.MT19937([seed, index]),
        torch.float32,
    )


def current() -> Rank:
    """The rank whose thread this is."""
    rank: Rank | None = getattr(_here, "rank", None)
    if rank is None:
        raise UnsupportedError(
            expected="a communication call on the thread of a rank",
            received=f"one on thread {threading.current_thread().name!r}",
            remedy="call collectives from the function that the world runs, not from a thread that it starts",
        )
    return rank


def inside() -> bool:
    return getattr(_here, "rank", None) is not None


@contextmanager
def being(rank: Rank) -> Iterator[None]:
    """Makes the calling thread that of a rank."""
    _here.rank = rank
    try:
        yield
    finally:
        _here.rank = None


def user_stack(frame: FrameType | None) -> list[str]:
    """`file:line in function` of the frames that are neither torch's, Python's nor the simulator's, innermost first."""
    lines = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def user_line(frame: FrameType | None) -> str:
    """The innermost of them."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def is_users(path: str) -> bool:
    return not path.startswith(NOT_USERS) and (path.startswith(INSTALLED) or not path.startswith(PYTHON))


class EnvironmentView(MutableMapping[bytes, bytes]):
    """Stands in for the data of `os.environ`: each rank sees and sets its own variables, others the process's."""

    def __init__(self, plain: dict[bytes, bytes]) -> None:
        self._plain = plain
        self.touched: set[bytes] = set()

    def _data(self) -> dict[bytes, bytes]:
        rank: Rank | None = getattr(_here, "rank", None)
        return self._plain if rank is None else rank.environment

    def __getitem__(self, key: bytes) -> bytes:
        return self._data()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.touched.add(key)
        self._data()[key] = value

    def __delitem__(self, key: bytes) -> None:
        self.touched.add(key)
        del self._data()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._data())

    def __len__(self) -> int:
        return len(self._data())


@contextmanager
def environment_per_rank() -> Iterator[None]:
    """While it is open, `os.environ` on a rank's thread is that rank's; what ranks set is undone after."""
    kept = os.environ._data  # type: ignore[attr-defined]
    view = EnvironmentView(kept)
    os.environ._data = view  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.environ._data = kept  # type: ignore[attr-defined]
        for name in view.touched:  # a rank's setting reached the process itself, through putenv
            if name in kept:
                os.putenv(name, kept[name])
            else:
                os.unsetenv(name)
