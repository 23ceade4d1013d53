"""Run ordinary wrapper code without a GPU: every `kernel[grid](...)` goes to a receiver instead.

[Note: what is captured]
While a function runs, `JITFunction.run` of Triton is replaced, so that wrapper code, heuristics and tuples of launches
work as they are. `Autotuner.run` is replaced too: the autotuner would choose by time, so each of its configurations is
judged, and here one is chosen by number. A dispatch mode of torch (watch.py) sees every operator.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from isobit.certifying.running.compile import triton_package
from isobit.certifying.running.watch import Receiver
from isobit.errors import ArgumentError


@dataclass
class Choices:
    """Which configuration of each autotuned kernel to use; and which there are, once it has run.

    Attributes:
        chosen: kernel -> its configuration as text; a kernel that is not in it uses its first one.
        seen: kernel -> texts of its configurations at these sizes.
        labels: what a kernel is called: its name, with a number if another one has that name. The key is where it
            is written, its configurations, and its number among equal ones of a call.
    """

    chosen: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: dict[tuple[Any, ...], str] = field(default_factory=dict)
    objects: dict[int, str] = field(default_factory=dict)  # of this call, by identity
    alive: list[Any] = field(default_factory=list)

    def label(self, kernel: Any) -> str:
        """Return what an autotuned kernel is called: two of one name are two kernels."""
        if id(kernel) not in self.objects:
            written = getattr(kernel.base_fn, "fn", kernel.base_fn)  # Triton's wrapper, or Python's
            code, name = written.__code__, str(kernel.base_fn.__name__)
            texts = tuple(describe(each) for each in kernel.configs)
            place = (code.co_filename, code.co_firstlineno, name, texts)
            taken = set(self.objects.values())
            keys = ((*place, number) for number in itertools.count())
            key = next(k for k in keys if self.labels.get(k) not in taken)
            if key not in self.labels:
                others = sum(each[2] == name for each in self.labels)
                self.labels[key] = f"{name} ({others + 1})" if others else name
            self.objects[id(kernel)] = self.labels[key]
            self.alive.append(kernel)
        return self.objects[id(kernel)]


_lock = threading.Lock()


@contextmanager
def captured(receiver: Receiver, choices: Choices) -> Iterator[None]:
    """Send every launch to a receiver while the context is open.

    Raises:
        ArgumentError: If another capture is open, or Triton's interpreter is on.
    """
    triton_package()
    from triton import knobs
    from triton.runtime import autotuner, jit

    if knobs.runtime.interpret:
        raise ArgumentError(
            expected="kernels that Triton compiles",
            received="TRITON_INTERPRET, which replaces them by Python",
            remedy="unset TRITON_INTERPRET",
        )
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        raise ArgumentError(
            expected="launches without hooks of Triton's runtime",
            received="a hook in triton.knobs.runtime, which could change what a kernel reads",
            remedy="remove it while certify runs",
        )
    if not _lock.acquire(blocking=False):
        raise ArgumentError(
            expected="one certificate at a time",
            received="a second one in the same process",
            remedy="wait for the first, or use another process",
        )
    run_kernel, run_autotuner = jit.JITFunction.run, autotuner.Autotuner.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        if not warmup:
            for hook in self.pre_run_hooks:
                hook(*args, **named)
            receiver.launch(self, grid, args, named)

    jit.JITFunction.run = run
    autotuner.Autotuner.run = autotuned(choices)
    try:
        yield
    finally:
        jit.JITFunction.run, autotuner.Autotuner.run = run_kernel, run_autotuner
        _lock.release()


def autotuned(choices: Choices) -> Callable[..., Any]:
    """Return what replaces `Autotuner.run`: it uses the configuration that was chosen, without timing."""

    def run(self: Any, *args: Any, **named: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configurations = self.prune_configs(named) if len(self.configs) > 1 else self.configs
        name = choices.label(self)
        texts = [describe(each) for each in configurations]
        # A kernel may be launched with several sizes, each with configurations of its own.
        choices.seen[name] = tuple(dict.fromkeys((*choices.seen.get(name, ()), *texts)))
        wanted = choices.chosen.get(name, texts[0])
        if wanted not in texts:  # pruned at these sizes, so that the autotuner cannot choose it
            wanted = texts[0]
        chosen = configurations[texts.index(wanted)]
        everything = {**self.nargs, **named, **chosen.all_kwargs()}
        if chosen.pre_hook is not None:
            chosen.pre_hook(everything)
        found = self.fn.run(*args, **named, **chosen.all_kwargs())
        self.nargs = None
        return found

    return run


def describe(configuration: Any) -> str:
    """Return a configuration of the autotuner as text: "BLOCK=64 num_warps=4 num_stages=3"."""
    given = {k: v for k, v in configuration.all_kwargs().items() if (k, v) != ("num_ctas", 1)}
    return " ".join(f"{name}={value}" for name, value in given.items())
