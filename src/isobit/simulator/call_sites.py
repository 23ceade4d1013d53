"""Lines of the simulated program on a stack, as opposed to lines of Python, torch and the simulator."""

from __future__ import annotations

import os
from functools import cache
from types import FrameType

import torch

PYTHON = os.path.dirname(os.__file__)
TORCH = os.path.dirname(torch.__file__)
INSTALLED = os.path.dirname(TORCH)
SIMULATOR = os.path.dirname(__file__)
# Libraries: what is installed beside torch, and isobit, which may be a checkout.
LIBRARIES = (INSTALLED, os.path.dirname(SIMULATOR))
IMPORT = "<frozen importlib._bootstrap>"
# Files of torch through which a program calls torch.distributed.
FUNCTIONS = (
    "distributed_c10d.py",
    "c10d_logger.py",
    "_functional_collectives.py",
    "_ops.py",
    "_contextlib.py",
    "overrides.py",  # which calls the function modes of ranks
)
DISPATCH = ("_library/", "autograd/", "utils/", "_dynamo/")  # folders of torch that pass calls on
NOT_USERS = (
    TORCH,
    SIMULATOR,
    # Functions of torch that `isobit preflight` has replaced, to see their calls.
    os.path.join(os.path.dirname(SIMULATOR), "guards", "trial_run"),
    os.path.join(INSTALLED, "typing_extensions"),
    "<frozen",
    "<eval_with_key",
)


def user_stack(frame: FrameType | None) -> list[str]:
    """Return `file:line in function` for each frame of the user's code, innermost first."""
    lines = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def user_line(frame: FrameType | None) -> str:
    """Return the first line of `user_stack`, or nothing if no frame is the user's."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def torch_caller(frame: FrameType | None) -> str:
    """Return the innermost file of torch, below torch's folder, that made a call for the program, or nothing.

    Files that dispatch a call to another file do not count.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_file(path):
            return ""
        if path.startswith(TORCH) and not path.endswith(FUNCTIONS):
            below = path[len(TORCH) + 1 :]
            if not below.startswith(DISPATCH):
                return below
        frame = frame.f_back
    return ""


@cache
def is_user_file(path: str) -> bool:
    """Return whether a file belongs to the program or to a library other than torch."""
    return not path.startswith(NOT_USERS) and (
        path.startswith(INSTALLED) or not path.startswith(PYTHON)
    )


def called_by_torch(frame: FrameType | None) -> bool:
    """Return whether a module of torch made a call for itself, rather than the program through torch."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_file(path):
            return False
        if path.startswith(TORCH) and not path.endswith(FUNCTIONS):
            return True
        frame = frame.f_back
    return True


def called_by_program(frame: FrameType | None) -> bool:
    """Return whether the program makes a call itself, outside an import.

    A library, or an import, may hold a lock that does not pass the baton while another strand waits for it.
    """
    frame = skip_pass_through(frame)
    if frame is None or frame.f_code.co_filename.startswith(LIBRARIES):
        return False
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return False
        frame = frame.f_back
    return True


def skip_pass_through(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside the simulator and the standard library."""
    while frame is not None and is_pass_through(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_pass_through(path: str) -> bool:
    """Return whether a file is the simulator's or Python's own, which act for their caller."""
    if path.startswith(SIMULATOR) or (path.startswith("<frozen") and path != IMPORT):
        return True
    return path.startswith(PYTHON) and not path.startswith(INSTALLED)
