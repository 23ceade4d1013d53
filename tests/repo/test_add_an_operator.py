"""docs/how-to/add-an-operator.md works: its blocks alone add `isobit.square_sum`, in at most six files.

1. The operator computes: public name, shapes, gradient, rows that do not depend on the batch.
2. Its contract is judged, and kept; every planted kernel is caught.
3. A portable executor whose order depends on the batch breaks the contract.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-an-operator.md").read_text()
BLOCKS = re.findall(r'```\w+ title="(\S+)( \(add\))?"\n(.*?)```', PAGE, re.DOTALL)
CONTRACT = "square-sum-kernel-v1"
PROGRAM = """
import torch
import isobit

torch.manual_seed(0)
x = torch.randn(40, 600)
y = isobit.square_sum(x)
assert y.shape == (40,) and "square_sum" in dir(isobit)
assert all(isobit.bits.equal(y[i : i + 1], isobit.square_sum(x[i : i + 1])) for i in range(40))
torch.testing.assert_close(y, x.double().square().sum(-1).float())
wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(isobit.square_sum, wide)
compiled = torch.compile(isobit.square_sum, fullgraph=True, backend="aot_eager")
assert isobit.bits.equal(compiled(x), y)
try:
    torch.func.vmap(isobit.square_sum)(x)
except isobit.UnsupportedError:
    print("ok")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package and of the reference, with the page's blocks applied."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "isobit", folder / "src" / "isobit", ignore=ignored)
    shutil.copytree(ROOT / "docs" / "reference", folder / "docs" / "reference")
    for name, added, text in BLOCKS:
        path = folder / name
        assert path.exists() == bool(added), name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() + "\n" if added else "") + text)
    return folder


def run(copy, *words):
    """Run Python on the copy, outside every checkout."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    return subprocess.run(
        [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True
    )


def test_at_most_six_files_are_touched():
    names = [name for name, _, _ in BLOCKS]
    assert len(names) == len(set(names))
    assert 0 < len(names) <= 6
    table = re.findall(r"^\| `(\S+)` \|", PAGE.split("## With a native")[0], re.MULTILINE)
    assert sorted(table) == sorted(names)


def test_the_operator_computes(copy):
    done = run(copy, "-W", "error", "-c", PROGRAM)
    assert done.stdout == "ok\n", done.stderr


def test_the_example_of_its_docstring_is_right(copy):
    code = "import doctest, isobit.ops.square_sum.op as op; assert doctest.testmod(op) == (0, 1)"
    done = run(copy, "-c", code)
    assert done.returncode == 0, done.stderr + done.stdout


def test_the_contract_is_kept_and_every_plant_is_caught(copy):
    done = run(copy, "-m", "isobit", "contract", "lint", "isobit")
    assert done.returncode == 0, done.stdout
    done = run(copy, "-m", "isobit", "verify", CONTRACT, "--level", "L2")
    assert done.returncode == 0, done.stdout + done.stderr
    caught, planted = re.search(r"sabotage caught (\d+) of (\d+)", done.stdout).groups()
    assert caught == planted
    assert int(planted) > 3


def test_a_wrong_executor_breaks_the_contract(copy):
    path = copy / "src" / "isobit" / "ops" / "square_sum" / "portable.py"
    right = path.read_text()
    wrong = right.replace("sum_last(rows * rows)", "(rows * rows).flip(1 if len(rows) > 8 else 0)")
    wrong = wrong.replace("else 0)", "else 0).cumsum(1)[:, -1:]")
    assert wrong != right
    path.write_text(wrong)
    try:
        done = run(copy, "-m", "isobit", "verify", CONTRACT, "--level", "L2")
    finally:
        path.write_text(right)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"BROKEN {CONTRACT}/rows" in done.stdout
