"""Layers import downward only, never sideways: also inside functions and under TYPE_CHECKING."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "isobit"

# Low to high; a module may import what stands before it, and its own package.
LAYERS = [
    "errors",
    "plain_text",
    "records",
    "files",
    "trusted_folder",
    "bits",
    "native",
    "processor",
    "machine",
    "isolation",
    "order",
    "simulator",
    "targets",
    "ops",
    "nn",
    "optim",
    "parallel",
    "adapters",
    "guards",
    "chain",
    "curve",
    "contracts",
    "report",
    "cli",
    "pytest_plugin",
]
FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "isobit"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downward(path):
    here = path.relative_to(SOURCE).with_suffix("").parts[0]
    if here in ("__init__", "__main__"):
        return
    rank = LAYERS.index(here)
    for name in imports_of(path):
        layer = layer_of(name)
        if layer not in LAYERS:  # the package's own surface, which nn and above may use
            assert rank > LAYERS.index("nn"), f"{path.name} imports {name}"
            continue
        assert layer == here or LAYERS.index(layer) < rank, f"{path.name} imports {name}"


def test_only_gates_and_commands_know_of_the_simulator():
    """It is a test backend: what trains must not, or it could train otherwise there."""
    knowing = {
        path.relative_to(SOURCE).parts[0]
        for path in FILES
        if path.name != "__init__.py"
        and "simulator" in {layer_of(name) for name in imports_of(path)}
    }
    assert knowing == {"simulator", "curve", "cli"}


def test_order_is_plain_python():
    for path in (SOURCE / "order").glob("*.py"):
        assert "torch" not in path.read_text().replace("torch.distributed", ""), path.name


def test_reports_draw_and_compute_nothing():
    for path in (SOURCE / "report").glob("*.py"):
        assert "import torch" not in path.read_text(), path.name
        assert {layer_of(name) for name in imports_of(path)} <= {
            "order",
            "plain_text",
            "records",
            "report",
        }, path.name


def test_commands_that_only_read_import_neither_torch_nor_what_contracts_name(tmp_path):
    code = (
        "import sys; from isobit.cli.main import main; "
        f"[main([*words, '--evidence', {str(tmp_path)!r}]) for words in (['status', 'isobit'], ['graph', 'isobit'], "
        "['lint', 'isobit'], "
        "['explain', 'softmax-kernel-v1'])]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


def test_the_check_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from isobit.cli import main\n")
    assert imports_of(bad) == {"isobit.cli.main"}
