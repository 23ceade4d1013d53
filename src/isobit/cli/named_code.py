"""Import the module, or run the file, that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError, in_one_line
from isobit.foundation.trusted_folder import serve_folder


def load_module(name: str, trust: list[str]) -> Any:
    """Import `package.module`, or run `path/to/file.py` as a module."""
    return load_file(Path(name), trust) if name.endswith(".py") else load(name, trust)


def load(module: str, trust: list[str]) -> Any:
    """Import a module of the current folder or of an installed package."""
    serve_folder([module.partition(".")[0], *trust])
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing may raise anything
        raise could_not_import(module, error) from error


def load_file(path: Path, trust: list[str]) -> Any:
    """Run a Python file as a module; only packages that are trusted are found in its folder."""
    if not path.is_file():
        raise ArgumentError(
            expected="a Python file",
            received=f"no such file: {path}",
            remedy="name it by its path: path/to/kernels.py:function",
        )
    serve_folder(trust, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # for dataclasses and pickles of the file
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise could_not_import(str(path), error) from error
    finally:
        if known is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = known
    return module


def could_not_import(name: str, error: BaseException) -> ArgumentError:
    """Return the error for a file or module whose import raised."""
    missing = isinstance(error, ModuleNotFoundError) and error.name
    if missing == "triton":
        remedy = "pip install triton"
    elif missing:
        remedy = f"pip install {missing}, or --trust {missing} if it is beside the file"
    else:
        remedy = "fix what was named: python must be able to import it on this machine"
    return ArgumentError(
        expected=f"{name}, imported",
        received=f"{type(error).__name__}: {in_one_line(error)}",
        remedy=remedy,
    )
