"""The program of `isobit preflight`: run a script as `python script.py` would, under `preflight`.

Its only argument is a JSON object. The folder of this file is taken off the search path before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    """Run the script that the arguments name, and write the report. The exit code is the script's own, or 0."""
    here = os.path.dirname(os.path.abspath(__file__))
    has_folder = bool(sys.path) and os.path.abspath(sys.path[0]) == here
    if has_folder:
        del sys.path[0]
    orders = json.loads(sys.argv[1])
    import runpy
    from dataclasses import asdict

    from isobit.errors import ArgumentError
    from isobit.guards.trial_run.run import preflight

    sys.argv[:] = [orders["script"], *orders["arguments"]]
    if has_folder:
        sys.path.insert(0, os.path.dirname(os.path.realpath(orders["script"])))
    ended: list[object] = []

    def program() -> None:
        try:
            runpy.run_path(orders["script"], run_name="__main__")
        except SystemExit as stop:  # what was seen before the end of a script still counts
            ended.append(stop.code)

    try:
        options = {name: orders[name] for name in ("steps", "config", "declare")}
        report = asdict(preflight(program, **options))
    except ArgumentError as error:
        parts = ("expected", "received", "remedy")
        report = {"error": {part: getattr(error, part) for part in parts}}
    # A script that fails before its last step could not be run, however it fails.
    if report.get("steps", 0) < orders["steps"] and ended and ended[0]:
        return ended[0] if isinstance(ended[0], int) else 1
    with open(orders["record"], "w", encoding="utf-8") as record:
        json.dump(report, record)
    return 0


def leave(code: int) -> None:
    """Exit without waiting for threads and processes that the program, ended early, could not stop itself."""
    import multiprocessing
    import threading

    for child in multiprocessing.active_children():
        if not child.daemon:
            child.terminate()
    if any(not t.daemon and t is not threading.main_thread() for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
