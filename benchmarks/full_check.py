"""`python -m benchmarks full_check`: every test, in shards that are kept, so that a stopped run goes on where it was.

A shard is every n-th test file. What pytest found in it is stored in build/full under the digest of sources, tests and
documentation, so results of other code are never taken for those of this code. docs/results and what is shipped as
evidence are not in the digest: records are made between shards, and `./check` tests both in minutes. Called by
`./check --full`, which installs what the tests need. Hours; exit code 1 if a test failed or no test ran.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.records import NOT_SOURCES, ROOT, git, modified_sources, sources_digest

SHARDS = 12


@dataclass(frozen=True)
class Shard:
    """What pytest found in one shard."""

    name: str
    passed: int
    failed: tuple[str, ...]
    skipped: tuple[str, ...]  # reasons
    seconds: float

    def cells(self) -> list[str]:
        failed = ", ".join(self.failed) or "none"
        minutes = f"{self.seconds / 60:.0f}"
        return [self.name, str(self.passed), failed, str(len(self.skipped)), minutes]


def digest() -> str:
    """Return a digest of the commit's sources and tests, and of what differs from the commit."""
    made = [f":!{path}" for path in ("docs/results", *NOT_SOURCES)]
    listed = git("ls-tree", "-r", "HEAD", "--", "tests", "docs", "pyproject.toml").splitlines()
    found = sources_digest() + "\n".join(line for line in listed if "\tdocs/results/" not in line)
    found += git("diff", "HEAD", "--", ".", *made)
    found += git("ls-files", "--others", "--exclude-standard", "--", ".", *made)
    return blake3(found.encode()).hexdigest()[:16]


def run(shard: int, shards: int, path: Path) -> None:
    """Run one shard; its file appears only when pytest has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    words = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "full or not full"]
    words += ["--shard", f"{shard}/{shards}", f"--junitxml={unfinished}"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment)
    if done.returncode not in (0, 1):  # stopped, or not collected
        raise SystemExit(done.returncode)
    unfinished.replace(path)


def read(path: Path) -> Shard:
    """Read what pytest wrote of a shard."""
    suites = ElementTree.parse(path).getroot().findall("testsuite")
    cases = [case for suite in suites for case in suite.findall("testcase")]
    failed, skipped = [], []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (left := case.find("skipped")) is not None:
            skipped.append(left.get("message", ""))
    seconds = sum(float(suite.get("time", "0")) for suite in suites)
    passed = len(cases) - len(failed) - len(skipped)
    return Shard(path.stem, passed, tuple(failed), tuple(skipped), seconds)


def main(words: list[str]) -> int:
    """Run the shards that have no result of this code, and print what all of them found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks full_check")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--only", type=int, nargs="+", help="these shards, from 1 on")
    options = parser.parse_args(words)
    if modified_sources():
        print(f"the sources differ from the commit: {modified_sources()}", file=sys.stderr)
    home = ROOT / "build" / "full" / digest()
    paths = [home / f"{at}-of-{options.shards}.xml" for at in range(1, options.shards + 1)]
    for at, path in enumerate(paths, start=1):
        if not path.exists() and at in (options.only or range(1, options.shards + 1)):
            print(f"shard {at} of {options.shards}", file=sys.stderr, flush=True)
            run(at, options.shards, path)
    shards = [read(path) for path in paths if path.exists()]
    table = Table("shard", "passed", "failed", "skipped", "minutes")
    for each in shards:
        table.add_row(*each.cells())
    Console(width=160).print(table)
    reasons = sorted({reason for each in shards for reason in each.skipped})
    print(*(f"skipped: {reason}" for reason in reasons), sep="\n")
    passed = sum(each.passed for each in shards)
    failed = sum(len(each.failed) for each in shards)
    skipped = sum(len(each.skipped) for each in shards)
    print(f"{len(shards)} of {len(paths)} shards ran")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)
