"""Inside contracts, language knows nothing of the other folders, store only language, judge only these two."""

import ast
from pathlib import Path

import pytest

from isobit import contracts

ROOT = Path(contracts.__file__).parent
# Folder or module -> what it may import from isobit.contracts, besides itself.
ALLOWED = {
    "language": "",
    "options": "",
    "store": "language",
    "judge": "language store options",
    "authoring": "language store",
    "workspace": "judge store options",
    "report": "",
    "pytest_items": "judge language options store workspace",
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = (name.split(".") for name in found if name.startswith("isobit.contracts."))
    return {name[2] for name in names}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_are_allowed(part):
    files = [*ROOT.glob(f"{part}.py"), *ROOT.glob(f"{part}/**/*.py")]
    assert files
    for path in files:
        assert imported(path) <= {part, *ALLOWED[part].split()}, path.name


def test_every_part_is_listed():
    parts = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} == set(ALLOWED)
