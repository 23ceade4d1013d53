"""Launches of a row count that is called first, in a process of its own: a wrapper may keep what it chose."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence

import torch

from isobit.certifying.judging.configurations import Planned, Surveyed
from isobit.certifying.judging.scan import Unjudged, launched
from isobit.certifying.running.execution import Function

SECONDS = 20  # that the other process may take


def first_launches(
    function: Function, target: str, plans: Sequence[Planned]
) -> dict[int, list[str]]:
    """Return what row counts launch if they are called from the largest to the smallest.

    A plan that is cached by the first call would otherwise be the one of the smallest row count in all calls. The
    calls are made in a copy of this process, so that they leave nothing behind; {} if there is none, as with threads:
    then `not_looked_for` says so.
    """
    settings = plans[0].settings if plans else ()
    counts = sorted({p.rows for p in plans if p.rows is not None and p.settings == settings})
    if len(counts) < 2 or not_looked_for():
        return {}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "{}"
        with contextlib.suppress(BaseException):
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            torch.set_num_threads(1)
            surveyed = Surveyed(function, target, [Planned(rows, settings) for rows in counts])
            found = {
                rows: [one.code for one in launched(surveyed, Planned(rows, settings))[0]]
                for rows in reversed(counts)
            }
            text = json.dumps(found)
        with contextlib.suppress(BaseException):
            os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    return {int(rows): codes for rows, codes in json.loads(read(reading, child)).items()}


def not_looked_for() -> str:
    """Return why this process cannot be copied, as a note of the certificate; "" if it can."""
    if hasattr(os, "fork") and threading.active_count() == 1:
        return ""
    why = "has threads" if hasattr(os, "fork") else "cannot be copied"
    return f"whether the function keeps what it chose in its first call was not judged: this process {why}"


def read(reading: int, child: int) -> str:
    """Return what the other process wrote, "{}" if it takes too long."""
    parts = []
    while select.select([reading], [], [], SECONDS)[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts.append(part)
    else:
        os.kill(child, signal.SIGKILL)
        parts = []
    os.close(reading)
    os.waitpid(child, 0)
    return b"".join(parts).decode() or "{}"


def compare_first(surveyed: Surveyed, first: dict[int, list[str]]) -> list[Unjudged]:
    """Return row counts that launch something else if they are called first."""
    settings = surveyed.plans[0].settings
    different = [
        rows
        for rows, codes in sorted(first.items())
        if codes != [one.code for one in launched(surveyed, Planned(rows, settings))[0]]
    ]
    what = "something else is launched if larger row counts are called before: the function keeps what it chose"
    return [Unjudged(tuple(different), what)] if different else []
