"""Theorem: a venv of packaging/torch_matrix.py is reused if it has all packages of that torch, else it is made anew."""

import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MATRIX = runpy.run_path(str(ROOT / "packaging/torch_matrix.py"))


def program(path, script):
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "reused"),
    [
        ("echo 2.13.0 1 2", True),
        ("echo 2.13.0+cpu 1 2", True),
        ("echo 2.13.01 1 2", False),
        ("echo 2.14.1 1 2", False),
        ("exit 1", False),  # a package is missing
    ],
)
def test_a_venv_with_that_torch_is_reused(tmp_path, said, reused):
    interpreter = program(
        tmp_path / "python", '[ "$1" = -c ] && echo 3.12.1 || { echo new >&2; exit 1; }'
    )
    there = program(tmp_path / "python3.12.1-torch2.13.0" / "bin" / "python", said)
    found = MATRIX["installed"]("2.13.0", str(interpreter), tmp_path, dict(os.environ))
    assert found == (there if reused else "new")
