"""`python -m benchmarks full_check`: every test, in shards that are kept, so that a stopped run goes on where it was.

A shard is every n-th test file. What pytest found in it is stored in docs/results/full with the digest of sources and
tests, so results of other code are never taken for those of this code, and a run of hours may be spread over machines.
Pages, records and what makes them are not in the digest: they change between shards, and `./check` tests them in
minutes. Called by `./check --full`, which installs what the tests need. Exit code 1 if a test failed or no test ran.
"""

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.records import NOT_DECIDING, NOT_SOURCES, ROOT, SOURCES, git, modified_sources

SHARDS = 24
NOT_IN_DIGEST = (*NOT_SOURCES, *NOT_DECIDING, "benchmarks/full_check.py")


@dataclass(frozen=True)
class Shard:
    """What pytest found in one shard."""

    name: str
    passed: int
    failed: tuple[str, ...]
    skipped: tuple[str, ...]  # reasons
    seconds: float

    def cells(self, commit: str) -> list[str]:
        failed = ", ".join(self.failed) or "none"
        minutes = f"{self.seconds / 60:.0f}"
        return [self.name, commit, str(self.passed), failed, str(len(self.skipped)), minutes]


def digest() -> str:
    """Return a digest of the commit's sources and tests, and of what differs from the commit."""
    listed = git("ls-tree", "-r", "HEAD", "--", *SOURCES, "tests", "pyproject.toml").splitlines()
    found = "\n".join(line for line in listed if not line.endswith(NOT_IN_DIGEST))
    left_out = [f":!{path}" for path in ("docs", *NOT_IN_DIGEST)]
    found += git("diff", "HEAD", "--", ".", *left_out)
    found += git("ls-files", "--others", "--exclude-standard", "--", ".", *left_out)
    return blake3(found.encode()).hexdigest()[:16]


def run(shard: int, shards: int, output: Path) -> None:
    """Run one shard; pytest writes what it found to a file."""
    words = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "full or not full"]
    words += ["--shard", f"{shard}/{shards}", f"--junitxml={output}"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment)
    if done.returncode not in (0, 1):  # stopped, or not collected
        raise SystemExit(done.returncode)


def read_junit(path: Path) -> Shard:
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
    return Shard(path.stem, passed, tuple(failed), tuple(skipped), round(seconds, 1))


def keep(found: Shard, path: Path, code: str) -> None:
    """Store what a shard found, and of which code."""
    record = {"digest": code, "commit": git("rev-parse", "--short=7", "HEAD"), **asdict(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def kept(path: Path, code: str) -> tuple[Shard, str] | None:
    """Return a stored shard with its commit, if it is of this code."""
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    commit = record.pop("commit")
    if record.pop("digest") != code:
        return None
    lists = {name: tuple(record[name]) for name in ("failed", "skipped")}
    return Shard(**(record | lists)), commit


def main(words: list[str]) -> int:
    """Run the shards that have no result of this code, and print what all of them found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks full_check")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--only", type=int, nargs="+", help="these shards, from 1 on")
    options = parser.parse_args(words)
    if modified_sources():
        print(f"the sources differ from the commit: {modified_sources()}", file=sys.stderr)
    home, code = ROOT / "docs" / "results" / "full", digest()
    paths = [home / f"{at}-of-{options.shards}.json" for at in range(1, options.shards + 1)]
    for at, path in enumerate(paths, start=1):
        if not kept(path, code) and at in (options.only or range(1, options.shards + 1)):
            print(f"shard {at} of {options.shards}", file=sys.stderr, flush=True)
            output = ROOT / "build" / "full" / f"{path.stem}.xml"
            run(at, options.shards, output)
            keep(read_junit(output), path, code)
    found = [shard for path in paths if (shard := kept(path, code))]
    shards = [shard for shard, _ in found]
    table = Table("shard", "commit", "passed", "failed", "skipped", "minutes")
    for shard, commit in found:
        table.add_row(*shard.cells(commit))
    Console(width=160).print(table)
    reasons = sorted({reason for each in shards for reason in each.skipped})
    print(*(f"skipped: {reason}" for reason in reasons), sep="\n")
    passed = sum(each.passed for each in shards)
    failed = sum(len(each.failed) for each in shards)
    skipped = sum(len(each.skipped) for each in shards)
    print(f"{len(shards)} of {len(paths)} shards ran")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)
