"""`isobit certify`: prove that a Triton kernel computes a row in one order in every configuration."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from isobit.certifying import certify
from isobit.certifying.records import Certified
from isobit.certifying.report.json import certificate_as_json
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import describe_certificate
from isobit.certifying.running.compile import absent_driver, check_target
from isobit.certifying.running.stand_in import standing_in
from isobit.cli.named_code import load_module
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation import files

ADAPTER = "def certified(rows): x = torch.randn(rows, 256); out = torch.empty_like(x); kernel[grid](x, out); return out"


def run(options: argparse.Namespace) -> int:
    """Certify a function's kernels, and print the certificate."""
    check_paths(options)
    title = f"certifying {options.function}"
    # What a wrapper prints is not part of the record.
    with Steps(title, quiet=options.quiet, every=SELDOM) as steps, redirect_stdout(sys.stderr):
        with absent_driver(check_target(options.target[0])), standing_in(options.target[0]):
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
    loaded = load_module(module, trust)
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
