"""Options of `isobit chain`."""

from __future__ import annotations

import argparse
from typing import Any

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


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chain",
        help="put a whole model through every batch, padding, chunk and cache layout",
        description="Build a model from a transformers configuration with random weights, save it, load it with "
        "from_pretrained, and compare raw bits across layouts: every selected log-probability, the loss, every "
        "parameter's gradient and every weight after one AdamW step. Stock PyTorch runs through the same gate; "
        "only isobit's result decides. Exit 0: kept; 1: broken; 2: could not run.",
        epilog="examples: isobit chain --model qwen3-tiny --dtype bf16; isobit chain --device cuda; "
        "isobit chain --device sm_90",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="default: qwen3-small; qwen3-micro where compiled code is run on this CPU",
    )
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
        default="float32",
        type=long_dtype("float32", "bfloat16"),
        metavar="fp32|bf16",
        help="default: fp32",
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
    add_quiet(parser)
