"""`isobit audit`: name the operators that make a model depend on the batch, ranked by their effect."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.auditing.records import AXES, DEFAULT_AXES, Audit
from isobit.auditing.report.json import audit_as_json
from isobit.auditing.report.page import write_audit_page
from isobit.auditing.report.sarif import audit_as_sarif
from isobit.auditing.report.text import describe_audit
from isobit.cli.arguments import add_trust, axes_among, check_script, long_dtype, shape
from isobit.cli.named_code import load_module
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.foundation import files

if TYPE_CHECKING:
    import torch

    from isobit.auditing.subjects import Inputs


SHAPE = (8, 24)  # samples and tokens
PICTURES = 3  # orders that an HTML report shows unless --orders says otherwise

# Listed here because their own module loads torch; a test compares.
BLAMES = ("auto", "one", "class", "layer", "bisect")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        description="Run a model, call each of its operators again as it would be called for one sample alone (or "
        "without padding, or through a cache), and compare bits. Then substitute the results one after another and "
        "measure how much each operator changes the log-probabilities. Exit 0: none guilty; 1: some are; 2: not enough "
        "was judged to say.",
        epilog="arguments after -- are passed to the script: isobit audit train.py --backward -- --lr 0.1",
    )
    parser.add_argument(
        "model",
        help="a folder or hub id that transformers loads, a name of `isobit gate model --model`, "
        "package.module:factory or file.py:factory (returns a model and a batch), or script.py (its first call of a "
        "model is audited)",
    )
    add_inputs(parser)
    parser.add_argument(
        "--vary",
        type=axes_among(*AXES),
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
    add_trust(parser)
    add_quiet(parser)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is written."""
    parser.add_argument(
        "--orders",
        type=int,
        metavar="N",
        help="number of guilty operators whose addition order is revealed, for both shapes (default: 3 with --html)",
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


def run(options: argparse.Namespace) -> int:
    """Audit a model and print what was found."""
    from isobit.auditing.api import audit
    from isobit.integrations.transformers.enabling import enable

    orders = options.orders if options.orders is not None else PICTURES if options.html else 0
    with Steps(f"loading {options.model}", quiet=options.quiet, every=SELDOM) as steps:
        inputs = load(options)
        if options.enable:
            enable(inputs.model)
        found = audit(
            inputs.model,
            inputs.named if not inputs.args else (*inputs.args,),
            options.vary,
            backward=options.backward,
            sample=options.sample,
            effect=options.effect,
            blame=options.blame,
            orders=orders,
            progress=steps.at,
        )
    digest = [str(one) for axis in found.axes for one in (axis.guilty, axis.unjudged, axis.effect)]
    origin = provenance_of(options, digest)
    write(options, dataclasses.replace(found, model=options.model, provenance=origin))
    return found.exit_code


def load(options: argparse.Namespace) -> Inputs:
    """Return the model and the inputs that the command line names."""
    import torch

    from isobit.auditing.subjects import (
        as_inputs,
        batch_of,
        capture_call,
        from_factory,
        from_transformers,
        random_tokens,
        read_samples,
    )
    from isobit.gates.model.models import MODELS, build_model

    name: str = options.model
    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    if name.endswith(".py"):
        script = Path(name)
        check_script(script)
        return capture_call(script, options.passed_on, options.call)
    if ":" in name:
        return from_factory(name, options.effect, lambda module: load_module(module, options.trust))
    tokenizer: Any = None
    if name in MODELS:
        model = build_model(name, dtype or torch.float32, options.seed).to(options.device)
    else:
        model, tokenizer = from_transformers(name, dtype, options.device)
    if options.inputs is not None:
        return as_inputs(model, batch_of(model, read_samples(options.inputs, tokenizer)))
    return as_inputs(model, random_tokens(model, options.shape or SHAPE, options.seed))


def write(options: argparse.Namespace, found: Audit) -> None:
    """Write the files that were asked for, and print the text or the record."""
    if options.html:
        files.write_text(options.html, write_audit_page(found))
    if options.sarif:
        files.write_text(options.sarif, audit_as_sarif(found))
    say(audit_as_json(found) if options.json else describe_audit(found))
