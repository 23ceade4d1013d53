"""The wheel works in a fresh environment without a compiler, outside the checkout.

The cheap tests build a wheel around the library of the checkout, with a compiler that does not exist: an unchanged
library is never compiled again. The `full` tests compile from the source distribution and run packaging/build_wheel.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isobit.contracts.store.shipped import ShippedEvidence, own_entries
from isobit.contracts.store.tree import Tree, library

ROOT = Path(__file__).parents[2]
NO_COMPILER = {"CXX": "no-such-compiler"}


def run(*words, cwd, **options):
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def build(source, folder, env):
    """Build a wheel in `folder`, and nothing in the source folder."""
    folder.mkdir(parents=True)
    done = run(
        *(sys.executable, "setup.py", "egg_info", "--egg-base", folder),
        *("build", "--build-base", folder / "build"),
        *("bdist_wheel", "--bdist-dir", folder / "unpacked", "--dist-dir", folder / "dist"),
        cwd=source,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next((folder / "dist").glob("*.whl")), done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel") / "work", NO_COMPILER)


def fresh_environment(folder, wheel):
    """Make a venv with the wheel and nothing else; torch and other dependencies are those of this process."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = ("install", "--quiet", "--no-deps", "--no-index", wheel)
    done = run(*pip, *words, cwd=folder.parent, env=clean)
    assert done.returncode == 0, done.stderr
    # A path in a .pth file is searched last, and the .pth files in it (an editable isobit) are not read.
    installed = next((folder / "lib").glob("python*/site-packages"))
    (installed / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def isobit(wheel, tmp_path_factory):
    """Call a program of a fresh environment: in an empty folder, with neither compiler nor checkout in reach."""
    folder = tmp_path_factory.mktemp("fresh")
    programs = fresh_environment(folder / "venv", wheel[0])
    (folder / "empty").mkdir()
    environment = {"PATH": str(programs), "HOME": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}

    def call(program, *words):
        return run(programs / program, *words, cwd=folder / "empty", env=environment)

    return call


def test_nothing_is_compiled_again(wheel):
    path, said = wheel
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        noted = "isobit/native_build_failure.txt"
        assert noted not in names, f"run ./setup_dev first: {archive.read(noted).decode()}"
    assert "_native.so is current: nothing is compiled" in said


def test_one_wheel_for_every_python(wheel):
    assert re.fullmatch(r"isobit-[\d.]+-py3-none-linux_\w+\.whl", wheel[0].name)
    contents = (ROOT / "src/isobit/_native.so").read_bytes()
    assert re.findall(rb"\0(_?Py\w*_\w+)\0", contents) == []  # names of symbols


def test_contents(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    package = ROOT / "src"
    wanted = {str(p.relative_to(package)) for p in (package / "isobit").rglob("*.py")}
    contracts = {str(p.relative_to(package)) for p in (package / "isobit").rglob("*.yaml")}
    stubs = {str(p.relative_to(package)) for p in (package / "isobit").rglob("*.pyi")}
    assert len(contracts) > 20
    assert wanted | contracts | stubs | {"isobit/_native.so", "isobit/py.typed"} <= names
    assert {n for n in names if n.endswith(".py")} == wanted  # none of an earlier build
    fields = Parser().parsestr(metadata)
    assert "torch>=2.13" in fields.get_all("Requires-Dist")
    text = re.sub(r"^```.*?^```$", "", fields.get_payload(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"(?:\]\(|^\[[^\]]+\]: *)([^)\s]+)", text, re.MULTILINE)
    assert [link for link in links if not link.startswith(("https:", "#"))] == []
    assert "Wheels, extras, how to remove" in text  # the words of a link stay


@pytest.mark.full
def test_a_wheel_without_kernels_for_every_platform(tmp_path):
    """As an ARM host of a GPU installs it: operators have the same bits, and the doctor gives the reason."""
    wheel, _ = build(ROOT, tmp_path / "work", {**NO_COMPILER, "ISOBIT_PURE_PYTHON": "1"})
    assert re.fullmatch(r"isobit-[\d.]+-py3-none-any\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not names & {"isobit/_native.so", "isobit/_native.json"}
    package = ROOT / "src"
    assert {str(p.relative_to(package)) for p in (package / "isobit").rglob("*.py")} <= names
    assert "isobit/ops/linear/triton.py" in names
    programs = fresh_environment(tmp_path / "venv", wheel)
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "OMP_WAIT_POLICY": "PASSIVE"}
    done = run(programs / "isobit", "doctor", cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    assert "pure Python" in done.stdout
    assert "GPUs have their own kernels" in " ".join(done.stdout.split())
    code = "import torch, isobit; x = torch.arange(8.0).reshape(2, 4); print(isobit.linear(x, x).tolist())"
    done = run(programs / "python", "-W", "ignore", "-c", code, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["[[14.0,", "38.0],", "[38.0,", "126.0]]"], done.stderr


def test_no_path_of_the_build_machine(wheel):
    contents = (ROOT / "src/isobit/_native.so").read_bytes()
    assert str(ROOT).encode() not in contents
    assert str(Path(torch.__file__).parents[1]).encode() not in contents


def test_kernels_serve_in_a_fresh_environment(isobit):
    done = isobit("isobit", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept") == 3
    where = isobit("python", "-c", "import isobit; print(isobit.__file__)")
    assert "venv" in where.stdout


def test_contracts_and_shipped_evidence_in_a_fresh_environment(isobit, tmp_path):
    """Nothing was judged there; what is shipped is valid for the installed files as for those of the checkout."""
    done = isobit("isobit", "contract", "status", "isobit", "--json")
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)["contracts"]
    assert {c["verdict"] for c in found} == {"not-judged"}
    tree = Tree([library()], tmp_path)
    shipped = ShippedEvidence(tree)
    expected = {entry.id: bool(shipped.status_of(entry)) for entry in own_entries(tree)}
    assert {c["id"]: bool(c["shipped"]) for c in found} == expected


def test_first_block_of_the_readme_runs_in_a_fresh_environment(isobit):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = isobit("python", "-c", block.group(1))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.full
def test_source_distribution_builds_the_same_library(tmp_path):
    """Compiled in another folder, without any object kept: the same bytes, so evidence of the library counts."""
    done = run(
        *(sys.executable, "setup.py", "egg_info", "--egg-base", tmp_path),
        *("sdist", "--dist-dir", tmp_path),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked")
    source = next((tmp_path / "unpacked").iterdir())
    path, said = build(source, tmp_path / "work", {})
    assert "isobit: [1/" in said
    with zipfile.ZipFile(path) as archive:
        assert archive.read("isobit/_native.so") == (ROOT / "src/isobit/_native.so").read_bytes()


@pytest.mark.full
def test_release_wheel():
    done = run(ROOT / "packaging/build_wheel", sys.executable, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"isobit-[\d.]+-py3-none-manylinux_2_28_x86_64\.whl: [\d.]+ MB", done.stdout)


@pytest.fixture
def setup_module(monkeypatch):
    """setup.py as a module: nothing is built."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py"), run_name="setup"))


def test_the_time_left_follows_the_files_that_are_finished(setup_module):
    left = setup_module.time_left
    assert left(10, 50, [], 100) == 10  # half of the bytes took ten seconds
    assert (
        left(112, 10, [10, 10], 100) == 112 * 80 / 20
    )  # not what was estimated before the first file
    assert left(60, 0, [40], 40) == 60
    assert left(10, 100, [], 100) == 0


def test_compiling_prints_a_line_per_minute_and_per_file(
    setup_module, tmp_path, capsys, monkeypatch
):
    for name in ("large", "small"):
        (tmp_path / f"{name}.cpp").write_text(name)
    waited = threading.Event()
    follow = setup_module.Compilation.follow
    monkeypatch.setitem(follow.__globals__, "SECONDS_PER_LINE", 0.01)
    said = []

    def say(line):
        said.append(line)
        waited.set()  # the files are finished after the first line without one

    monkeypatch.setitem(follow.__globals__, "say", say)
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(waited.wait): path for path in sorted(tmp_path.iterdir())}
        follow(None, running, 2, time.monotonic())
    assert said[0].startswith("[0/2] still compiling, 0:0")
    assert said[-1].startswith("[2/2] ")
    assert "left" not in said[-1]
    assert {name for line in said for name in ("large.cpp", "small.cpp") if name in line} == {
        "large.cpp",
        "small.cpp",
    }
