"""Without a compiler the package installs, says why it has no kernels, and warns before it is slow."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import isobit
from isobit.cli import main
from isobit.errors import PortableWarning
from isobit.foundation import native
from isobit.ops import dispatch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_kernels(monkeypatch):
    """A process whose package was installed without a compiler."""

    def forget():
        for cached in (dispatch.attestations, dispatch.has_native, dispatch.warn_of_portable):
            cached.cache_clear()

    monkeypatch.setattr(native, "load", lambda: "not built: no C++ compiler, as `c++` is not found")
    forget()
    yield
    monkeypatch.undo()
    forget()
    dispatch.has_native()


def test_the_first_call_warns_once_with_reason_and_remedy(without_kernels):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        isobit.silu(torch.ones(3, dtype=torch.float64))  # has no kernel in any installation
        assert caught == []
        for _ in range(2):
            isobit.linear(torch.ones(1, 4), torch.ones(2, 4))
            isobit.silu(torch.ones(3, dtype=torch.bfloat16))
    assert [w.category for w in caught] == [PortableWarning]
    said = str(caught[0].message)
    for part in ("no C++ compiler", "slower", "install a C++ compiler", "isobit doctor"):
        assert part in said


def test_doctor_says_why_and_does_not_warn(without_kernels, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main.main(["doctor"]) == 2
    assert "no C++ compiler, as `c++` is not found" in " ".join(capsys.readouterr().out.split())


def test_a_wheel_without_kernels_holds_the_reason(tmp_path, monkeypatch):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", "wheel"],
        cwd=tmp_path,
        env=os.environ | {"CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "src/isobit/native_build_failure.txt").exists()
    monkeypatch.setattr(native, "FOLDER", tmp_path / "wheel/isobit")
    assert "no C++ compiler, as `no-such-compiler` is not found" in native.load.__wrapped__()
