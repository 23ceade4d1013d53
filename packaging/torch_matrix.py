"""Try one wheel under several versions of torch and Python: does it load, attest and pass the golden digests?

Usage:
    python packaging/torch_matrix.py dist/isobit-*.whl [--versions 2.13.0 2.14.1 2.15.0] [--pythons python3.13 …]
                                     [--venvs FOLDER] [--page FILE]

This Python runs all versions of torch, and the other Pythons the first of them. Makes a venv for each in a temporary
folder and removes it afterwards. A torch with CUDA takes 5.5 GB and minutes. `--venvs` keeps them in a folder, named by
the versions of Python and torch; one that is there already gets only the wheel. `--page` writes the table as Markdown,
with the commit, the date and the machine. Exits with 1 if a version fails.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
BESIDE = ("numpy", "blake3", "pyyaml", "rich", "pytest", "hypothesis")
SPACE = 8e9  # bytes that a venv with CUDA needs while it is installed


@dataclass
class Row:
    """What one version of torch did with the wheel."""

    torch: str
    python: str
    executor: str = "not run"
    orders: str = ""
    golden: str = ""
    seconds: float = 0.0
    good: bool = False

    def cells(self) -> list[str]:
        seconds = f"{self.seconds:.0f} s"
        return [self.torch, self.python, self.executor, self.orders, self.golden, seconds]


def run(*words: object, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed."""
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def installed(version: str, interpreter: str, venvs: Path, env: dict[str, str]) -> Path | str:
    """Return the Python of a venv with a version of torch, made if it is not there, or why there is none."""
    asked = run(
        interpreter, "-c", "import platform as p; print(p.python_version())", cwd=venvs, env=env
    )
    folder = venvs / f"python{asked.stdout.strip()}-torch{version}"
    python = folder / "bin" / "python"
    if python.exists():  # this fails if the installation was interrupted
        asking = (
            f"from importlib.metadata import version as v; print(*map(v, {('torch', *BESIDE)}))"
        )
        found = run(python, "-c", asking, cwd=venvs, env=env).stdout.split(" ")[0]
        if version in (found, found.split("+")[0]):
            return python
    if shutil.disk_usage(venvs).free < SPACE:
        return f"less than {SPACE / 1e9:.0f} GB free"
    print(f"{folder.name}: installing, minutes", flush=True)
    for words in (
        (interpreter, "-m", "venv", "--clear", folder),
        (python, "-m", "pip", "install", "-q", f"torch=={version}", *BESIDE),
    ):
        done = run(*words, cwd=venvs, env=env)
        if done.returncode != 0:
            return last_line(done.stderr)
    return python


def last_line(text: str) -> str:
    """Return the last line that a command printed."""
    return (text.strip().splitlines() or ["no output"])[-1]


def try_version(version: str, interpreter: str, wheel: Path, venvs: Path) -> Row:
    """Install the wheel in a venv with a version of torch, then run the doctor and the golden tests with them."""
    row, start = Row(version, Path(interpreter).name), time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        python = installed(version, interpreter, venvs, environment)
    except OSError as error:  # no such interpreter
        python = str(error)
    if isinstance(python, str):
        row.executor = f"not run: {python}"
        return row
    install = (python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel)
    done = run(*install, cwd=venvs, env=environment)
    if done.returncode != 0:
        row.executor = f"not run: {last_line(done.stderr)}"
        return row
    doctor = run(python.with_name("isobit"), "doctor", "--json", cwd=venvs, env=environment)
    if not doctor.stdout.startswith("{"):
        row.executor = f"doctor failed: {last_line(doctor.stderr)}"
        return row
    record = json.loads(doctor.stdout)
    row.torch, row.executor = record["machine"]["torch"], record["executor"]
    row.python = record["machine"]["python"]
    row.orders = "; ".join(
        f"{a['dtype']} {a['detail']}" for a in record["attestations"]
    ) or str(record["native_missing"])  # fmt: skip
    words = (python, "-m", "pytest", "-p", "no:cacheprovider", "tests/golden")
    golden = run(*words, cwd=ROOT, env=environment)
    row.golden = re.sub(r" in [\d.]+s.*", "", golden.stdout.strip().splitlines()[-1])
    row.good = row.executor == "native" and doctor.returncode == golden.returncode == 0
    row.seconds = time.monotonic() - start
    return row


def page(rows: list[Row], wheel: Path, machine: str) -> str:
    """Return the Markdown page."""
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT, env=dict(os.environ)).stdout
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    names = (
        "torch",
        "Python",
        "executor",
        "orders attested",
        "tests/golden",
        "time",
    )
    table = [names, ["---"] * len(names), *(row.cells() for row in rows)]
    return "\n".join(
        [
            "# One wheel under several versions of torch and Python",
            "",
            "Written by `python packaging/torch_matrix.py WHEEL --page docs/results/torch-versions.md`",
            f"with the same wheel in each row, `{wheel.name}`",
            f"({wheel.stat().st_size / 1e6:.1f} MB).",
            f"Commit {commit.strip()}, {today}, {machine}.",
            f"SHA-256 of the kernels: `{library_digest(wheel)}`.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
            "",
            "A torch that is not listed is not refused: the kernels are attested when they are loaded,",
            "and the portable executor serves with one warning where that fails.",
            "",
        ]
    )


def library_digest(wheel: Path) -> str:
    """Return the SHA-256 of the native library in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return hashlib.sha256(archive.read("isobit/_native.so")).hexdigest()


def processor() -> str:
    """Return the processor's name and the number of cores."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"{found.group(1) if found else 'unknown processor'}, {os.cpu_count()} cores"


def main() -> int:
    """Try every version and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--pythons", nargs="+", default=[], help="programs such as python3.13")
    parser.add_argument("--venvs", type=Path, help="keep the venvs in this folder")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.venvs:
        options.venvs.mkdir(parents=True, exist_ok=True)
    wheel, rows = options.wheel.resolve(), []
    trials = [(version, sys.executable) for version in options.versions]
    trials += [(options.versions[0], name) for name in options.pythons]
    for version, name in trials:
        print(f"torch {version}, {Path(name).name}", flush=True)
        with ExitStack() as stack:
            folder = options.venvs or stack.enter_context(tempfile.TemporaryDirectory())
            rows.append(try_version(version, name, wheel, Path(folder).resolve()))
        print(" | ".join(rows[-1].cells()), flush=True)
        if options.page:  # after each row, so that an interrupted run leaves what it found
            options.page.parent.mkdir(parents=True, exist_ok=True)
            options.page.write_text(page(rows, wheel, processor()))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
