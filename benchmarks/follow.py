"""`python -m benchmarks follow`: run every Python block of README and docs with another Python, cold.

Each block is a process of its own in an empty folder, as for a reader who installed a wheel and pastes it.
Prints a line per page with the number of blocks and seconds, and what failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXPECTED = re.compile(r"^ *print\(.*\)\s+# (.+)$", re.MULTILINE)


def main(words: list[str]) -> int:
    """Return 1 if a block fails or prints something else than its comments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks follow")
    parser.add_argument("--python", default=sys.executable, help="of the venv to try")
    parser.add_argument("pages", nargs="*", type=Path, help="default: README.md and docs")
    options = parser.parse_args(words)
    pages = options.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    failed = 0
    for page in pages:
        blocks = FENCE.findall(page.read_text())
        begun = time.perf_counter()
        problems = [found for block in blocks if (found := run_block(options.python, block))]
        failed += len(problems)
        if blocks:
            seconds = time.perf_counter() - begun
            kept = len(blocks) - len(problems)
            sys.stdout.write(f"{page.name}: {kept} of {len(blocks)} blocks, {seconds:.0f} s\n")
        sys.stdout.writelines(f"  {problem}\n" for problem in problems)
    return int(bool(failed))


def run_block(python: str, block: str) -> str:
    """Return why a block failed, or an empty string."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "block.py"
        path.write_text(block)
        run = [python, "-W", "ignore", path.name]
        done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    wanted = EXPECTED.findall(block)
    printed = done.stdout.splitlines()[: len(wanted)]
    return "" if printed == wanted else f"expected {wanted}, received {printed}"
