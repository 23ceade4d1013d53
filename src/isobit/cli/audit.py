"""`isobit audit`: name the operators that make a model depend on the batch, ranked by what they do."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from isobit.auditing.api import audit
from isobit.auditing.inputs import Inputs, as_inputs
from isobit.auditing.records import AXES, Audit
from isobit.auditing.report.json import audit_as_json
from isobit.auditing.report.page import write_audit_page
from isobit.auditing.report.sarif import audit_as_sarif
from isobit.auditing.report.text import describe_audit
from isobit.auditing.subjects import (
    batch_of,
    capture_call,
    from_factory,
    from_transformers,
    random_tokens,
    read_samples,
)
from isobit.cli.audit_dumps import run_dumps
from isobit.cli.audit_server import run_server
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.trusted_folder import serve_folder
from isobit.gates.model.models import MODELS, build_model
from isobit.integrations.transformers.enabling import enable

SHAPE = (8, 24)  # samples and tokens
PICTURES = 3  # orders that a page shows unless --orders says otherwise


def run(options: argparse.Namespace) -> int:
    """Audit a model or a server, or compare two dumps, and print what was found."""
    if options.server is not None:
        return run_server(options)
    if options.served is not None:
        raise ArgumentError(
            expected="--model NAME with --server URL",
            received=f"--model {options.served} alone",
            remedy=f"isobit audit {options.served} loads a model here; --server asks one that is served",
        )
    if options.dumps:
        given = [name for name in ("model", "html", "sarif") if getattr(options, name)]
        if given:
            raise ArgumentError(
                expected="--dumps A B with --rows, --json or --quiet only",
                received=f"--dumps and {', '.join(given)}",
                remedy="leave them out, or redirect the output of --json to a file",
            )
        return run_dumps(options)
    if options.model is None:
        raise ArgumentError(
            expected="a model, package.module:factory or script.py; or --dumps A B, or --server URL",
            received="nothing",
            remedy="isobit audit --help",
        )
    axes = check_axes(options.vary)
    orders = options.orders if options.orders is not None else PICTURES if options.html else 0
    with Steps(f"loading {options.model}", quiet=options.quiet, every=SELDOM) as steps:
        inputs = load(options)
        if options.enable:
            enable(inputs.model)
        found = audit(
            inputs.model,
            inputs.named if not inputs.args else (*inputs.args,),
            axes,
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


def check_axes(given: list[str] | None) -> list[str] | None:
    """Return the axes of a model, None for the usual ones; raise for those of a server."""
    unknown = [axis for axis in given or () if axis not in AXES]
    if unknown:
        raise ArgumentError(
            expected=f"axes of a model: {', '.join(AXES)}",
            received=", ".join(unknown),
            remedy="these are a server's: pass --server URL --model NAME, or choose others",
        )
    return given or None


def load(options: argparse.Namespace) -> Inputs:
    """Return the model and the inputs that the command line names."""
    name: str = options.model
    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    if name.endswith(".py"):
        script = Path(name)
        if not script.is_file():
            raise ArgumentError(
                expected="a Python script",
                received=f"no such file: {name}",
                remedy="name a script by its path; words after -- go to the script",
            )
        return capture_call(script, options.passed_on, options.call)
    if ":" in name:
        serve_folder([name.partition(":")[0].partition(".")[0], *options.trust])
        return from_factory(name, options.effect)
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
