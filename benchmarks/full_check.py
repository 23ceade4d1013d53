"""`python -m benchmarks full_check`: every test, in shards that are kept, so that a stopped run goes on where it was.

What pytest found in a shard is stored in docs/results/full with the digest of what decided it: the kernels, the
package's data and those of its modules that the shard's processes loaded, the shard's test files with those that they
name, all other files of tests, the benchmarks and the examples. So a result is never taken for one of other code, a
run of hours may be spread over machines, and a mended test makes only its shard anew. The tests of tests/repo read
the whole repository: they are the first shard, and decided by all of it.
Tests that a record does, case for case, are left out: the record must be of these sources, and say that all is well.
Pages, records and what makes them are not in the digest: they change between shards, and `./check` tests them in
minutes. Called by `./check --full`, which installs what the tests need. Exit code 1 if a test failed, no test ran or
one of those records is not good; 2 if a shard has no result, unless only some were asked for.
"""

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.records import (
    NOT_DECIDING,
    NOT_SOURCES,
    RECORDS,
    ROOT,
    git,
    is_current,
    modified_sources,
    package_files,
    watch,
)

SHARDS = 24
# Hours of these are in records, which a release needs in any case.
RECORDED = {
    "tests/certifying/test_leaf.py::test_equals_the_oracle_a_million_times": "leaf",
    "tests/certifying/test_no_false_certificate.py::test_no_wrong_kernel_gets_a_certificate": "certificates",
    "tests/gpu/test_contracts_on_backends.py::test_contracts_are_kept": "gpu-contracts",
    "tests/gpu/test_machine_code.py::test_ptxas_keeps_the_roundings_and_the_products": "machine-code",
    "tests/simulator/test_planted_bugs.py::test_clean_twin_raises_nothing_with_two_hundred_seeds": "bugs",
    "tests/simulator/test_planted_bugs.py::test_is_named_with_fifty_seeds": "bugs",
    "tests/simulator/test_planted_bugs.py::test_right_programs_raise_nothing_with_twenty_seeds": "bugs",
    "tests/simulator/test_scripts.py::test_gloo_prints_the_same_losses": "scripts",
    "tests/simulator/test_scripts.py::test_scripts_run_unmodified_on_sixty_four_ranks": "scripts",
}
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


def files_of(shard: int, shards: int) -> list[str]:
    """Return the test files of a shard: tests/repo are the first; the others take every n-th of the other files."""
    listed = git(
        "ls-files", "--cached", "--others", "--exclude-standard", "--", "tests"
    ).splitlines()
    files = sorted(path for path in listed if is_test(path))
    others = [path for path in files if not path.startswith("tests/repo/")]
    return others[shard - 2 :: shards - 1] if shard > 1 else sorted(set(files) - set(others))


def is_test(path: str) -> bool:
    return re.fullmatch(r"test_\w+\.py", Path(path).name) is not None


def digest(files: list[str], modules: list[str], commit: str = "HEAD") -> str:
    """Return a digest of what decides these test files at a commit, and of what now differs from HEAD."""
    whole = any(path.startswith("tests/repo/") for path in files)
    package = package_files(commit, None if whole else modules)
    folders = ("benchmarks", "examples", "tests", "pyproject.toml")
    listed = git("ls-tree", "-r", commit, "--", *package, *folders).splitlines()
    paths = [line.split("\t")[1] for line in listed]
    needed = set(paths) if whole else named_by(files, [path for path in paths if is_test(path)])
    found = [
        line
        for line, path in zip(listed, paths, strict=True)
        if not path.endswith(NOT_IN_DIGEST) and (path in needed or not is_test(path))
    ]
    left_out = [f":!{path}" for path in ("docs", *NOT_IN_DIGEST)]
    found.append(git("diff", "HEAD", "--", ".", *left_out))
    found.append(git("ls-files", "--others", "--exclude-standard", "--", ".", *left_out))
    return blake3("\n".join(found).encode()).hexdigest()[:16]


