"""`isobit doctor`: show the machine, the engine of each dtype, and whether the kernels keep the order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say, say_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.records import Attestation, Fingerprint, to_json
from isobit.order.plan import VERSION

if TYPE_CHECKING:
    from isobit.library.on_gpu.attesting import Findings
    from isobit.library.on_gpu.devices import Device


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        description="Show the machine and the engine of each dtype, then reveal the order in which the loaded "
        "kernels add and compare it with the defined one. Exit 0: kept; 1: not kept, so the portable executor "
        "serves; 2: no native kernels to attest, so the portable executor serves.",
        epilog="examples: isobit doctor --json; isobit doctor --device cuda --record card.json --sign key; "
        "isobit doctor --read card.json --key key.pub; "
        "isobit doctor --device sm_90 --operators rms_norm linear",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="attest the GPU executors instead: cuda or cuda:1 on a card, or a target such as sm_90, whose compiled "
        "code is run on this CPU. Compares the arithmetic of matrix products, every operator, and the texts of the "
        "kernels with those of the PTX machine. Exit 0: kept; 1: not kept; 2: no such device",
    )
    parser.add_argument(
        "--operators", nargs="+", metavar="NAME", help="with --device, attest only these operators"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="with --device, also judge the contracts that GPUs have at L2, time each form next to torch's own, and "
        "write everything to one JSON file; --operators leaves contracts and times out",
    )
    parser.add_argument(
        "--sign", metavar="KEY", help="with --record, sign it with this Ed25519 key"
    )
    parser.add_argument(
        "--read", metavar="FILE", help="check a record's digest and signature, and print it"
    )
    parser.add_argument(
        "--key", metavar="KEY", help="with --read, the public key that must have signed the record"
    )
    add_quiet(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print the findings. The exit code is 0 if attested native kernels serve."""
    check_options(options)
    if options.read:
        return run_read(options)
    if options.device:
        return run_device(options)
    from isobit.foundation import native
    from isobit.foundation.machine import fingerprint
    from isobit.ops import dispatch

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


def check_options(options: argparse.Namespace) -> None:
    """Raise for options that have no meaning together."""
    if (options.record or options.operators) and not options.device:
        raise ArgumentError(
            expected="--device with --record or --operators",
            received="none",
            remedy="add --device cuda, or --device sm_90 to run compiled code on this CPU",
        )
    if (options.sign and not options.record) or (options.key and not options.read):
        raise ArgumentError(
            expected="--sign with --record, and --key with --read",
            received="--sign or --key alone",
            remedy="isobit doctor --device cuda --record FILE --sign KEY; "
            "isobit doctor --read FILE --key KEY.pub",
        )
    if options.read and options.device:
        raise ArgumentError(
            expected="--read or --device",
            received="both",
            remedy="make a record with --device and --record, and read it with --read",
        )


def engine_names() -> dict[str, str]:
    """Return the engine of each dtype: its name first, then what carries it out."""
    import torch

    from isobit.ops import dispatch

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
    from isobit.foundation import native

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


def run_device(options: argparse.Namespace) -> int:
    """Attest the GPU executors of a device, print the findings, and write the record."""
    from isobit.library.on_gpu.attesting import attest, chosen_operators, count_steps
    from isobit.library.on_gpu.devices import find_device

    operators = chosen_operators(options.operators)
    check_record(options.record, options.sign)
    device = find_device(options.device)
    title = f"attesting on {device.name}"
    with Steps(title, count_steps(operators), options.quiet, SELDOM) as steps:
        found = attest(device, operators, steps.done)
    whole = bool(options.record) and not options.operators and not device.is_virtual
    more = judge_and_time(device, options) if whole else {}
    told = [*map(str, device.facts.items()), *map(str, found.attestations), str(found.leaves)]
    origin = provenance_of(options, [*told, *map(str, found.kernels)])
    record = {"provenance": origin, "device": device.facts, "order_version": VERSION}
    record |= found.record() | more
    record["kept"] = found.kept and more.get("contracts_kept", True)
    if options.record:
        from isobit.library.on_gpu.card_records import seal

        files.write_text(Path(options.record), to_json(seal(record, options.sign)) + "\n")
    if options.json:
        say_json(record)
    else:
        show_device(device, found)
        show_more(record)
    return 0 if record["kept"] else 1


def judge_and_time(device: Device, options: argparse.Namespace) -> dict[str, Any]:
    """Judge contracts on a card, and time its forms."""
    from isobit.certifying.running.card import CardBackend
    from isobit.foundation import backends
    from isobit.library.on_gpu import card_records
    from isobit.library.on_gpu.plans import PLANS

    with (
        Steps(f"contracts on {device.name}", len(PLANS), options.quiet, SELDOM) as steps,
        backends.use(CardBackend(device.target)),
    ):
        judged = card_records.judge_contracts(device, None, steps.done)
    return {
        "contracts": judged,
        "contracts_kept": card_records.contracts_kept(judged),
        "times": card_records.timings_as_json(card_records.time_forms(device.place)),
    }


