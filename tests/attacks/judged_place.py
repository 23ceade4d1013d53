"""A folder with code, a contract for it, and what the code reads: judged by the command, then changed or forged."""

import importlib
import itertools
import sys

from isobit.cli import main
from isobit.contracts.store import sources

PLAIN = """
import os
HERE = os.path.dirname(__file__)
def right(x): return x + 0
def wrong(x): return x * (1 if len(x) < 9 else 1.001)
def by_table(x):
    with open(os.path.join(HERE, "table.txt")) as file:
        return x * float(file.read()) if len(x) > 9 else x
def by_absence(x):
    try:
        open(os.path.join(HERE, "override")).close()
    except FileNotFoundError:
        return x + 0
    return wrong(x)
def keeps_a_cache(x):
    with open(os.path.join(HERE, "cache.txt"), "a+") as file:
        file.write("called")
    return x + 0
"""
ONCE = """
import functools, os
HERE = os.path.dirname(__file__)
def by_table_at_import(x): return x * TABLE if len(x) > 9 else x
def by_table_once(x): return x * table() if len(x) > 9 else x
@functools.lru_cache
def table():
    with open(os.path.join(HERE, "table.txt")) as file:
        return float(file.read())
TABLE = table()
"""
BY_NAME = """
import importlib, os
def by_name(x): return importlib.import_module("{name}_impl").f(x)
def by_builtin(x): return __import__("{name}_impl").f(x)
def by_text(x):
    found = {{}}
    with open(os.path.join(os.path.dirname(__file__), "impl.txt")) as file:
        exec(file.read(), found)
    return found["f"](x)
"""
CONTRACT = """
id: {name}-v1
version: 1.0.0
title: t
subject: {name}:{subject}
obligations: [{{id: O-1, text: it holds}}]
inputs: {{one: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [4, 20], n: [8]}}, rows: rows}}}}
claims: [{{id: c, obligations: [O-1], level: {level}, relation: invariant, under: [batch], inputs: one}}]
"""
PLANTED = ("order by batch", "last row off by one ulp", "order by batch with gradients")
_numbers = itertools.count()


class Place:
    """A folder with a module, a contract for one of its functions, and what they read."""

    def __init__(self, path, subject, level="L2"):
        self.path, self.name = path, f"judged{next(_numbers)}"
        code = next(text for text in (PLAIN, ONCE, BY_NAME) if f"def {subject}(" in text)
        code = code.format(name=self.name) if code is BY_NAME else code
        (path / f"{self.name}.py").write_text(code)
        (path / f"{self.name}_impl.py").write_text("def f(x): return x + 0\n")
        (path / "impl.txt").write_text("def f(x): return x + 0\n")
        (path / "table.txt").write_text("1.0")
        self.contract = path / "c.contract.yaml"
        self.contract.write_text(CONTRACT.format(name=self.name, subject=subject, level=level))

    def verify(self, *words):
        return main.main(["verify", "--trust", self.name, *words])

    def restart(self):
        """As a new process would import."""
        for name in [name for name in sys.modules if name.startswith(self.name)]:
            del sys.modules[name]
        for cached in (sources.find_file, sources.find_package, sources.worked_on, importlib):
            getattr(cached, "cache_clear", importlib.invalidate_caches)()

    def evidence(self):
        return sorted(self.path.glob(".isobit/evidence/*/*.jsonl"))


def places(tmp_path, monkeypatch):
    """Makes places in the current folder of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *given: Place(tmp_path, *given)
