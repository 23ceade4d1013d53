"""Run a user's script in a process of its own, under a function of isobit that watches it.

[Note: what the script finds]
The process is this file, run by path: the caller needs no torch, and the current folder is not on the search path, as
it would be with `python -m`. The file takes its own folder off that path before it imports anything, and then puts the
script's folder there and the script's arguments into `sys.argv`, so that the script finds what it finds under
`python script.py`. The watching function is given the caller's request as text, and runs the script with `run_main`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
    del sys.path[0]

import importlib
import runpy
import socket
from collections.abc import Sequence
from pathlib import Path

LAST_LINES = 15


def command(
    watcher: str,
    request: str,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    variables: Sequence[str] = (),
    python: str = sys.executable,
) -> list[str]:
    """Return the command of a process that runs a script.

    Args:
        watcher: The function that is given the request and returns the exit code, as "package.module:function".
        request: What it is asked for, as text.
        script: The script.
        arguments: Its arguments.
        variables: Variables that its process has in addition, as "NAME=value".
        python: The interpreter.
    """
    call = [python, os.path.abspath(__file__), watcher, request, str(script), *arguments]
    return ["env", *variables, *call] if variables else call


def torchrun_variables(rank: int, ranks: int, port: int) -> list[str]:
    """Return the variables that torchrun sets for a rank of one machine."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [f"{name}={value}" for name, value in values.items()]


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def last_lines(path: Path) -> str:
    """Return the last lines that a process wrote to a file."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 8192))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])


def run_main() -> None:
    """Run the script as the main module."""
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> int:
    """Call the watching function; the exit code is what it returns."""
    watcher, request, *script = sys.argv[1:]
    module, _, name = watcher.partition(":")
    watch = getattr(importlib.import_module(module), name)
    sys.argv[:] = script
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH: python adds no folder either
        sys.path.insert(0, os.path.dirname(os.path.realpath(script[0])))
    return int(watch(request))


if __name__ == "__main__":
    sys.exit(main())
