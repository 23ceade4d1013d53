"""Notes which modules of isobit a process loads: Python runs this file where its folder is on PYTHONPATH.

Records are decided by these (benchmarks/records.py). Names are written at once, so that processes may end in any way.
"""

import os
import sys


class Noting:
    """Asked for every module before Python's own finders; finds none itself."""

    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "isobit":
            with open(self.path, "a") as file:
                file.write(name + "\n")


class Finders(list):
    """Finders of which the first stays first: pytest inserts one that finds modules of isobit itself."""

    def insert(self, at, finder):
        super().insert(max(at, 1), finder)


if "ISOBIT_MODULES_LOADED" in os.environ:
    sys.meta_path = Finders([Noting(os.environ["ISOBIT_MODULES_LOADED"]), *sys.meta_path])
