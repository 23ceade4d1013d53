"""Each room imports only the rooms that the dictionary gives it: also inside functions and under TYPE_CHECKING.

The dictionary is printed in ARCHITECTURE.md between the `layers` markers, and no module is part of an import circle.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isobit"

# The room "foundation" is the folder of that name, and the two public modules that everything uses.
FOUNDATION = "foundation errors bits"
# room -> the rooms that it may import, besides itself.
LAYERS = {
    "foundation": "",
    "order": "foundation",
    "report": "foundation",
    "reveal": "foundation order report",
    "ops": "foundation order reveal",
    "nn": "foundation order ops",
    "optim": "foundation ops",
    "sampling": "foundation ops",
    "calibration": "foundation order ops",
    "simulator": "foundation order report",
    "comparing": "foundation report simulator",
    "profiling": "foundation contracts report",
    "parallel": "foundation order ops optim",
    "guards": "foundation parallel report simulator",
    "integrations": "foundation order ops nn parallel guards sampling comparing",
    "gates": "foundation order ops nn optim sampling parallel guards integrations simulator comparing report",
    "contracts": "foundation order reveal report",
    "certifying": "foundation order reveal report",
    "auditing": "foundation order reveal ops parallel integrations simulator comparing report",
    "library": "foundation order reveal ops nn optim parallel guards integrations gates contracts auditing "
    "certifying profiling",
    "diagnosing": "foundation guards profiling simulator",
    "pytest_plugin": "contracts auditing",
    "cli": "foundation order reveal ops simulator comparing profiling guards diagnosing integrations gates contracts "
    "certifying auditing library report",
}
# operator -> the operator that it is built on
BUILT_ON = {
    ("experts", "embedding"),
    ("experts", "linear"),
    ("experts", "softmax"),
    ("logprob", "linear"),
    ("logprob", "exact_sum"),
    ("logprob", "log_softmax"),
    ("log_softmax", "softmax"),
    ("select_rows", "embedding"),
    ("distillation", "linear"),
    ("distillation", "logprob"),
    ("distillation", "exact_sum"),
}
FILES = sorted(SOURCE.rglob("*.py"))


def allowed(room: str) -> list[str]:
    """The rooms that a room may import."""
    return LAYERS[room].split()


def layer_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else ""
    return "foundation" if first in FOUNDATION.split() else first


def all_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_by_name(path: Path) -> set[str]:
    """The modules that a file imports by `import_module("...")`."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        and isinstance(node.args[0], ast.Constant)
    }


@functools.cache
def imports_of(path: Path) -> set[str]:
    """The modules and names of isobit that a file imports, wherever in it."""
    return {
        n for n in all_imports(path) if n.split(".")[0] == "isobit" and n != "isobit.__version__"
    }


def test_imports_are_allowed():
    wrong = []
    for path in FILES:
        here = layer_of(".".join(("isobit", *path.relative_to(SOURCE).with_suffix("").parts)))
        if here not in (
            "__init__",
            "__main__",
            "rollout",
            "parts",
        ):  # isobit.rollout and isobit.parts only list public names
            permitted = (here, *allowed(here))
            names = [name for name in imports_of(path) if layer_of(name) not in permitted]
            wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in names]
    assert len(FILES) > 100
    assert wrong == []


def test_layers_have_no_circle():
    """A dictionary could allow what a total order forbids."""
    order = graphlib.TopologicalSorter({layer: allowed(layer) for layer in LAYERS})
    assert set(order.static_order()) == set(LAYERS)


def module_graph() -> dict[str, set[str]]:
    """Every module and the modules of isobit that it imports, wherever in the file it does so."""
    modules = {}
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(("isobit", *(p for p in parts if p != "__init__")))] = path
    graph = {}
    for module, path in modules.items():
        names = imports_of(path) | imports_by_name(path)
        found = {n if n in modules else n.rpartition(".")[0] for n in names}
        graph[module] = (found & set(modules)) - {module}
    return graph


def test_modules_have_no_circle():
    graphlib.TopologicalSorter(module_graph()).prepare()  # raises CycleError with the circle


def test_architecture_prints_the_table():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    shown = text.partition("<!-- layers -->")[2].partition("<!-- /layers -->")[0]
    rows = "\n".join(f"| {room} | {names or '-'} |" for room, names in LAYERS.items())
    table = f"\n| room | may import |\n| --- | --- |\n{rows}\n"
    assert shown == table, "paste this between the markers:\n" + table


def test_only_gates_and_commands_know_of_the_simulator():
    """It is a test backend: what trains must not, or it could train otherwise there."""
    knowing = {
        path.relative_to(SOURCE)
        for path in FILES
        if path.name != "__init__.py"
        and "simulator" in {layer_of(name) for name in imports_of(path)}
    }
    knowing.remove(Path("guards/trial_run/ranks.py"))  # `isobit preflight --ranks`
    knowing.remove(Path("comparing/runs/observed_run.py"))  # `isobit compare runs --device`
    assert {path.parts[0] for path in knowing} <= {
        "simulator",
        "gates",
        "auditing",
        "diagnosing",
        "cli",
    }


SAME_NAME = ("portable", "loss", "merged", "triton")


@pytest.mark.parametrize(
    "path",
    [p for p in (SOURCE / "ops").glob("*/*.py") if (p.parent / "op.py").exists()],
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_operators_share_code_through_portable(path):
    """An operator imports its own folder, ops/portable, ops/gpu and ops/*.py; of others only what it is built on.

    The one thing that another operator may offer is its op.py: linear_logprob is built on linear, the loss on
    exact_sum, and log_softmax registers itself as softmax does. A file that is in SAME_NAME
    may use the other's file of the same name.
    """
    offered = {"op", path.stem} if path.stem in SAME_NAME else {"op"}
    shared = {p.stem for p in (SOURCE / "ops").glob("*.py")} | {"portable", "gpu", path.parent.name}
    for name in imports_of(path):
        parts = name.split(".")
        if parts[1] == "ops" and parts[2] not in shared:
            assert parts[3] in offered, f"{path.name} imports {name}"
            assert (path.parent.name, parts[2]) in BUILT_ON, f"{path.name} imports {name}"


def test_order_is_plain_python():
    """The definition imports neither torch nor anything above it; examples in docstrings may."""
    for path in (SOURCE / "order").glob("*.py"):
        assert "torch" not in {name.split(".")[0] for name in all_imports(path)}, path.name


def test_reports_and_records_need_no_torch():
    """They are written by processes that have no reason to load it, and read by people who may not have it."""
    names = ("records.py", "page.py", "picture.py", "report.py")
    found = [p for p in FILES if "report" in p.parts or p.name in names]
    modules = [".".join(p.relative_to(SOURCE.parent).with_suffix("").parts) for p in found]
    assert len(modules) > 30
    code = (
        "import sys; from importlib import import_module; [import_module(m) for m in sys.argv[1:]]"
    )
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *modules], check=True)


def test_commands_that_only_read_import_neither_torch_nor_what_contracts_name(tmp_path):
    code = (
        "import sys; from isobit.cli.main import main; "
        f"[main(['contract', *words, '--evidence', {str(tmp_path)!r}]) for words in "
        "(['status', 'isobit'], ['graph', 'isobit'], ['lint', 'isobit'], "
        "['explain', 'softmax-kernel-v1'])]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


def test_the_check_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    from isobit.cli import main\n    import_module('isobit.cli.audit')\n"
    )
    assert imports_of(bad) == {"isobit.cli.main"}
    assert imports_by_name(bad) == {"isobit.cli.audit"}
