"""`isobit audit --server`: whether a server's log-probabilities depend on what else it does."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets

from rich.table import Table

from isobit.cli.progress import SELDOM, Steps
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
# Options of other audits: their values would be ignored.
OTHERS = ("model", "sarif", "dumps", "effect", "orders", "backward", "enable", "dtype")


def run_server(options: argparse.Namespace) -> int:
    """Audit the server that the options name, and print what was found."""
    axes = check_options(options)
    prompts = choose_prompts(options)
    key = read_key(options.key_file) if options.key_file else os.environ.get("OPENAI_API_KEY", "")
    if key:
        check_key(key, "the environment variable OPENAI_API_KEY")
    server = Server(options.server, key, options.timeout)
    nonce = secrets.token_hex(6)
    completions = Completions(server, options.served, options.tokens, options.top, nonce)
    with Steps(f"asking {server.url}", quiet=options.quiet, every=SELDOM) as steps:
        found = audit_server(
            completions,
            server.url,
            options.served,
            prompts,
            axes,
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


def check_options(options: argparse.Namespace) -> list[str]:
    """Return the axes; raise if the options are not those of a server's audit."""
    if not options.served:
        raise ArgumentError(
            expected="--model NAME with --server",
            received="none",
            remedy=f"the server lists its models at {options.server}/v1/models",
        )
    given = [name for name in OTHERS if getattr(options, name)]
    if given:
        raise ArgumentError(
            expected="--server and --model with the options of a server's audit",
            received=", ".join(given),
            remedy="leave them out: isobit audit --help lists a server's options",
        )
    unknown = [axis for axis in options.vary or () if axis not in AXES]
    if unknown:
        raise ArgumentError(
            expected=f"axes of a server: {', '.join(AXES)}",
            received=", ".join(unknown),
            remedy="leave --vary out, or choose among them",
        )
    return list(dict.fromkeys(options.vary or AXES))


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
