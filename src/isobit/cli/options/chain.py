"""Options of `isobit chain`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.contract_options import add_trust
from isobit.cli.dtypes import long_dtype
from isobit.cli.progress import add_quiet

# Listed here because their own module loads torch; a test compares.
MODELS = (
    "qwen3-0.6b",
    "qwen3-small",
    "qwen2-small",
    "llama-small",
    "qwen3-tiny",
    "qwen2-tiny",
    "qwen3-micro",
    "llama-tiny",
)
MOST = 10_000  # numbers of one range


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chain",
        help="put a whole model through every batch, padding, chunk and cache layout",
        description="Compare raw bits of a model across layouts of a batch: every selected log-probability, the loss, "
        "every parameter's gradient and every weight after one AdamW step. Stock PyTorch runs through the same gate; "
        "only isobit's result decides. With --batch, --pad, --lengths, --inputs or --seeds, also sweep batch size and "
        "padding, forward and backward. Exit 0: kept; 1: broken; 2: could not run. `isobit gate model` is the same "
        "command.",
        epilog="examples: isobit chain --model qwen3-tiny --dtype bf16; isobit chain --model my-checkpoint "
        "--batch 1..8 --pad 0,1,64; isobit chain --model my_models.py:make --lengths 5,9,300; "
        "isobit chain --device sm_90",
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FOLDER|FACTORY",
        help=f"{', '.join(MODELS)}, which are built with random weights; a folder or hub id that transformers loads; "
        "or FILE.py:function or package.module:function, which returns a model (default: qwen3-small; qwen3-micro "
        "where compiled code is run on this CPU)",
    )
    add_sweep(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="run on a GPU: cuda or cuda:1 on a card, or a target such as sm_90, whose compiled code is run on this "
        "CPU, with a micro or tiny model, in fewer layouts and without stock",
    )
    parser.add_argument(
        "--interpreted",
        action="store_true",
        help="with a target, run kernels in Triton's interpreter instead of compiled code",
    )
    parser.add_argument(
        "--dtype",
        type=long_dtype("float32", "bfloat16"),
        metavar="fp32|bf16",
        help="load the model in this dtype (default: its own; fp32 for a model that is built)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--stock",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run stock through the same gate",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON record instead of a table"
    )
    add_trust(parser)
    add_quiet(parser)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options that sweep batch size and padding; each alone starts a sweep with the others' defaults."""
    parser.add_argument(
        "--batch", type=numbers, metavar="N,N…|A..B", help="batch sizes to sweep (default: 1..4)"
    )
    parser.add_argument(
        "--pad",
        type=numbers,
        metavar="N,N…|A..B",
        help="tokens of padding beyond the longest sample of a batch, on either side (default: 0,1,7,64)",
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N…|FILE",
        help="tokens of each sample, or a file of such numbers (default: 11,16,13,19, repeated to fill a batch)",
    )
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE.jsonl",
        help='instead of random tokens: one sample per line, {"prompt": text} or {"input_ids": [numbers]}',
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="how many sets of random tokens to draw (default: 1)"
    )


def numbers(text: str) -> tuple[int, ...]:
    """Read `1,2,8` or `1..8`; both may be mixed."""
    found: list[int] = []
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        if not low.isdecimal() or (dots and not high.isdecimal()) or len(low + high) > 12:
            raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,8 or 1..8: {text!r}")
        if dots and not 0 <= int(high) - int(low) < MOST:
            raise argparse.ArgumentTypeError(f"expected a rising range below {MOST:,}: {text!r}")
        found += range(int(low), int(high) + 1) if dots else [int(low)]
    return tuple(dict.fromkeys(found))


def lengths(text: str) -> tuple[int, ...]:
    """Read lengths from the command line, or from a file of numbers; a length may occur several times."""
    path = Path(text)
    if path.is_file():
        text = ",".join(path.read_text(encoding="utf-8").replace(",", " ").split())
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) <= 12 for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected lengths such as 5,9,300, or a file of them: {text[:60]!r}"
        )
    return tuple(int(part) for part in parts)
