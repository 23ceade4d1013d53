"""Measures the CPU time of each test file, and fails a whole run that takes a quarter more than was recorded.

CPU time of the process and of the children that it waited for, since machines are shared; as a multiple of a small loop
that is timed beside every file, since a busy machine slows both. Records are per processor: kernels and interpreter
differ between processors by more than a quarter. Only the total decides; files are shown, to find what grew.
"""

import hashlib
import json
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from isobit.processor import cpu_name

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "cpu_seconds.json"
GROWTH = 1.25
SHOWN = 8
OPTION = "--record-time"


@dataclass(frozen=True)
class Times:
    """CPU seconds of one run: of the loop, and of each test file."""

    loop: float
    files: dict[str, float]

    def loops(self, names):
        """The time of some files, as a multiple of the loop."""
        return sum(self.files[name] for name in names) / self.loop


def judge(recorded, found):
    """Return what is wrong, or an empty text: the total may grow by a quarter, of new files too."""
    limit = GROWTH * recorded.loops(recorded.files)
    total = found.loops(found.files)
    if total <= limit:
        return ""
    grown = {
        n: found.loops([n]) - (recorded.loops([n]) if n in recorded.files else 0)
        for n in found.files
    }
    most = sorted(grown, key=grown.__getitem__, reverse=True)[:SHOWN]
    lines = [f"  {name}: {grown[name] * found.loop:+.1f} s" for name in most]
    return "\n".join(
        [
            f"expected: tests in {limit * found.loop:.0f} CPU seconds of this run, a quarter above the record",
            f"received: {total * found.loop:.0f} CPU seconds; grown most:",
            *lines,
            "remedy: make these cheaper, mark sweeps `full`, or record again by ./check "
            f"{OPTION} and write the reason into CHANGELOG.md",
        ]
    )


def is_whole(recorded, found):
    """Whether every recorded file that still exists was run."""
    return {n for n in recorded.files if (ROOT / n).exists()} <= set(found.files)


def read(path=TABLE):
    """The record of this processor, or None."""
    known = json.loads(path.read_text()).get(cpu_name()) if path.exists() else None
    return Times(**known) if known else None


def write(found, path=TABLE):
    known = json.loads(path.read_text()) if path.exists() else {}
    rounded = {name: round(seconds, 1) for name, seconds in sorted(found.files.items())}
    known[cpu_name()] = asdict(Times(round(found.loop, 5), rounded))
    path.write_text(json.dumps(known, indent=1) + "\n")


def cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # that ended
    return time.process_time() + children.ru_utime + children.ru_stime


def time_loop():
    """CPU seconds of a little of both kinds of work: interpreted, and compiled."""
    begun, total = cpu_seconds(), 0
    for at in range(80_000):
        total += at
    hashlib.blake2b(bytes(6_000_000))
    return cpu_seconds() - begun


class Watch:
    """Adds up the time of each file in this process, and of the workers that report to it."""

    def __init__(self):
        self.loops, self.files = [], {}

    def times(self):
        return Times(statistics.median(self.loops), self.files) if self.files else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        name = item.path.relative_to(ROOT).as_posix()
        if name not in self.files:
            self.loops.append(time_loop())
        begun = cpu_seconds()
        try:
            return (yield)
        finally:
            self.files[name] = self.files.get(name, 0.0) + cpu_seconds() - begun

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        told = getattr(node, "workeroutput", {}).get("cpu_time")
        if told:
            self.loops += told["loops"]
            for name, seconds in told["files"].items():
                self.files[name] = self.files.get(name, 0.0) + seconds

    def pytest_sessionfinish(self, session):
        config = session.config
        if hasattr(config, "workeroutput"):
            config.workeroutput["cpu_time"] = {"loops": self.loops, "files": self.files}
            return
        found, recorded = self.times(), read()
        if found is None or config.getoption("markexpr") != "not full":
            return
        if config.getoption(OPTION):
            write(found)
        elif recorded is None:
            total = sum(found.files.values())
            line = f"{total:.0f} CPU seconds; not compared: no record of this processor ({OPTION})"
            config.get_terminal_writer().line("\n" + line)
        elif is_whole(recorded, found) and (wrong := judge(recorded, found)):
            config.get_terminal_writer().line("\n" + wrong, red=True)
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