def run_read(options: argparse.Namespace) -> int:
    """Print a record that someone sent. The exit code is 0 if everything in it is kept, and 1 if not."""
    from isobit.library.on_gpu.card_records import read

    record = read(options.read, options.key)
    if options.json:
        say_json(record)
        return 0 if record["kept"] else 1
    facts = record.get("device")
    for name, value in facts.items() if isinstance(facts, dict) else ():
        say(f"{name}: {value}")
    show_attested(record)
    show_more(record)
    signed = record.get("signature")
    say(f"signed by key {signed['key']}" if signed else "not signed")
    say("everything is kept" if record["kept"] else "NOT everything is kept")
    return 0 if record["kept"] else 1


def rows_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the rows of a part of a record; what is not a row is left out."""
    found = record.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def show_attested(record: dict[str, Any]) -> None:
    """Print the attestations, leaves and kernels of a record that was read."""
    operators = record.get("operators")
    known = operators if isinstance(operators, dict) else {}
    found = [one for name in known for one in rows_of(known, name)]
    say(f"{sum(one.get('kept') is True for one in found)} of {len(found)} attestations kept")
    for one in found:
        if one.get("kept") is not True:
            say(f"{one.get('dtype')}: {one.get('detail')}")
    for leaf in rows_of(record, "leaf"):
        word = "as defined" if leaf.get("kept") is True else "NOT as defined"
        say(f"products of {leaf.get('dtype')}: {word} ({leaf.get('expected')})")
    kernels = rows_of(record, "kernels")
    same = sum(one.get("same") is True for one in kernels)
    say(f"{same} of {len(kernels)} kernels have the PTX that the machine runs")
    known_code = [one for one in kernels if one.get("recorded_sass")]
    equal = sum(one.get("sass") == one.get("recorded_sass") for one in known_code)
    say(
        f"{equal} of {len(known_code)} kernels have the machine code that is recorded for their PTX"
    )


def show_more(record: dict[str, Any]) -> None:
    """Print the contracts and the times of a record, if it has them."""
    judged = rows_of(record, "contracts")
    if judged:
        kept = sum(one.get("verdict") == "kept" for one in judged)
        cases = sum(one["cases"] for one in judged if isinstance(one.get("cases"), int))
        say(f"{kept} of {len(judged)} claims of contracts kept at L2, in {cases} cases")
        for one in judged:
            if one.get("verdict") != "kept":
                say(
                    f"{one.get('contract')}/{one.get('claim')}: {one.get('verdict')}: {one.get('detail')}"
                )
    times = rows_of(record, "times")
    if times:
        table = Table("form", "isobit, µs", "stock, µs", "stock")
        for one in times:
            numbers = [one.get("isobit_us"), one.get("stock_us")]
            shown = [f"{n:.1f}" if isinstance(n, (int, float)) else "raised" for n in numbers]
            table.add_row(str(one.get("form")), *shown, str(one.get("stock")))
        make_console(100).print(table)


def check_record(path: str | None, key: str | None) -> None:
    """Raise if the record cannot be written or signed, before minutes of work."""
    if key:
        from isobit.contracts.store.evidence import read_private

        read_private(key)
    if path and (
        not Path(path).parent.is_dir() or (Path(path).exists() and not Path(path).is_file())
    ):
        raise ArgumentError(
            expected="a file in a folder that exists",
            received=f"--record {path}",
            remedy="give another path",
        )


def show_device(device: Device, found: Findings) -> None:
    """Print the leaf, a row per operator, and the kernels."""
    from isobit.ops.gpu.executors import DTYPES

    console = make_console(100)
    for name, value in device.facts.items():
        say(f"{name}: {value}")
    for leaf in found.leaves:
        word = "as defined" if found.is_expected(leaf) else "NOT as defined"
        engine = found.expected_leaf or f"none is defined for {device.target}"
        if found.is_expected(leaf) and not found.expected_leaf:
            word = f"revealed as {leaf.engines[0]}, which its products are compared with"
        say(f"products of {leaf.dtype}: {leaf}: {word} ({engine})")
        if not found.is_expected(leaf):
            say(f"  engines that it agrees with: {', '.join(leaf.engines) or 'none'}")
    table = Table("operator", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    for operator, row in found.operators.items():
        table.add_row(operator, *(f"kept, {a.engine}" if a.kept else "BROKEN" for a in row))
    console.print(table)
    kept = sum(one.kept for one in found.attestations)
    say(f"{kept} of {len(found.attestations)} kept: bits equal the definition's on hard inputs")
    for one in found.attestations:
        if not one.kept:
            say(f"{one.dtype}: {one.detail}")
    show_kernels(device, found)


def show_kernels(device: Device, found: Findings) -> None:
    """Print how many kernels have the text that the machine runs, and those that do not."""
    if device.is_virtual:
        say(
            f"{len(found.kernels)} compiled kernels were run; digests of their PTX are in the record"
        )
        return
    same = sum(text.same for text in found.kernels)
    say(f"{same} of {len(found.kernels)} compiled kernels are the PTX that the machine runs")
    recorded = [text for text in found.kernels if text.recorded_sass]
    say(
        f"{len(recorded) - len(found.other_code)} of {len(recorded)} have the machine code that is recorded for them"
    )
    for text in found.other_code:
        say(
            f"other machine code: {text.kernel} ({text.options}): {text.sass}, not {text.recorded_sass}"
        )
    for text in found.other_texts:
        say(f"another text: {text.kernel} ({text.options}): {text.digest}, not {text.in_machine}")
