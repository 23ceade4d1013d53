"""Good results of single cases, kept among temporary files until the sources that they depend on change.

A benchmark that was stopped goes on where it was, and two processes share the cases of one.
"""

import json
import tempfile
from pathlib import Path

import torch
from blake3 import blake3

from isobit.foundation.files import write_text

ROOT = Path(__file__).parents[1]
SIMULATOR = (
    "src/isobit/simulator",
    *(f"src/isobit/{name}.py" for name in ("bits", "errors", "foundation/majority")),
)


class Kept:
    """The results of one benchmark.

    Args:
        name: The name of the benchmark.
        sources: Files, and folders of Python files, below the repository.
    """

    def __init__(self, name, sources):
        hasher = blake3(torch.__version__.encode())
        for path in [ROOT / source for source in sources]:
            for file in sorted(path.rglob("*.py")) or [path]:
                hasher.update(file.read_bytes())
        self.folder = Path(tempfile.gettempdir()) / f"isobit-{name}-{hasher.hexdigest()[:16]}"
        self.folder.mkdir(exist_ok=True)

    def result(self, key, compute, good):
        """Return the kept result of a case, or compute it and, if it is good, keep it. It is a value of JSON."""
        path = self.folder / f"{key.replace(' ', '-')}.json"
        if path.exists():
            return json.loads(path.read_text())
        text = json.dumps(compute())
        if good(json.loads(text)):
            write_text(path, text)
        return json.loads(text)
