"""`isobit doctor --device`: attest the Triton executors on a card, or compiled for one and run in the PTX machine."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from isobit import files
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say, say_json
from isobit.compiled import executing
from isobit.compiled.compile import TARGETS, triton_package
from isobit.contracts.language.grammar import suggest
from isobit.errors import ArgumentError, EngineError
from isobit.ops.gpu.attestation import attest_operator
from isobit.ops.gpu.executors import DTYPES, OPERATORS
from isobit.order.plan import VERSION
from isobit.records import Attestation, to_json


def run(options: argparse.Namespace) -> int:
    """Attest, print the findings, and write the record."""
    operators = chosen_operators(options.operators)
    check_record(options.record)
    device, facts = describe(options.device)
    virtual = options.device in TARGETS
    run_by = executing("machine", target=options.device) if virtual else contextlib.nullcontext()
    found: dict[str, list[Attestation]] = {}
    title = f"attesting on {options.device}"
    total = len(operators) * len(DTYPES)
    with Steps(title, total, options.quiet, SELDOM) as steps, run_by:
        for operator in operators:
            for dtype in DTYPES:
                found.setdefault(operator, []).append(attest_operator(operator, dtype, device))
                steps.done(f"{operator} {dtype}")
    every = [one for each in found.values() for one in each]
    origin = provenance_of(options, [*map(str, facts.items()), *map(str, every)])
    record = {"provenance": origin, "device": facts, "order_version": VERSION, "operators": found}
    if options.record:
        files.write_text(Path(options.record), to_json(record) + "\n")
    if options.json:
        say_json(record)
    else:
        show(facts, found)
    return 0 if every and all(one.kept for one in every) else 1


def chosen_operators(named: list[str] | None) -> tuple[str, ...]:
    """Return the operators to attest.

    Raises:
        ArgumentError: If a name is not one of them.
    """
    for name in named or ():
        if name not in OPERATORS:
            raise ArgumentError(
                expected=f"operators of {', '.join(OPERATORS)}",
                received=name,
                remedy=suggest(name, list(OPERATORS)),
            )
    return tuple(dict.fromkeys(named)) if named else OPERATORS


def check_record(path: str | None) -> None:
    """Raise if the record cannot be written, before minutes of work."""
    if path and (
        not Path(path).parent.is_dir() or (Path(path).exists() and not Path(path).is_file())
    ):
        raise ArgumentError(
            expected="a file in a folder that exists",
            received=f"--record {path}",
            remedy="give another path",
        )


def describe(name: str) -> tuple[torch.device, dict[str, Any]]:
    """Return the device, and what it is.

    Raises:
        ArgumentError: If the name is neither a target nor a CUDA device.
        EngineError: If there is no such device.
    """
    triton = str(triton_package().__version__)
    if name in TARGETS:
        how = "compiled code, run in the PTX machine on this CPU"
        return torch.device("cpu"), {"name": name, "how": how, "triton": triton}
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ArgumentError(
            expected=f"--device cuda, cuda:N, or a target of {', '.join(TARGETS)}",
            received=name,
            remedy=suggest(name, ["cuda", *TARGETS]),
        )
    if not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count():
        raise EngineError(
            expected=f"the device {name}",
            received=f"{torch.cuda.device_count()} CUDA devices in torch {torch.__version__}",
            remedy="isobit doctor --device sm_90 compiles for a card and runs the code on this CPU",
        )
    device = torch.device("cuda", int(number or 0))
    properties: Any = torch.cuda.get_device_properties(device)
    facts = {"name": properties.name, "how": "run on the card", "triton": triton}
    facts["capability"] = f"{properties.major}.{properties.minor}"
    facts["runtime"] = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    )
    return device, facts


def show(facts: dict[str, Any], found: dict[str, list[Attestation]]) -> None:
    """Print a row per operator."""
    console = make_console(100)
    for name, value in facts.items():
        say(f"{name}: {value}")
    table = Table("operator", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    for operator, row in found.items():
        table.add_row(operator, *(f"kept, {a.engine}" if a.kept else "BROKEN" for a in row))
    console.print(table)
    every = [one for row in found.values() for one in row]
    kept = sum(one.kept for one in every)
    say(f"{kept} of {len(every)} kept: bits equal the definition's on hard inputs")
    for one in every:
        if not one.kept:
            say(f"{one.dtype}: {one.detail}")
