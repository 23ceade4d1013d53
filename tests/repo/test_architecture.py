"""The tables of ARCHITECTURE.md are true: *command → function → room → contract*, and where to change what."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from isobit.cli.main import COMMANDS
from isobit.contracts.store.tree import Tree, library

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isobit"


def rows():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    shown = text.partition("<!-- commands -->")[2].partition("<!-- /commands -->")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in shown.split("\n")[3:-1]
    ]


ROWS = {command: rest for command, *rest in rows()}


def test_every_command_has_a_row():
    assert tuple(ROWS) == COMMANDS


def imported(path):
    """What a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name, room):
    return f"{name}.".startswith(f"isobit.{room.replace('/', '.')}.")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_row_names_the_room_that_the_command_uses(command):
    function, room, _ = ROWS[command]
    assert (SOURCE / room).is_dir()
    file = SOURCE / "cli" / f"{command.replace(' ', '/')}.py"
    names = set(imported(file))
    if any(name.startswith("isobit.cli.contract_options.") for name in names):
        names |= set(imported(SOURCE / "cli" / "contract_options.py"))
    assert any(is_below(name, room) for name in names), f"{file.name} imports nothing of {room}"
    if function != "-":
        package, _, public = function.rpartition(".")
        module = import_module(package)
        assert public in module.__all__
        assert is_below(getattr(module, public).__module__, room), function


def test_contracts_of_rows_exist(tmp_path):
    known = set(Tree([library()], tmp_path).entries)
    named = {cell for _, _, cell in ROWS.values()} - {"-", "all"}
    assert len(named) > 3
    for cell in named:
        assert re.match(r"[\w-]+", cell)[0] in known, cell


def test_places_to_change_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("## Where to change")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", table)
    assert len(named) > 10
    for path in named:
        assert (SOURCE / path).exists() or (ROOT / path).exists(), path
    checks = (SOURCE / "guards" / "trial_run" / "checks.py").read_text()
    assert "\nCHECKS: " in checks


def test_commands_hold_options_and_printing():
    """One file per command, no folder of options, and nothing that loads torch at the top of a file."""
    files = {path.relative_to(SOURCE / "cli").with_suffix("") for path in SOURCE.glob("cli/*/*.py")}
    files |= {path.relative_to(SOURCE / "cli").with_suffix("") for path in SOURCE.glob("cli/*.py")}
    shared = {"main", "terminal", "console", "progress", "provenance", "arguments"}
    shared |= {"contract_options", "named_code", "named_model", "__init__"}
    own = {"/".join(path.parts) for path in files if path.name not in shared}
    assert own == {command.replace(" ", "/") for command in COMMANDS}
