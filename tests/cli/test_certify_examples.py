"""The kernels of examples/certify have the verdicts that their table states; a quick run and, in full, all of it."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "certify"

sys.path.insert(0, str(FOLDER))
try:
    import verdicts
finally:
    sys.path.pop(0)

# Of each kind one: a kernel with tensor cores, a sum that follows the warps, atomics. The others run in full.
QUICK = (
    "matmul.py:split_k_by_rows",
    "matmul.py:matmul_atomic",
    "softmax.py:warps_by_rows",
    "layer_norm.py:layer_norm",
    "rms_norm.py:tile_by_rows",
    "cross_entropy.py:cross_entropy",
)
CASES = [
    pytest.param(one, marks=[pytest.mark.full] * (one.function not in QUICK), id=one.function)
    for one in verdicts.EXAMPLES
]


@pytest.mark.parametrize("example", CASES)
@pytest.mark.sweep(2)
def test_verdicts(example):
    found = verdicts.certify(example, quick=True)
    assert found.exit_code == example.exit_code, str(found)
    assert found.names > 0 or example.exit_code == 1


@pytest.mark.full
@pytest.mark.parametrize("example", verdicts.EXAMPLES, ids=lambda one: one.function)
def test_the_table_is_what_the_whole_runs_print(example):
    line, found = verdicts.row(example)
    assert line in (FOLDER / "README.md").read_text()
    assert all(target.outcomes for target in found.targets)


def test_the_table_has_every_example():
    table = (FOLDER / "README.md").read_text().split(verdicts.MARKS[0])[1]
    rows = re.findall(r"^\| `(\S+)[^`]*` \|.*\| (\d) \|", table, re.MULTILINE)
    assert rows == [(one.function, str(one.exit_code)) for one in verdicts.EXAMPLES]


def test_every_function_of_a_file_that_is_certified_is_named_in_its_header():
    for one in verdicts.EXAMPLES:
        file = one.function.partition(":")[0]
        header = (FOLDER / file).read_text().split('"""')[1]
        assert f"examples/certify/{one.function}" in header, one.function
