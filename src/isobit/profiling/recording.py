"""Record some steps of a script on several ranks of this machine with torch.profiler. Does not load torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from isobit.errors import ArgumentError
from isobit.foundation.script_process import command, free_port, last_lines, torchrun_variables
from isobit.profiling import recorded_rank

POLL = 0.05  # seconds


@dataclass(frozen=True)
class Recording:
    """A script, and which of its steps are recorded.

    Attributes:
        script: The script.
        arguments: Its arguments.
        ranks: Processes, which find the variables that torchrun sets.
        steps: Optimizer steps that are recorded.
        warmup: Optimizer steps before them.
        modules: Also record the functions of Python, so that time can be listed by module; this is slower.
    """

    script: Path
    arguments: Sequence[str] = ()
    ranks: int = 1
    steps: int = 3
    warmup: int = 3
    modules: bool = False


@dataclass(frozen=True)
class Recorded:
    """The traces by rank, and what to know about the recording."""

    traces: tuple[Path, ...]
    notes: tuple[str, ...]


def record(recording: Recording, folder: Path) -> Recorded:
    """Run the script on all ranks, and write a trace per rank to a folder.

    The script is ended after its last recorded step.

    Raises:
        ArgumentError: If the script fails, or takes too few steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(recording.ranks):
        for name in (f"rank{rank}.json", f"rank{rank}.note"):
            (folder / name).unlink(missing_ok=True)
    with ExitStack() as stack:
        running = start(recording, folder.resolve(), stack)
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break  # the others would wait for a rank that failed
            time.sleep(POLL)
    failed = [rank for rank, process in enumerate(running) if (process.returncode or 0) > 0]
    failed += [rank for rank, process in enumerate(running) if (process.returncode or 0) < 0]
    if failed:
        rank = failed[0]
        code = running[rank].returncode
        lines = last_lines(folder / f"rank{rank}.output")
        raise ArgumentError(
            expected=f"a script that runs on {recording.ranks} ranks",
            received=f"{f'signal {-code}' if code < 0 else f'exit code {code}'} of rank {rank} of {recording.script}"
            + (f", after:\n{lines}" if lines else ""),
            remedy="run it with torchrun first; arguments after -- are passed to the script",
        )
    traces = tuple(folder / f"rank{rank}.json" for rank in range(recording.ranks))
    notes = [json.loads((folder / f"rank{rank}.note").read_text()) for rank in range(len(traces))]
    needed = recording.warmup + recording.steps
    for rank, (trace, note) in enumerate(zip(traces, notes, strict=True)):
        if not trace.exists():
            raise ArgumentError(
                expected=f"a script whose optimizer steps {needed} times: {recording.warmup} to warm up, "
                f"{recording.steps} to record",
                received=f"{note['steps']} steps of a torch.optim.Optimizer on rank {rank}",
                remedy="train for more steps, or record fewer: --warmup 1 --steps 1",
            )
    plain = max(note["plain"] for note in notes)
    said = f"without the profiler a step took {plain / 1e6:,.3f} ms" if plain else ""
    return Recorded(traces, (said,) if said else ())


def start(recording: Recording, folder: Path, stack: ExitStack) -> list[subprocess.Popen[bytes]]:
    """Start all ranks; leaving the stack ends those that still run."""
    port = free_port()
    running = []
    for rank in range(recording.ranks):
        request = recorded_rank.Request(
            rank=rank,
            ranks=recording.ranks,
            steps=recording.steps,
            warmup=recording.warmup,
            modules=recording.modules,
            folder=str(folder),
        )
        output = stack.enter_context((folder / f"rank{rank}.output").open("wb"))
        process = subprocess.Popen(
            command(
                f"{recorded_rank.__name__}:main",
                json.dumps(asdict(request)),
                recording.script,
                recording.arguments,
                variables=torchrun_variables(rank, recording.ranks, port),
            ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        stack.callback(end, process)
        running.append(process)
    return running


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs."""
    if process.poll() is None:
        process.kill()
        process.wait()
