"""The process of `isobit preflight`: run a script as `python script.py` would, under `preflight`.

`main` is called in a process of its own: see [Note: what the script finds] in isobit.foundation.script_process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

from isobit.errors import ArgumentError
from isobit.foundation.script_process import run_main
from isobit.guards.trial_run.report import PreflightReport
from isobit.guards.trial_run.run import preflight
from isobit.guards.trial_run.starting import Request, write_outcome


def main(text: str) -> int:
    """Run the script of `sys.argv` as a request in JSON asks for, and write the report."""
    return leave(run_trial(Request.from_json(text)))


def run_trial(request: Request) -> int:
    """Run the script, and write the report. The exit code is the script's own, or 0."""
    ended: list[object] = []

    def program() -> None:
        try:
            run_main()
        except SystemExit as stop:  # what was seen before the end of a script still counts
            ended.append(stop.code)

    outcome: PreflightReport | ArgumentError
    try:
        outcome = preflight(
            program, steps=request.steps, config=request.config, declare=request.declare
        )
    except ArgumentError as error:
        outcome = error
    # A script that fails before its last step could not be run, however it fails.
    steps = outcome.steps if isinstance(outcome, PreflightReport) else 0
    if steps < request.steps and ended and ended[0]:
        return ended[0] if isinstance(ended[0], int) else 1
    write_outcome(request.record, outcome)
    return 0


def leave(code: int) -> int:
    """Return the code; exit at once if threads run that the program, ended early, could not stop itself."""
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.terminate()
    if any(not t.daemon and t is not threading.main_thread() for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
