"""What one rank owns while it runs on a thread: its random numbers, variables, __main__ and default dtype."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from isobit.errors import UnsupportedError
from isobit.simulator.program import python_random

if TYPE_CHECKING:
    from isobit.simulator.program.threads import Strand
    from isobit.simulator.torch.work import RankWork
    from isobit.simulator.world import World

TORCH_SEED = 67280421310721  # what torch gives the default generator of a fresh process
PYTHON, INSTALLED = os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__))
TORCH = os.path.dirname(torch.__file__)
FUNCTIONS = (
    "distributed_c10d.py",
    "c10d_logger.py",
    "_functional_collectives.py",
    "_ops.py",
    "_contextlib.py",
)
NOT_USERS = (
    TORCH,
    os.path.dirname(__file__),
    os.path.join(INSTALLED, "typing_extensions"),
    "<frozen",
    "<eval_with_key",
)

_here = threading.local()


class Rank:
    """One rank of a world: the state that a process would own."""

    def __init__(self, world: World, index: int, variables: dict[bytes, bytes]) -> None:
        self.world, self.index = world, index
        self.variables = variables
        self.pending: dict[int, RankWork] = {}
        self.calls = self.refusals = 0
        self.incarnations: dict[str, int] = {}
        self.groups: Any = None  # torch's table of process groups, once it is asked for
        self.folder = ""  # what it made the current folder, if it did
        self.questions = 0  # how often it asked for the time
        self.time_loop = (0, 0)  # (calls, how often it was asked a thousand times since)
        self.asked_in, self.asked = (
            (-1, 0),
            dict[object, int](),
        )  # what else it asked for, in one turn
        self.started: dict[int, Strand] = {}  # its threads besides the main one
        self.thread_ids: dict[int, int] = {}  # Python's, by strand
        self.value: Any = None
        self.error: BaseException | None = None
        self.left = False
        self.death: BaseException | None = (
            None  # what a fault ended it with, wherever the program caught that
        )
        self.state = fresh_state(world.seed, index)

    @property
    def communicating(self) -> bool:
        """Whether this thread is inside a call, where the simulator itself touches buffers."""
        return getattr(_here, "communicating", False)

    @communicating.setter
    def communicating(self, value: bool) -> None:
        _here.communicating = value


class State:
    """Process-wide settings that a switch saves and restores."""

    __slots__ = ("arguments", "dtype", "main", "numpy", "python", "threads", "torch")

    def __init__(
        self, torch_state: torch.Tensor, python: Any, numpy: Any, dtype: torch.dtype
    ) -> None:
        self.torch, self.python, self.numpy, self.dtype = torch_state, python, numpy, dtype
        self.main = sys.modules["__main__"]  # pickle looks there for what a script defines
        self.arguments = sys.argv
        self.threads = torch.get_num_threads()


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
    if torch.get_num_threads() != state.threads:
        torch.set_num_threads(state.threads)
    sys.modules["__main__"] = state.main
    sys.argv = state.arguments


def fresh_state(seed: int, index: int) -> State:
    """Torch as in a new process, alike on all ranks; what a process seeds by chance (Python, numpy) by the world."""
    numpy = numpy_random()
    state = State(
        torch.Generator().manual_seed(TORCH_SEED).get_state(),
        python_random.seeded(f"{seed} {index}"),
        None if numpy is None else numpy.MT19937([seed, index]),
        torch.float32,
    )
    state.arguments = list(sys.argv)  # programs take from it what is theirs
    return state


def current() -> Rank:
    """The rank whose thread this is."""
    rank: Rank | None = getattr(_here, "rank", None)
    if rank is None:
        raise UnsupportedError(
            expected="a communication call on a thread of the program's own",
            received=f"one on thread {threading.current_thread().name!r}, which a library started",
            remedy="make the call in a function of the script: on its main thread, a threading.Thread or a "
            "ThreadPoolExecutor",
        )
    return rank


def inside() -> bool:
    return getattr(_here, "rank", None) is not None


def owner() -> Rank | None:
    """The rank that this thread belongs to, also where a library started it and it never has the baton."""
    rank: Rank | None = getattr(_here, "rank", None)
    return getattr(_here, "served", None) if rank is None else rank


def strand() -> int:
    """The number of this thread in the schedule."""
    number: int = _here.strand
    return number


def has_baton() -> bool:
    """Whether this thread can pass the baton: not in a process that a rank forked."""
    return getattr(_here, "rank", None) is not None and not getattr(_here, "forked", False)


def _note_fork() -> None:
    _here.forked = inside()


os.register_at_fork(after_in_child=_note_fork)


@contextmanager
def being(rank: Rank, strand: int) -> Iterator[None]:
    """Makes the calling thread a strand of a rank."""
    _here.rank, _here.strand, _here.communicating = rank, strand, False
    try:
        yield
    finally:
        _here.rank = None


@contextmanager
def serving(rank: Rank) -> Iterator[None]:
    """Makes the calling thread one that a library started on a rank: it runs beside the schedule."""
    _here.served = rank
    try:
        yield
    finally:
        _here.served = None


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


def called_by_torch(frame: FrameType | None) -> bool:
    """Whether a module of torch made the call for itself, not the program through torch.distributed's functions."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_users(path):
            return False
        if path.startswith(TORCH) and not path.endswith(FUNCTIONS):
            return True
        frame = frame.f_back
    return True


@cache
def is_users(path: str) -> bool:
    return not path.startswith(NOT_USERS) and (
        path.startswith(INSTALLED) or not path.startswith(PYTHON)
    )
