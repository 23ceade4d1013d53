"""`isobit doctor --device`: attest the Triton executors on a card, or compiled for one and run in the PTX machine.

Three things are compared: bits of every operator with its definition, the arithmetic of matrix products with the one
that is defined for the GPU, and the texts of the kernels with those that the PTX machine runs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from isobit.certifying.running.backends import MachineBackend
from isobit.certifying.running.card import CardBackend
from isobit.certifying.running.kernel_texts import KernelText, distinct
from isobit.cli.devices import Device, find_device
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say, say_json
from isobit.contracts.language.grammar import suggest
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation import backends, files
from isobit.foundation.records import Attestation, to_json
from isobit.ops.gpu.attestation import (
    OPERANDS,
    PRODUCTS,
    attest_operator,
    expected_engine,
    reveal_leaf,
)
from isobit.ops.gpu.executors import DTYPES, OPERATORS
from isobit.order.plan import VERSION
from isobit.reveal.tensor_core import FoundLeaf


@dataclass(frozen=True)
class Findings:
    """What was found on one device: attestations by operator, leaves by dtype, and the texts of kernels."""

    operators: dict[str, list[Attestation]]
    expected_leaf: str
    leaves: list[FoundLeaf]
    kernels: list[KernelText]

    @property
    def attestations(self) -> list[Attestation]:
        """The attestations of all operators."""
        return [one for row in self.operators.values() for one in row]

    def is_expected(self, leaf: FoundLeaf) -> bool:
        """Return whether a leaf is the one that is defined for the device."""
        return self.expected_leaf in leaf.engines

    @property
    def other_texts(self) -> list[KernelText]:
        """The kernels whose text is not the one that the machine runs."""
        return [text for text in self.kernels if text.in_machine and not text.same]

    @property
    def kept(self) -> bool:
        """Whether something was attested, and nothing differs."""
        return (
            bool(self.attestations)
            and all(one.kept for one in self.attestations)
            and all(map(self.is_expected, self.leaves))
            and not self.other_texts
        )

    def record(self) -> dict[str, Any]:
        """Return what a JSON record has of them."""
        leaves = [
            {**asdict(leaf), "expected": self.expected_leaf, "kept": self.is_expected(leaf)}
            for leaf in self.leaves
        ]
        kernels = [{**asdict(text), "same": text.same} for text in self.kernels]
        return {"kept": self.kept, "operators": self.operators, "leaf": leaves, "kernels": kernels}


def run(options: argparse.Namespace) -> int:
    """Attest, print the findings, and write the record."""
    operators = chosen_operators(options.operators)
    check_record(options.record)
    device = find_device(options.device)
    found = attest(device, operators, options.quiet)
    told = [*map(str, device.facts.items()), *map(str, found.attestations), str(found.leaves)]
    origin = provenance_of(options, [*told, *map(str, found.kernels)])
    record = {"provenance": origin, "device": device.facts, "order_version": VERSION}
    record |= found.record()
    if options.record:
        files.write_text(Path(options.record), to_json(record) + "\n")
    if options.json:
        say_json(record)
    else:
        show(device, found)
    return 0 if found.kept else 1


def attest(device: Device, operators: tuple[str, ...], quiet: bool) -> Findings:
    """Compare leaves and operators on a device, and keep the texts of the kernels that ran."""
    texts: list[KernelText] = []
    backend: backends.Backend = CardBackend(device.target, texts)
    if device.is_virtual:
        backend = MachineBackend(device.target, texts=texts)
    wanted = tuple(OPERANDS) if set(PRODUCTS) & set(operators) else ()
    found: dict[str, list[Attestation]] = {}
    leaves = []
    total = len(operators) * len(DTYPES) + len(wanted)
    with Steps(f"attesting on {device.name}", total, quiet, SELDOM) as steps, backends.use(backend):
        for dtype in wanted:
            leaves.append(look_at_leaf(dtype, device))
            steps.done(f"products of {dtype}")
        for operator in operators:
            for dtype in DTYPES:
                found.setdefault(operator, []).append(
                    attest_operator(operator, dtype, device.place)
                )
                steps.done(f"{operator} {dtype}")
    return Findings(found, expected_engine(device.target), leaves, distinct(texts))


def look_at_leaf(dtype: torch.dtype, device: Device) -> FoundLeaf:
    """Reveal a leaf; one whose kernels raise agrees with no engine."""
    try:
        return reveal_leaf(dtype, device.place)
    except Exception as error:
        missing = f"not seen ({in_one_line(error)})"
        return FoundLeaf(OPERANDS[dtype], None, None, missing, missing, (), 0)


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


def show(device: Device, found: Findings) -> None:
    """Print the leaf, a row per operator, and the kernels."""
    console = make_console(100)
    for name, value in device.facts.items():
        say(f"{name}: {value}")
    for leaf in found.leaves:
        word = "as defined" if found.is_expected(leaf) else "NOT as defined"
        engine = found.expected_leaf or f"none is defined for {device.target}"
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
    for text in found.other_texts:
        say(f"another text: {text.kernel} ({text.options}): {text.digest}, not {text.in_machine}")
