"""A kernel library that does not fit falls back to the portable executor: one warning, same values, doctor says why.

Each case runs a copy of the package, as a wheel would install it, with another library in the place of `_native.so`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import isobit
from isobit.foundation import native
from isobit.ops import dispatch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler to plant a library"),
]

CALLS = """
import contextlib, ctypes, io, json, sys, warnings
for path in sys.argv[1:]:
    ctypes.CDLL(path)
import torch, isobit
from isobit.cli.main import main
from isobit import errors
from isobit.foundation import native
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.arange(24, dtype=torch.float32).reshape(2, 12) / 7
    for _ in range(2):
        bits = [isobit.linear(x, x[:1]).tolist(), isobit.softmax(x).tolist()]
    with contextlib.redirect_stdout(io.StringIO()) as doctor:
        code = main(["doctor"])
said = [str(w.message) for w in caught if w.category is errors.PortableWarning]
try:
    torch.ops.isobit.linear(x, x[:1], None, None, None)
    direct = "served"
except Exception as error:
    direct = str(error)
runtimes = len(native.openmp_files())
found = {"bits": bits, "warnings": said, "runtimes": runtimes, "direct": direct, "code": code}
print(json.dumps(found | {"doctor": " ".join(doctor.getvalue().split())}))
"""


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, without its library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_native.json")
    shutil.copytree(ROOT / "src" / "isobit", tmp_path / "isobit", ignore=ignored)
    return tmp_path / "isobit"


def call(package, *loaded_before):
    """Call operators and the doctor with the copy of the package, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *map(str, loaded_before)],
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def expected_bits():
    x = torch.arange(24, dtype=torch.float32).reshape(2, 12) / 7
    return [isobit.linear(x, x[:1]).tolist(), isobit.softmax(x).tolist()]


def compile_library(target, *sources, flags=()):
    lib = Path(torch.__file__).parent / "lib"
    subprocess.run(
        ["g++", "-shared", "-fPIC", *map(str, sources), f"-L{lib}", *flags, "-o", str(target)],
        check=True,
    )


def assert_falls_back(package, *reasons, code):
    found = call(package)
    assert found["bits"] == expected_bits()
    assert len(found["warnings"]) == 1
    assert found["direct"] != "served"
    assert found["code"] == code
    assert "portable" in found["doctor"]
    for words in (*reasons, "remedy: "):
        assert words in found["warnings"][0]
        # The doctor breaks long lines at its width.
        assert words.replace(" ", "") in found["doctor"].replace(" ", "")
    return found


def test_missing_symbol(installed, tmp_path):
    source = tmp_path / "planted.cpp"
    source.write_text("void symbol_of_another_torch(); void call() { symbol_of_another_torch(); }")
    compile_library(installed / "_native.so", source)
    reason = f"built, but not loadable under torch {torch.__version__}"
    assert_falls_back(installed, reason, "symbol_of_another_torch", code=2)


def test_missing_operator_does_not_attest(installed):
    """The library loads, but one operator has another name: not one kernel may serve."""
    contents = (native.FOLDER / "_native.so").read_bytes()
    assert contents.count(b"softmax(Tensor x") >= 1
    changed = contents.replace(b"softmax(Tensor x", b"softmox(Tensor x")
    (installed / "_native.so").write_bytes(changed)
    found = assert_falls_back(installed, "could not be compared", "softmax", code=1)
    assert "attested" in found["direct"]


def test_second_openmp_runtime_is_refused(installed):
    """Kernels with a runtime of their own are refused by its name, though every symbol is found."""
    own = Path(installed / "libown.cpp")
    own.write_text(
        'extern "C" { static int n = 3; int omp_get_max_threads() { return n; }\n'
        "void omp_set_num_threads(int count) { n = count; } }"
    )
    flags = ("-Wl,-Bsymbolic", "-ltorch_cpu", "-lc10")
    compile_library(installed / "_native.so", ROOT / "csrc/openmp.cpp", own, flags=flags)
    reason = "bound to another OpenMP runtime than torch: the kernels to"
    assert_falls_back(installed, reason, "isobit/_native.so, torch to", "libgomp", code=2)


def test_a_runtime_of_another_package_does_no_harm(installed, tmp_path):
    """As of NumPy or scikit-learn: loaded, but neither torch nor the kernels are bound to it."""
    shutil.copy(native.FOLDER / "_native.so", installed / "_native.so")
    found = [Path(p) for p in native.openmp_files() if "gomp" in p]
    assert found
    other = tmp_path / "libgomp-other.so.1"
    other.write_bytes(found[0].read_bytes().replace(b"libgomp.so.1", b"libgomq.so.1"))
    result = call(installed, other)
    assert result["runtimes"] == 2
    assert (result["warnings"], result["code"], result["direct"]) == ([], 0, "served")
    assert result["bits"] == expected_bits()
