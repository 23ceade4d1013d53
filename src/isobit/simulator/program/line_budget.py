"""A budget of lines: a rank that runs more lines of its own code in one turn than allowed is reported.

Unlike patience, which is real time, the budget does not depend on the machine. It counts lines of the program, not of
installed libraries, and costs about a microsecond for each, so that it is off unless it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from isobit.simulator.call_sites import INSTALLED, is_user_file, user_stack
from isobit.simulator.checkers.deadlock import endless_lines
from isobit.simulator.findings import Killed
from isobit.simulator.rank import Rank


@contextmanager
def counting_lines(rank: Rank, budget: int | None) -> Iterator[None]:
    """Count the lines of the current thread; end it with a finding when one turn has more than `budget`."""
    if budget is None:
        yield
        return
    limit, turn, count = budget, -1, 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal turn, count
        if event == "line":
            if turn != rank.schedule.turn:
                turn, count = rank.schedule.turn, 0
            count += 1
            if count > limit and rank.findings.root is None:
                rank.findings.root = endless_lines(rank.index, limit, user_stack(frame))
                raise Killed("it ran too many lines")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return on_line if is_user_file(path) and not path.startswith(INSTALLED) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