def named_by(files: list[str], tests: list[str]) -> set[str]:
    """Return these test files and those whose names they hold, as an import does, and so on."""
    by_name: dict[str, set[str]] = {}
    for path in tests:
        by_name.setdefault(Path(path).stem, set()).add(path)
    waiting, found = list(files), set(files)
    while waiting:
        text = (ROOT / waiting.pop()).read_text()
        named = [by_name.get(word, set()) for word in re.findall(r"\btest_\w+", text)]
        new = set().union(*named) - found
        found |= new
        waiting += new
    return found


def left_out_of(files: list[str]) -> list[str]:
    """Return the tests of these files that records do."""
    return [name for name in RECORDED if name.partition("::")[0] in files]


def run(files: list[str], output: Path, workers: int) -> list[str]:
    """Run test files; pytest writes what it found to a file. Return the package's modules that were loaded."""
    words = [sys.executable, "-m", "pytest", f"-n{workers}", "--dist=loadfile"]
    words += ["--no-loadscope-reorder", "-m", "full or not full", f"--junitxml={output}"]
    words += [f"--deselect={name}" for name in left_out_of(files)]
    code, modules = watch([*words, *files], {"OMP_WAIT_POLICY": "PASSIVE"})
    if code not in (0, 1):  # stopped, or not collected
        raise SystemExit(code)
    return modules


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


def keep(found: Shard, path: Path, files: list[str], modules: list[str]) -> None:
    """Store what a shard found, of which code, and which tests were left out."""
    record = {
        "digest": digest(files, modules),
        "commit": git("rev-parse", "--short=7", "HEAD"),
        **asdict(found),
        "left_out": left_out_of(files),
        "modules": " ".join(modules),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def kept(path: Path, files: list[str]) -> tuple[Shard, str] | None:
    """Return a stored shard of these files with its commit, if it is of this code and left out no more than today."""
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    commit, modules = record.pop("commit"), record.pop("modules").split()
    left_out = set(record.pop("left_out"))
    if record.pop("digest") != digest(files, modules) or not left_out <= {*RECORDED}:
        return None
    lists = {name: tuple(record[name]) for name in ("failed", "skipped")}
    return Shard(**(record | lists)), commit


def main(words: list[str]) -> int:
    """Run the shards that have no result of this code, and print what all of them found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks full_check")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--only", type=int, nargs="+", help="these shards, from 1 on")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="processes of pytest; 1 for two runs of different shards",
    )
    options = parser.parse_args(words)
    if modified_sources():
        print(f"the sources differ from the commit: {modified_sources()}", file=sys.stderr)
    home, numbers = ROOT / "docs" / "results" / "full", range(1, options.shards + 1)
    paths = {
        home / f"{at}-of-{options.shards}.json": files_of(at, options.shards) for at in numbers
    }
    for at, (path, files) in enumerate(paths.items(), start=1):
        if at in (options.only or numbers) and not kept(path, files):
            print(f"shard {at} of {options.shards}", file=sys.stderr, flush=True)
            output = ROOT / "build" / "full" / f"{path.stem}.xml"
            before = git("rev-parse", "HEAD")
            modules = run(files, output, options.workers)
            if digest(files, modules, before) == digest(files, modules):
                keep(read_junit(output), path, files, modules)
            else:
                print(f"shard {at}: its sources changed while it ran; not kept", file=sys.stderr)
    found = [shard for path, files in paths.items() if (shard := kept(path, files))]
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
    missing = [name for name in sorted({*RECORDED.values()}) if not is_good(name)]
    print(
        f"{len(RECORDED)} tests by records; not of these sources, or not good: {', '.join(missing) or 'none'}"
    )
    if failed or not passed or missing:
        return 1
    return 2 if len(shards) < len(paths) and not options.only else 0


def is_good(name: str) -> bool:
    """Return whether a record is of these sources, and its command ended with 0."""
    return is_current(name) and "exit" not in json.loads((RECORDS / f"{name}.json").read_text())
