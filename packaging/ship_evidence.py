"""Judge isobit's contracts on this machine and write the evidence that the wheel ships.

Usage:
    python packaging/ship_evidence.py           judge what has changed (13 minutes for all), then write
    python packaging/ship_evidence.py --sign KEY   the same, signed: for a release
    python packaging/ship_evidence.py --check   print whether the file matches the code; exit 1 if it does not

Writes src/isobit/library/evidence.json. Commit the code first: the file names the commit. Evidence is kept in
build/evidence, so a second run takes a second.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from isobit.contracts.store.evidence import read_private
from isobit.contracts.store.shipped import FILE, Origin, ShippedEvidence, export, own_entries
from isobit.contracts.store.sources import installed_version
from isobit.contracts.store.tree import Tree, library
from isobit.contracts.workspace import Workspace
from isobit.foundation.processor import cpu_name

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "evidence"


def commit() -> str:
    """Return the commit, marked if tracked files differ from it; the file that is written here does not count."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    own = f":!{FILE.relative_to(ROOT)}"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", own)
    return git("rev-parse", "--short", "HEAD") + ("-modified" if changed else "")


def write(key: str | None) -> int:
    """Judge, and write what was found; return 0 if every contract is kept and in the file."""
    if ROOT not in FILE.parents:
        print(f"expected isobit of this checkout, received {FILE.parent}; remedy: ./setup_dev")
        return 2
    words = [sys.executable, "-m", "isobit", "verify", "isobit", "--evidence", str(HOME)]
    judged = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"}, check=False)
    workspace = Workspace([library()], HOME)
    origin = Origin(
        cpu=cpu_name(),
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        torch=installed_version("torch"),
        python=platform.python_version(),
    )
    signer = read_private(key) if key else None
    missing = export(workspace.tree, workspace.evidence, origin, signer=signer)
    if missing:
        print(f"no evidence of {', '.join(missing)}", file=sys.stderr)
    return judged.returncode or check()


def check() -> int:
    """Print how many contracts have shipped evidence for the present code; return 1 if one has none."""
    with tempfile.TemporaryDirectory() as empty:
        tree = Tree([library()], Path(empty))
    shipped = ShippedEvidence(tree)
    entries = list(own_entries(tree))
    current = [entry.id for entry in entries if shipped.status_of(entry)]
    if len(current) == len(entries):
        print(f"shipped evidence is current: {len(current)} of {len(entries)} contracts")
        return 0
    stale = len(entries) - len(current)
    absent = f"{FILE.name} has no others" if FILE.exists() else f"there is no {FILE.name}"
    why = "; ".join(sorted(set(shipped.stale.values()))) or absent
    print(f"shipped evidence is stale: {stale} of {len(entries)} contracts ({why})")
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="judge nothing and write nothing")
    parser.add_argument("--sign", metavar="KEY", help="a file with an Ed25519 private key")
    options = parser.parse_args()
    sys.exit(check() if options.check else write(options.sign))
