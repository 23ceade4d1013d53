"""One run of `isobit compare runs`: run a script as `python script.py` would, and record what it computes.

`main` is called in a process of its own: see [Note: what the script finds] in isobit.foundation.script_process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.foundation.script_process import run_main


@dataclass(frozen=True)
class Request:
    """What a run is asked for.

    Attributes:
        steps: Optimizer steps after which the script is ended.
        device: The kind of device that it finds: see `run_twice`.
        record: Where the record is written.
        progress: Where the number of steps done is written.
        fixes: Suspects to fix, by name.
        began: When the first run began; files that changed since are reported when they are read.
    """

    steps: int
    device: str
    record: str
    progress: str
    fixes: Sequence[str]
    began: float


def main(text: str) -> int:
    """Run the script of `sys.argv` as a request in JSON asks for. The exit code is 0 after the last step."""
    request, script = Request(**json.loads(text)), sys.argv[0]
    from isobit.comparing.runs.fixes import THREADS, apply
    from isobit.comparing.runs.observer import FilesRead, Observer, StepsDone
    from isobit.comparing.runs.places import Places

    files = FilesRead(request.began, time.time())
    served = find_kind(script, request.device)
    with open(request.record, "w", encoding="utf-8") as record:

        def tell(step: int) -> None:
            with open(request.progress, "w", encoding="utf-8") as progress:
                progress.write(str(step))

        observer = Observer(record, Places(os.path.dirname(script)), request.steps, tell)
        sys.addaudithook(files.watch)

        def run() -> None:
            for fix in request.fixes:
                apply(fix)
            observer.install()
            observer.write("evidence", served=served)
            try:
                with observer:
                    run_main()
            except StepsDone:
                pass
            finally:
                if observer.is_own_process():
                    observer.quiet = True
                    observer.write("files", paths=files.paths)
                    observer.finish()

        if served:
            run_with_devices(run, script, served, THREADS in request.fixes)
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
