"""One rank of `isobit profile train.py`: run a script as `python script.py` would, and record some of its steps.

`main` is called in a process of its own: see [Note: what the script finds] in isobit.foundation.script_process. A step
ends when the first optimizer of the script has stepped. After the steps that were asked for, the trace is written, and
the script is ended.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

from isobit.foundation.script_process import run_main

POLL = 0.02  # seconds
PATIENCE = 600.0  # seconds for the other ranks to write their traces


@dataclass(frozen=True)
class Request:
    """What a rank is asked for: see `isobit.profiling.recording.Recording`. Traces are written to the folder."""

    rank: int
    ranks: int
    steps: int
    warmup: int
    modules: bool
    folder: str


class CoreTimes:
    """Notes in the trace, at the end of each step, what the machine took from it.

    Without it, a machine that is busy with other programs looks like a slow program. Linux counts per thread how long
    it ran and how long it was ready and had no core; of a virtual machine, also how long others had its core. Threads
    that send are those of gloo; of another library, all but the main one may be, and how long they send is not known.
    """

    def __init__(self) -> None:
        self.before = self.threads()
        self.stolen = self.steal()

    def threads(self) -> dict[str, tuple[str, int, int]]:
        """Return the name of each thread, and the nanoseconds that it ran and that it had no core."""
        found = {}
        try:
            numbers = os.listdir("/proc/self/task")
        except OSError:  # not Linux
            return {}
        for number in numbers:
            try:
                with open(f"/proc/self/task/{number}/comm", "rb") as file:
                    name = file.read().decode("ascii", "replace")
                with open(f"/proc/self/task/{number}/schedstat", encoding="ascii") as file:
                    ran, waited = map(int, file.read().split()[:2])
            except (OSError, ValueError):  # a thread that has just ended
                continue
            found[number] = (name, ran, waited)
        return found

    def steal(self) -> list[int]:
        """Return the nanoseconds that the host of a virtual machine took from each core."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                lines = [line.split() for line in file if re.match(r"cpu\d", line)]
            return [int(words[8]) * (10**9 // os.sysconf("SC_CLK_TCK")) for words in lines]
        except (OSError, ValueError, IndexError):
            return []

    def mark(self) -> dict[str, int]:
        """Write an annotation at the end of a step, and return its nanoseconds."""
        from torch.profiler import record_function

        now, stolen = self.threads(), self.steal()
        spent = {}
        for number, (name, ran, waited) in now.items():
            _, ran_before, waited_before = self.before.get(number, (name, 0, 0))
            spent[number] = (name, ran - ran_before, waited - waited_before)
        _, ran, waited = spent.pop(str(os.getpid()), ("", 0, 0))
        gloo = [times for times in spent.values() if "gloo" in times[0]]
        taken = max((a - b for a, b in zip(stolen, self.stolen, strict=False)), default=0)
        self.before, self.stolen = now, stolen
        found = {
            "ran": ran,
            "waited": waited,
            "senders_ran": max((times[1] for times in gloo), default=0),
            "senders_waited": sum(times[2] for times in gloo or spent.values()),
            "stolen": max(0, taken),
        }
        words = ", ".join(f"{name} {ns}" for name, ns in found.items())
        with record_function(f"isobit: core times in ns: {words}"):
            pass
        return found


class Recorded(BaseException):
    """Ends the script; not an Exception, so that the script's own handlers let it pass."""


class Recorder:
    """Counts the steps of the first optimizer, and records some of them."""

    def __init__(self, request: Request) -> None:
        import torch
        from torch.cuda import is_available
        from torch.profiler import ProfilerActivity, profile, schedule

        if request.ranks > 1:  # they share the cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.ranks))
        self.request = request
        self.optimizer: Any = None
        self.depth, self.is_done = 0, False
        self.began, self.plain = time.perf_counter_ns(), 0  # of a step without the profiler
        self.steps, self.waits = 0, CoreTimes()
        activities = [ProfilerActivity.CPU]
        if is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(
                skip_first=request.warmup - 1,
                wait=0,
                warmup=1,
                active=request.steps,
                repeat=1,
            ),
            on_trace_ready=self.write,
            record_shapes=True,
            with_stack=request.modules,
        )

    def write(self, profiler: Any) -> None:
        """Write the trace under its name when it is complete; a script that ends early has none."""
        if self.steps < self.request.warmup + self.request.steps:
            return
        folder, rank = self.request.folder, self.request.rank
        profiler.export_chrome_trace(f"{folder}/recording{rank}.json")
        self.note()
        os.rename(f"{folder}/recording{rank}.json", f"{folder}/rank{rank}.json")
        self.is_done = True

    def note(self) -> None:
        """Write how many steps there were, and how long the last one without the profiler took."""
        path = f"{self.request.folder}/rank{self.request.rank}.note"
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"steps": self.steps, "plain": self.plain}, file)

    def stepped(self, optimizer: Any) -> None:
        """End a step, and the script after the last one."""
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        if not self.is_done:
            self.steps += 1
            now = time.perf_counter_ns()
            if 1 < self.steps < self.request.warmup:
                self.plain = now - self.began
            self.waits.mark()
            self.profiler.step()
            self.began = time.perf_counter_ns()
        if self.is_done:
            self.wait_for_all()
            raise Recorded

    def wait_for_all(self) -> None:
        """Wait for the traces of all ranks: a process that ends would end a collective of another one."""
        folder, ranks = self.request.folder, self.request.ranks
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if all(os.path.exists(f"{folder}/rank{rank}.json") for rank in range(ranks)):
                return
            time.sleep(POLL)

    def hook(self) -> None:
        """Call `stepped` after every step of every optimizer.

        Not a hook of the optimizer: those are called inside its annotation, which would then be cut.
        """
        from torch.optim import Optimizer

        plain = Optimizer.profile_hook_step

        def hooked(step: Any) -> Any:
            inner = plain(step)

            @wraps(inner)
            def outer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                self.depth += 1
                try:
                    result = inner(optimizer, *args, **kwargs)
                finally:
                    self.depth -= 1
                if not self.depth:  # a subclass may call the step of its parent
                    self.stepped(optimizer)
                return result

            outer.hooked = True  # type: ignore[attr-defined]
            return outer

        Optimizer.profile_hook_step = staticmethod(hooked)  # type: ignore[method-assign,assignment]


def main(text: str) -> NoReturn:
    """Run the script of `sys.argv` as a request in JSON asks for; the process ends here."""
    try:
        leave(run_recorded(Request(**json.loads(text))))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(1)


def run_recorded(request: Request) -> int:
    """Run the script under the profiler, and return the exit code."""
    recorder = Recorder(request)
    recorder.hook()
    code: object = 0
    with recorder.profiler:
        try:
            run_main()
        except Recorded:
            return 0
        except SystemExit as stop:
            code = stop.code
    recorder.note()
    return code if isinstance(code, int) else int(code is not None)


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads and processes that a script which was ended could not stop itself."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
