"""Options of `isobit audit`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from isobit.auditing.records import AXES, DEFAULT_AXES
from isobit.cli.contract_options import add_trust
from isobit.cli.dtypes import long_dtype
from isobit.cli.options.audit_server import add_server
from isobit.cli.progress import add_quiet
from isobit.comparing.server.report import AXES as SERVER_AXES

# Listed here because their own module loads torch; a test compares.
BLAMES = ("auto", "one", "class", "layer", "bisect")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="name the operators that make a model depend on the batch, ranked by what they do",
        description="Run a model, call each of its operators again as it would be called for one sample alone (or "
        "without padding, or through a cache), and compare bits. Then substitute the results one after another and "
        "measure what each operator does to the log-probabilities. Exit 0: none guilty; 1: some are; 2: not enough "
        "was judged to say.",
        epilog="words after -- go to the script: isobit audit train.py --backward -- --lr 0.1",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a folder or hub id that transformers loads, a name of `isobit chain --model`, package.module:factory "
        "or file.py:factory (returns a model and a batch), or script.py (its first call of a model is audited)",
    )
    add_inputs(parser)
    parser.add_argument(
        "--vary",
        type=axes,
        metavar="AXIS,AXIS…",
        help=f"of {', '.join(AXES)} (default: {','.join(DEFAULT_AXES)}; with --backward without decode)",
    )
    parser.add_argument(
        "--backward", action="store_true", help="audit gradients, too (decode and chunks have none)"
    )
    parser.add_argument(
        "--effect",
        metavar="logp|loss|grad|NAME",
        help="what the effect is measured on; NAME is an output of the model",
    )
    parser.add_argument(
        "--blame",
        choices=BLAMES,
        default="auto",
        help="how guilty operators are measured: each, or in groups (default: %(default)s)",
    )
    add_reports(parser)
    add_server(parser)
    add_trust(parser)
    add_quiet(parser)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is compared instead, and what is written."""
    parser.add_argument(
        "--orders",
        type=int,
        metavar="N",
        help="reveal the order of addition of so many guilty operators, in both shapes (default: 3 with --html)",
    )
    parser.add_argument(
        "--dumps",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare dumps of two runs instead: DebugMode logs, SGLang dumper files, or tensor files",
    )
    parser.add_argument(
        "--rows",
        choices=("all", "common"),
        default="all",
        help="with --dumps: where one side has more rows, compare the common ones",
    )
    for form in ("html", "sarif"):
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"write a {form} report")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for what the model is run on."""
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE.jsonl",
        help='one sample per line: {"prompt": text} or {"input_ids": [numbers]}; padded on the left',
    )
    parser.add_argument(
        "--shape",
        type=shape,
        metavar="BxT",
        help="otherwise random tokens: samples × tokens (default: 8x24)",
    )
    parser.add_argument("--sample", type=int, default=0, help="which runs alone (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens (default: 0)")
    parser.add_argument(
        "--dtype",
        type=long_dtype("float32", "bfloat16", "float16"),
        metavar="fp32|bf16|fp16",
        help="load the model in this dtype (default: its own)",
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument(
        "--enable", action="store_true", help="audit the model as isobit.enable(model) makes it"
    )
    parser.add_argument(
        "--call", type=int, default=0, help="of a script: which call of a model (default: 0)"
    )


def axes(text: str) -> list[str]:
    """Read a list of axes."""
    found = [part for part in text.split(",") if part]
    unknown = [part for part in found if part not in (*AXES, *SERVER_AXES)]
    if unknown or not found:
        raise argparse.ArgumentTypeError(
            f"expected axes among {', '.join(AXES)}, received {text!r}"
        )
    return found


def shape(text: str) -> tuple[int, int]:
    """Read samples × tokens."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if not found or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected SAMPLESxTOKENS such as 8x24, received {text!r}")
    return int(found[1]), int(found[2])
