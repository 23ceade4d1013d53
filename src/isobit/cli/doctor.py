"""`isobit doctor`: show the machine, the engine of each dtype, and whether the kernels keep the order."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from isobit.cli import doctor_device
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation import native
from isobit.foundation.machine import fingerprint
from isobit.foundation.records import Attestation, Fingerprint
from isobit.ops import dispatch
from isobit.order.plan import VERSION


def run(options: argparse.Namespace) -> int:
    """Print the findings. The exit code is 0 if attested native kernels serve."""
    if options.device:
        return doctor_device.run(options)
    if options.record or options.operators:
        raise ArgumentError(
            expected="--device with --record or --operators",
            received="none",
            remedy="add --device cuda, or --device sm_90 to run compiled code on this CPU",
        )
    missing = native.load()
    found = dispatch.attestations()
    machine = fingerprint(VERSION)
    executor = "native" if dispatch.has_native() else "portable"
    if options.json:
        record = {
            "provenance": provenance_of(options, [machine.flags, *map(str, found)]),
            "machine": machine,
            "executor": executor,
            "native_missing": missing,
            "engines": engine_names(),
            "attestations": found,
        }
        say_json(record)
    else:
        show(make_console(100), machine, executor, missing, found)
    if missing is not None:
        return 2
    return 0 if executor == "native" else 1


def engine_names() -> dict[str, str]:
    """Return the engine of each dtype: its name first, then what carries it out."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = {}
    for dtype in dispatch.NATIVE_DTYPES:
        name = str(dtype).removeprefix("torch.")
        if not dispatch.serves_native(dtype):
            names[name] = "chain, portable"
        elif dispatch.engine_of(dtype) == "amx":
            names[name] = "amx, even and odd chains of 32"
        else:
            wide = "" if dtype == torch.float32 else ", widened to fp32"
            names[name] = f"chain, {capability}{wide}"
    return names


def show(
    console: Console,
    machine: Fingerprint,
    executor: str,
    missing: str | None,
    found: tuple[Attestation, ...],
) -> None:
    """Print the findings as a table."""
    facts = Table(show_header=False, box=None)
    facts.add_column()
    facts.add_column(overflow="fold")  # a long path is broken, not cut off
    facts.add_row("cpu", f"{machine.cpu}, {machine.capability}, {machine.cores} cores")
    facts.add_row("torch", f"{machine.torch}, {machine.threads} threads, Python {machine.python}")
    facts.add_row("kernels", machine.flags if missing is None else missing)
    facts.add_row("order", f"version {machine.order_version}")
    facts.add_row("executor", executor)
    console.print(facts)
    table = Table("dtype", "engine", "order", "checks", "detail")
    by_dtype = {a.dtype: a for a in found}
    for name, engine in engine_names().items():
        seen = by_dtype.get(name)
        if seen is None:
            table.add_row(name, engine, "by definition", "0", "no native kernel to attest")
        else:
            word = "kept" if seen.kept else "BROKEN"
            table.add_row(name, engine, word, str(seen.checks), seen.detail)
    console.print(table)
    if missing is not None or executor == "portable":
        console.print(f"remedy: {native.remedy(missing or '')}", soft_wrap=True)
