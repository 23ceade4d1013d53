"""`isobit certify`: prove that a Triton kernel computes a row in one order in every configuration."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from isobit import files
from isobit.certify_records import Certified
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.compiled import certify
from isobit.errors import ArgumentError, in_one_line
from isobit.report.certify_json import certificate_as_json
from isobit.report.certify_page import write_certificate_page
from isobit.report.certify_text import describe_certificate
from isobit.trusted_folder import serve_folder

ADAPTER = "def certified(rows): x = torch.randn(rows, 256); out = torch.empty_like(x); kernel[grid](x, out); return out"


def run(options: argparse.Namespace) -> int:
    """Certify a function's kernels, and print the certificate."""
    check_paths(options)
    title = f"certifying {options.function}"
    # What a wrapper prints is not part of the record.
    with Steps(title, quiet=options.quiet, every=SELDOM) as steps, redirect_stdout(sys.stderr):
        function = find(options.function, options.trust)
        found = certify(
            function,
            rows=options.rows,
            vary=dict(options.vary),
            targets=options.target,
            ptx=options.ptx,
            progress=steps.at,
        )
    digests = [one.digest for one in found.classes]
    digests += [kernel.digest for target in found.targets for kernel in target.kernels]
    digests += [f"{one.configuration} {one.verdict}" for t in found.targets for one in t.outcomes]
    origin = provenance_of(options, digests)
    write(options, dataclasses.replace(found, function=options.function, provenance=origin))
    return found.exit_code


def check_paths(options: argparse.Namespace) -> None:
    """Raise for files that cannot be written, and for parameters given twice, before anything is compiled."""
    given = [name for name, _ in options.vary]
    twice = sorted({name for name in given if given.count(name) > 1})
    wrong = [(bool(twice), "every parameter in one --vary", f"--vary {', '.join(twice)} twice")]
    if options.html:
        folder, page = options.html.parent, options.html
        regular = page.is_file() or not page.exists()
        reachable = folder.is_dir() and regular and os.access(folder, os.W_OK)
        wrong.append((not reachable, "a file in a folder that can be written", f"--html {page}"))
    if options.ptx:
        inside = options.ptx if options.ptx.exists() else options.ptx.parent
        reachable = inside.is_dir() and os.access(inside, os.W_OK)
        wrong.append((not reachable, "a folder, or a new one in one", f"--ptx {options.ptx}"))
    for is_wrong, expected, received in wrong:
        if is_wrong:
            raise ArgumentError(
                expected=expected, received=received, remedy="isobit certify --help"
            )


def find(name: str, trust: list[str]) -> Callable[..., Any]:
    """Return the function that the command line names, from a file or from a package."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise ArgumentError(
            expected="FILE.py:function or package.module:function",
            received=name,
            remedy=f"name the function that launches the kernel after a colon: {name or 'matmul.py'}:matmul",
        )
    loaded = load_file(Path(module), trust) if module.endswith(".py") else load(module, trust)
    if not hasattr(loaded, attribute):
        made = [
            n
            for n, one in vars(loaded).items()
            if inspect.isfunction(one) and one.__module__ == loaded.__name__
        ]
        raise ArgumentError(
            expected=f"a function of {module}: {', '.join(made) or 'it has none'}",
            received=attribute,
            remedy="name one of them",
        )
    found = getattr(loaded, attribute)
    if type(found).__module__.startswith("triton."):
        raise ArgumentError(
            expected="a function that makes inputs and launches the kernel",
            received=f"the kernel {attribute} itself",
            remedy=f"write the launch as a function: {ADAPTER}",
        )
    if not callable(found):
        raise ArgumentError(
            expected="a function",
            received=f"{attribute}, a {type(found).__name__}",
            remedy=f"write the launch as a function: {ADAPTER}",
        )
    checked: Callable[..., Any] = found
    return checked


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


def write(options: argparse.Namespace, found: Certified) -> None:
    """Write the page if it was asked for, and print the text or the record, also if the page cannot be written."""
    failed: OSError | None = None
    if options.html:
        try:
            files.write_text(options.html, write_certificate_page(found))
        except OSError as error:
            failed = error
    say(certificate_as_json(found) if options.json else describe_certificate(found))
    if failed is not None:
        raise ArgumentError(
            expected="a page that can be written",
            received=in_one_line(failed),
            remedy="give --html another path; the certificate is printed above",
        ) from failed
