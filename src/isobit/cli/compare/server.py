"""`isobit compare server`: whether a server's log-probabilities depend on what else it does."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

from rich.table import Table

from isobit.cli.arguments import axes_among, shape
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.server.completions import Completions, Prompt, random_prompts, read_prompts
from isobit.comparing.server.report import AXES, ServerAudit, write_server_page
from isobit.comparing.server.running import audit_server
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.http_json import Server, check_key, read_key
from isobit.foundation.plain_text import one_line

SHAPE = (16, 160)  # prompts, and words of the longest
ASKED_AT_MOST = 4096  # tokens, prompts and repeats: what a slip of the finger should not exceed


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "server",
        description="Ask a server with OpenAI's completions API the same in several ways, and compare the "
        "log-probabilities that it returns with those of each prompt alone. Exit 0: no difference; 1: some; 2: could "
        "not ask, or an axis was not judged.",
        epilog="example: isobit compare server http://localhost:8000 --model Qwen/Qwen3-0.6B",
    )
    parser.add_argument("url", metavar="URL", help="such as http://localhost:8000")
    parser.add_argument("--model", metavar="NAME", help="the model's name there (required)")
    parser.add_argument(
        "--vary",
        type=axes_among(*AXES),
        metavar="AXIS,AXIS…",
        help=f"of {', '.join(AXES)} (default: all)",
    )
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE.jsonl",
        help='one prompt per line: {"prompt": text} or {"input_ids": [numbers]}',
    )
    parser.add_argument(
        "--shape",
        type=shape,
        metavar="BxT",
        help="otherwise random prompts: prompts × words of the longest (default: 16x160)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random prompts (default: 0)")
    parser.add_argument(
        "--tokens", type=count, default=16, help="to ask for after each prompt (default: 16)"
    )
    parser.add_argument(
        "--top",
        type=count_or_zero,
        default=5,
        help="how many of the most likely tokens to compare (default: 5)",
    )
    parser.add_argument(
        "--repeats", type=count, default=3, help="of each prompt alone (default: 3)"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, help="seconds for a request (default: 60)"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="has the API key (default: the environment variable OPENAI_API_KEY, if set)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_quiet(parser)


def count_or_zero(text: str) -> int:
    """Read a number of things."""
    if not text.isascii() or not text.isdigit() or int(text) > ASKED_AT_MOST:
        raise argparse.ArgumentTypeError(
            f"expected a number up to {ASKED_AT_MOST:,}, received {text!r}"
        )
    return int(text)


def count(text: str) -> int:
    """Read a number of things, at least one."""
    found = count_or_zero(text)
    if not found:
        raise argparse.ArgumentTypeError("expected at least 1, received 0")
    return found


def seconds(text: str) -> float:
    """Read a time."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, received {text!r}")
    return found


def run(options: argparse.Namespace) -> int:
    """Audit the server that the options name, and print what was found."""
    if not options.model:
        raise ArgumentError(
            expected="--model NAME, the model's name on the server",
            received="none",
            remedy=f"the server lists its models at {options.url}/v1/models",
        )
    prompts = choose_prompts(options)
    key = read_key(options.key_file) if options.key_file else os.environ.get("OPENAI_API_KEY", "")
    if key:
        check_key(key, "the environment variable OPENAI_API_KEY")
    server = Server(options.url, key, options.timeout)
    nonce = secrets.token_hex(6)
    completions = Completions(server, options.model, options.tokens, options.top, nonce)
    with Steps(f"asking {server.url}", quiet=options.quiet, every=SELDOM) as steps:
        found = audit_server(
            completions,
            server.url,
            options.model,
            prompts,
            options.vary or list(AXES),
            tokens=options.tokens,
            repeats=options.repeats,
            progress=steps.at,
        )
    origin = provenance_of(options, [str(one) for one in found.variants])
    found = dataclasses.replace(found, provenance=origin)
    if options.html:
        files.write_text(options.html, write_server_page(found))
    if options.json:
        said = {"exit": found.exit_code, "verdicts": found.verdicts, "sentence": found.sentence}
        say_json({**said, "audit": found})
    else:
        show(found)
    return found.exit_code


def choose_prompts(options: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the file, or random ones."""
    if options.inputs is not None:
        return read_prompts(options.inputs)
    count, words = options.shape or SHAPE
    if count < 2:
        raise ArgumentError(
            expected="two prompts or more",
            received=f"--shape {count}x{words}",
            remedy="--shape 16x160",
        )
    return random_prompts(count, words, options.seed)


def show(found: ServerAudit) -> None:
    """Print one table, notes and the verdict."""
    console = make_console(110)
    console.print(
        f"{found.model} at {found.server}: {found.prompts} prompts, {found.tokens} tokens each"
    )
    console.print(f"compared: {found.compared}", soft_wrap=True)
    table = Table(
        "axis", "what was varied", "differ", "of log-probs", "max |Δ|", "other tokens", ""
    )
    axis = ""
    for one in found.variants:
        if one.reason:
            figures = ("-", "-", "-", "-")
        else:
            size = f"{one.largest:.3g}" if one.largest else "0"
            changed = f"in {one.changed:,} of {one.requests:,}"
            figures = (f"{one.differ:,}", f"{one.values:,}", size, changed)
        name = one.name + (f" ({one.cached:,} cached)" if one.cached else "")
        table.add_row("" if one.axis == axis else one.axis, name, *figures, one.verdict)
        axis = one.axis
    console.print(table)
    for one in found.variants:
        if one.first:
            console.print(f"first on {one.axis}, {one.name}: {one_line(one.first)}", soft_wrap=True)
        if one.reason:
            console.print(
                f"not judged: {one.axis}, {one.name}: {one_line(one.reason)}", soft_wrap=True
            )
    for note in found.notes:
        console.print(f"note: {one_line(note)}", soft_wrap=True)
    console.print(found.sentence, soft_wrap=True)
