"""`isobit reveal`: show the order in which a kernel adds, per configuration, as text, picture or HTML report."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from isobit.cli.arguments import LONG, add_trust, numbers, short_dtype
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError, IsobitError, RevealError, in_one_line
from isobit.foundation import files
from isobit.foundation.trusted_folder import serve_folder
from isobit.order.addition import digest
from isobit.reveal.certificate import OrderComparison
from isobit.reveal.report import draw_certificate, write_page
from isobit.reveal.target import Progress as Told

if TYPE_CHECKING:
    import torch


SHAPE = ("k", "m", "n", "row", "dtype")

# Listed here because their own modules load torch; a test compares.
STOCK = (
    "sum",
    "mean",
    "linear",
    "matmul",
    "mm",
    "bmm",
    "input_grad",
    "weight_grad",
    "bias_grad",
    "rms_norm",
    "layer_norm",
    "softmax",
    "log_softmax",
    "attention",
    "embedding_grad",
)
OURS = ("linear", "frozen", "input_grad", "weight_grad", "bias_grad")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "reveal",
        description="Reveal the order of addition of one sum in every given configuration by probing, and the "
        "arithmetic of each addition; replay both on random terms, bit for bit, and compare configurations. "
        "Exit 0: one order; 1: several; 2: some order could not be shown.",
        epilog=f"targets: {', '.join(STOCK)}, all_reduce (gloo, one process per rank), or package.module:name, a "
        "callable that sums a vector (or takes k, m, n, dtype and returns a target of isobit.reveal.targets)",
    )
    parser.add_argument("target", help="what to probe: a name below, or package.module:name")
    parser.add_argument("--k", type=int, default=1024, help="terms of the sum (default 1024)")
    parser.add_argument(
        "--m", type=numbers, default=[], metavar="M,M…", help="row counts, each a configuration"
    )
    parser.add_argument("--n", type=int, help="columns of a product (default: as many as terms)")
    parser.add_argument(
        "--row", type=int, help="the row to read (default 0; of isobit's all are checked)"
    )
    parser.add_argument(
        "--threads", type=numbers, default=[], metavar="T,T…", help="thread counts, likewise"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes of all_reduce (default 4)")
    parser.add_argument(
        "--elements", type=int, default=64, help="elements that all_reduce reduces (default 64)"
    )
    parser.add_argument(
        "--dtype", type=short_dtype, default="fp32", metavar="fp32|bf16|fp16", help="default: fp32"
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--stock", action="store_true", help="PyTorch's own (default)")
    whose.add_argument("--isobit", action="store_true", help=f"ours: {', '.join(OURS)}")
    parser.add_argument(
        "--order-only", action="store_true", help="do not probe and replay the arithmetic"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture alone")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_trust(parser)
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Print the orders found. The exit code is 0 if all configurations have one order."""
    from isobit.ops.linear.targets import expected_order
    from isobit.reveal import compare_orders

    check_options(options)
    with ExitStack() as stack:
        target, configurations, title = choose(options, stack)
        report = stack.enter_context(progress_bar(title, options.quiet))
        stack.enter_context(
            redirect_stdout(sys.stderr)
        )  # what a kernel prints is not part of the record
        made = guarded(target, options.k, dtype_of(options))
        certificate = compare_orders(
            made, configurations, arithmetic=not options.order_only, progress=report
        )
    expected = None
    if options.isobit:
        expected = digest(expected_order(options.target, options.k, dtype_of(options)))
    defined = expected is None or certificate.matches(expected)
    origin = provenance_of(
        options, [*(found.tree.digest for found in certificate.classes), repr(certificate.refused)]
    )
    if options.html:
        files.write_text(options.html, write_page(certificate, title, origin))
    if options.svg:
        files.write_text(options.svg, draw_certificate(certificate, title, origin))
    if options.json:
        say_json(
            {
                "title": title,
                "provenance": origin,
                **certificate.summary(),
                "is_defined_order": expected and defined,
            }
        )
    else:
        show(certificate, title, None if expected is None else defined)
    if certificate.refused:
        return 2
    return 0 if certificate.kept and defined else 1


def check_options(options: argparse.Namespace) -> None:
    """Raise for options that contradict each other, before anything is probed."""
    ours = options.isobit and (":" in options.target or options.target == "all_reduce")
    ranks = options.target == "all_reduce" and (
        options.m or options.threads or options.n or options.dtype != "fp32"
    )
    rows = max(options.m, default=1)
    wrong = [
        (options.k < 1, "a sum of at least one term (n >= 1)", f"--k {options.k}"),
        (options.n is not None and options.n < 1, "at least one column", f"--n {options.n}"),
        (not 0 <= (options.row or 0) < rows, f"a row from 0 to {rows - 1}", f"--row {options.row}"),
        (options.ranks < 2 or options.elements < 1, "two ranks or more, and an element", "fewer"),
        (ours, "one of isobit's own sums with --isobit", options.target),
        (bool(ranks), "all_reduce with --ranks and --elements alone", "options of other targets"),
    ]
    for path in (options.html, options.svg):
        reachable = path is None or (path.parent.is_dir() and not path.is_dir())
        wrong.append((not reachable, "a file in a folder that exists", str(path)))
    for is_wrong, expected, received in wrong:
        if is_wrong:
            raise ArgumentError(expected=expected, received=received, remedy="isobit reveal --help")


