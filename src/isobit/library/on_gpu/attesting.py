"""Attest the Triton executors on a card, or compiled for one and run in the PTX machine.

Three things are compared: bits of every operator with its definition, the arithmetic of matrix products with the one
that is defined for the GPU, and the texts of the kernels with those that the PTX machine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from isobit.certifying.running.backends import MachineBackend
from isobit.certifying.running.card import CardBackend
from isobit.certifying.running.compile import KernelText, distinct
from isobit.contracts.language.grammar import suggest
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation import backends
from isobit.foundation.records import Attestation
from isobit.library.on_gpu.devices import Device
from isobit.ops.gpu.attestation import (
    OPERANDS,
    PRODUCTS,
    attest_operator,
    expected_engine,
    reveal_leaf,
)
from isobit.ops.gpu.executors import DTYPES, OPERATORS
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
        """Return whether a leaf is the one that is defined for the device, or one engine's where none is defined."""
        return self.expected_leaf in leaf.engines if self.expected_leaf else len(leaf.engines) == 1

    @property
    def other_texts(self) -> list[KernelText]:
        """The kernels whose text is not the one that the machine runs."""
        return [text for text in self.kernels if text.in_machine and not text.same]

    @property
    def other_code(self) -> list[KernelText]:
        """The kernels whose machine code is not the one that is recorded for their text."""
        return [
            text for text in self.kernels if text.recorded_sass and text.sass != text.recorded_sass
        ]

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


def count_steps(operators: tuple[str, ...]) -> int:
    """Return how many times `attest` reports progress."""
    return len(operators) * len(DTYPES) + len(wanted_leaves(operators))


def wanted_leaves(operators: tuple[str, ...]) -> tuple[torch.dtype, ...]:
    """Return the dtypes whose matrix products are looked at: none, if no operator multiplies."""
    return tuple(OPERANDS) if set(PRODUCTS) & set(operators) else ()


def attest(device: Device, operators: tuple[str, ...], progress: Callable[[str], None]) -> Findings:
    """Compare leaves and operators on a device, and keep the texts of the kernels that ran.

    Args:
        device: Where kernels run.
        operators: The names of the operators.
        progress: Called after each step with what was done.
    """
    texts: list[KernelText] = []
    backend: backends.Backend = CardBackend(device.target, texts)
    if device.is_virtual:
        backend = MachineBackend(device.target, texts=texts)
    found: dict[str, list[Attestation]] = {}
    leaves = []
    with backends.use(backend):
        for dtype in wanted_leaves(operators):
            leaves.append(look_at_leaf(dtype, device))
            progress(f"products of {dtype}")
        for operator in operators:
            for dtype in DTYPES:
                found.setdefault(operator, []).append(
                    attest_operator(operator, dtype, device.place)
                )
                progress(f"{operator} {dtype}")
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
