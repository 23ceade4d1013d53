"""`isobit certify`: prove that a Triton kernel computes a row in one order in every configuration."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from isobit.certifying.records import Certified
from isobit.certifying.report.json import certificate_as_json
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import describe_certificate
from isobit.cli.arguments import add_trust, numbers
from isobit.cli.named_code import load_module
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation import files

ADAPTER = "def certified(rows): x = torch.randn(rows, 256); out = torch.empty_like(x); kernel[grid](x, out); return out"

ROWS = (1, 3, 16, 64, 70, 130)
TARGETS = ("sm_80", "sm_90", "sm_100")
WORDS = {"true": True, "false": False, "none": None}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "certify",
        description="Compile the Triton kernels that a function launches for each target, run the compiled code on "
        "this CPU with a name for every floating-point expression, and compare the expressions of the output rows "
        "over all configurations. Equal expressions have equal bits for all float inputs on one GPU. Exit 0: one "
        "expression; 1: several, or a result that the inputs do not fix; 2: some configuration could not be judged, or "
        "without --rows, a row count up to 65,536 launches something that was not judged.",
        epilog="the function makes its inputs with torch, on the CPU, launches kernels as usual and returns what they "
        "wrote: def matmul(rows, BLOCK_M=64): ...; return out",
    )
    parser.add_argument(
        "function", metavar="FUNCTION", help="FILE.py:function or package.module:function"
    )
    parser.add_argument(
        "--rows",
        type=numbers,
        metavar="R,R…",
        help=f"row counts, passed as rows (default: {','.join(map(str, ROWS))} if the function has rows, and those "
        "that launch something else)",
    )
    parser.add_argument(
        "--vary",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=V,V…",
        help="values of another parameter of the function, such as BLOCK_M=16,64; repeatable",
    )
    parser.add_argument(
        "--target",
        type=names,
        default=list(TARGETS),
        metavar="T,T…",
        help=f"GPUs to compile for (default: {','.join(TARGETS)})",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    parser.add_argument(
        "--ptx", type=Path, metavar="DIR", help="write the PTX of every compiled kernel"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_trust(parser)
    add_quiet(parser)


def names(text: str) -> list[str]:
    """Parse `sm_80,sm_90`."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(
            f"expected targets such as sm_80,sm_90, each once; received {text!r}"
        )
    return found


def setting(text: str) -> tuple[str, list[Any]]:
    """Parse `BLOCK_M=16,64`."""
    name, equals, values = text.partition("=")
    found = [value(part.strip()) for part in values.split(",")]
    if not equals or not name.isidentifier() or name == "rows" or "" in found:
        remedy = "use --rows for rows" if name == "rows" else "NAME=V1,V2"
        raise argparse.ArgumentTypeError(f"expected {remedy}; received {text!r}")
    if len({repr(one) for one in found}) != len(found):
        raise argparse.ArgumentTypeError(f"expected each value once; received {text!r}")
    return name, found


def value(text: str) -> Any:
    """Read a whole number, a number, true, false, none, or a word."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def run(options: argparse.Namespace) -> int:
    """Certify a function's kernels, and print the certificate."""
    from isobit.certifying.api import certify
    from isobit.certifying.running.compile import absent_driver, check_target
    from isobit.certifying.running.stand_in import standing_in

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
            expected="an HTML report that can be written",
            received=in_one_line(failed),
            remedy="give --html another path; the certificate is printed above",
        ) from failed