def guarded(target: Callable[..., Any], k: int, dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap a target factory: its exceptions become errors of the command, and it may return a callable."""
    from isobit.reveal import targets

    def make(**shape: Any) -> Any:
        try:
            found = target(**shape)
            return (
                found
                if hasattr(found, "sums") or not callable(found)
                else targets.of(found, k, dtype)
            )
        except IsobitError:
            raise
        except (Exception, SystemExit) as error:
            raise RevealError(
                expected="a target",
                received=f"{type(error).__name__}: {in_one_line(error)}",
                remedy="fix what was named",
            ) from error

    return make


def choose(
    options: argparse.Namespace, stack: ExitStack
) -> tuple[Callable[..., Any], list[dict[str, Any]], str]:
    """Return the target, its configurations, and a title."""
    from isobit.reveal import targets

    whose = "" if ":" in options.target else "isobit " if options.isobit else "stock "
    title = f"{whose}{options.target}, {options.dtype}, {options.k} terms"
    if options.target == "all_reduce":
        group = stack.enter_context(targets.Ranks(options.ranks, options.elements))
        title = f"gloo all_reduce, {options.ranks} ranks, {options.elements} elements"
        return group.element, [{"element": e} for e in range(options.elements)], title
    factory = find(options)
    known = inspect.signature(factory).parameters
    shape = {"k": options.k, "n": options.n, "row": options.row, "dtype": dtype_of(options)}
    fixed = {key: value for key, value in shape.items() if key in known and value is not None}
    for name, value in (("n", options.n), ("row", options.row), ("m", options.m or None)):
        if value is not None and name not in known:
            raise ArgumentError(
                expected=f"options that {options.target} has: {', '.join(k for k in known if k in SHAPE) or 'none'}",
                received=f"--{name}",
                remedy=f"leave --{name} out",
            )
    made = partial(factory, **fixed)
    rows: list[dict[str, Any]] = [{"m": m} for m in options.m] or [{}]
    if not options.threads:
        return made, rows, title

    def threaded(threads: int, **shape: Any) -> Any:
        return made(**shape).with_threads(threads)

    return threaded, [{**row, "threads": count} for row in rows for count in options.threads], title


def find(options: argparse.Namespace) -> Callable[..., Any]:
    """Return the factory of the named target."""
    from isobit.ops.linear.targets import TARGETS

    if ":" in options.target:
        serve_folder([options.target.partition(":")[0].partition(".")[0], *options.trust])
        return import_target(options.target, options.k, dtype_of(options))
    table = TARGETS if options.isobit else stock_targets()
    if options.target not in table:
        raise ArgumentError(
            expected=f"one of {', '.join(table)}"
            + ("" if options.isobit else ", all_reduce, or package.module:name"),
            received=options.target,
            remedy="isobit reveal --help",
        )
    return table[options.target]


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    """Return the dtype that the command line names."""
    import torch

    found: torch.dtype = getattr(torch, LONG[options.dtype])
    return found


def stock_targets() -> dict[str, Callable[..., Any]]:
    """Return the factories of PyTorch's own sums by name."""
    import torch

    from isobit.reveal import targets

    special = {
        "mm": partial(targets.matmul, function=torch.mm),
        "bmm": partial(targets.matmul, function=torch.bmm, batch=2),
    }
    return {name: special.get(name) or getattr(targets, name) for name in STOCK}


def import_target(name: str, k: int, dtype: torch.dtype) -> Callable[..., Any]:
    """Import the named target from the current folder or from installed packages."""
    from isobit.reveal import targets

    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing may raise anything
        raise ArgumentError(
            expected="package.module:name of something that can be imported",
            received=f"{name} ({type(error).__name__}: {in_one_line(error)})",
            remedy="run where the package can be imported, or install it; what it imports from the current folder "
            "needs --trust NAME",
        ) from error
    try:
        known = inspect.signature(found).parameters
        takes_shape = "k" in known and bool(known.keys() & {"m", "n", "dtype"})
    except (TypeError, ValueError):
        takes_shape = False
    if hasattr(found, "sums"):
        return lambda: found
    if not callable(found):
        raise ArgumentError(
            expected="a callable or a target",
            received=f"{name}, a {type(found).__name__}",
            remedy="name a function",
        )
    if takes_shape:
        return found  # type: ignore[no-any-return]
    return lambda: targets.of(found, k, dtype)


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Told]:
    """Show the progress of each stage on the error stream."""
    with Steps(title, quiet=quiet, every=SELDOM) as steps:

        def report(stage: str, done: int, total: int) -> None:
            steps.at(f"{title}: {stage}", done, total)

        yield report


def show(certificate: OrderComparison, title: str, defined: bool | None) -> None:
    """Print the orders as a table."""
    console = make_console(118)
    table = Table(
        "configurations",
        "order",
        "additions",
        "digest",
        "probes",
        title=title,
        title_justify="left",
    )
    for found in certificate.classes:
        tree = found.tree
        table.add_row(
            found.label,
            str(tree),
            str(tree.arithmetic or "not seen"),
            tree.digest[:8],
            str(tree.probes),
        )
    console.print(table)
    first = certificate.classes[0] if certificate.classes else None
    for found in certificate.classes[1:]:
        assert first is not None
        if found.parting:
            console.print(
                f"{first.label} adds {found.parting[0]} where {found.label} adds {found.parting[1]}"
            )
        else:
            console.print(
                f"{first.label} and {found.label} have one order, and additions that differ"
            )
    for found in certificate.classes:
        if found.tree.unlike:
            console.print(
                f"{found.label or 'it'}: {found.tree.unlike} places of a call add in another order still"
            )
    for name, reason in certificate.refused:
        console.print(f"{name or 'it'} could not be shown: {reason}")
    count = f"{certificate.count} configuration{'s' if certificate.count > 1 else ''}"
    if certificate.kept:
        console.print(f"{count}, one order: {certificate.claim}")
        if defined is not None:
            console.print("it is the defined order" if defined else "it is NOT the defined order")
    else:
        console.print(
            f"{count}, {len(certificate.classes)} orders, {len(certificate.refused)} not shown"
        )
