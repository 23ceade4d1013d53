"""The program of one run: run a script as `python script.py` would, and record what it computes.

Its only argument is a JSON object. The folder of this file is taken off the search path before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main() -> int:
    """Run the script that the arguments name. The exit code is the script's own, or 0 after the last step."""
    here = os.path.dirname(os.path.abspath(__file__))
    has_folder = bool(sys.path) and os.path.abspath(sys.path[0]) == here
    if has_folder:
        del sys.path[0]
    orders = json.loads(sys.argv[1])
    script = orders["script"]
    from isobit.comparing.runs.fixes import THREADS, apply
    from isobit.comparing.runs.observer import FilesRead, Observer, StepsDone
    from isobit.comparing.runs.places import Places

    files = FilesRead(orders["began"], time.time())
    sys.argv[:] = [script, *orders["arguments"]]
    if has_folder:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    served = find_kind(script, orders["device"])
    with open(orders["record"], "w", encoding="utf-8") as record:

        def tell(step: int) -> None:
            with open(orders["progress"], "w", encoding="utf-8") as progress:
                progress.write(str(step))

        observer = Observer(record, Places(os.path.dirname(script)), orders["steps"], tell)
        sys.addaudithook(files.watch)

        def run() -> None:
            for fix in orders["fixes"]:
                apply(fix)
            observer.install()
            observer.write("evidence", served=served)
            try:
                with observer:
                    run_script(script)
            except StepsDone:
                pass
            finally:
                if observer.is_own_process():
                    observer.quiet = True
                    observer.write("files", paths=files.paths)
                    observer.finish()

        if served:
            run_with_devices(run, script, served, THREADS in orders["fixes"])
        else:
            run()
    return 0


def find_kind(script: str, device: str) -> str:
    """Return the kind of device that the CPU has to serve, or nothing: see `run_twice` for `device`."""
    if device != "auto":
        return "" if device == "cpu" else device
    import torch

    from isobit.simulator.accelerator.modules import kind_in

    with open(script, "rb") as source:
        kind = kind_in(source.read())
    is_there = getattr(getattr(torch, kind, None), "is_available", lambda: False)()
    return "" if is_there else kind


def run_with_devices(run: Callable[[], None], script: str, kind: str, is_ordered: bool) -> None:
    """Run a script as the only rank of a simulated world that serves devices of a kind.

    A world repeats itself: its seed gives the order of threads, the time that passes and the generators of a new
    process. Two runs of a script must not agree because of that, so every run has a seed of its own.

    Args:
        run: Runs the script under the observer.
        script: Its path.
        kind: "cuda", "xpu" or "npu".
        is_ordered: Whether threads shall run in the same order in every run.
    """
    import random

    from isobit.errors import SimulationError
    from isobit.simulator.program.script import Script
    from isobit.simulator.world import World

    drawn = int.from_bytes(os.urandom(4), "little")

    def rank(index: int) -> None:
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        run()

    world = World(1, 0 if is_ordered else drawn, accelerator=kind)
    with Script(Path(script), sys.argv[1:]).installed():
        try:
            world.run(rank, init=False)
        except SimulationError as error:
            sys.exit(str(error))


def run_script(path: str) -> None:
    """Run a file as the main module."""
    import runpy

    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
