"""Picks the executor of a call, native where it is attested, else portable; never per shape. Tells who asks to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module

import torch

from isobit import native
from isobit.records import Attestation

# Each has an attest.py that says where its native results differ from its portable ones at hard inputs of a dtype. They
# are imported when asked, so that no operator's digest holds the others' source.
OPERATORS = (
    "softmax",
    "log_softmax",
    "attention",
    "logprob",
    "exact_sum",
    "rms_norm",
    "layer_norm",
    "embedding",
    "elements",
)
# fp64 serves gradcheck; it has the order's tree and no native kernel.
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def attestations() -> tuple[Attestation, ...]:
    """What the loaded kernels were found to do; empty where there are none. Attested once per process."""
    if native.load() is not None:
        return ()
    torch.ops.isobit.attest(True)  # the probes are calls of the kernels themselves
    try:
        found = tuple(attest_rows(a) for a in import_module("isobit.ops.linear.attest").attest_kernels())
    except BaseException:
        torch.ops.isobit.attest(False)
        raise
    torch.ops.isobit.attest(all(a.kept for a in found))
    return found


def attest_rows(products: Attestation) -> Attestation:
    """The dtype's attestation, held to the portable executor of every other operator too."""
    for operator in OPERATORS if products.kept else ():
        products = replace(products, checks=products.checks + 1)
        attest = import_module(f"isobit.ops.{operator}.attest")
        found = attest.difference(getattr(torch, products.dtype))
        if found is not None:
            return replace(products, kept=False, detail=f"{found} differs from the portable executor")
    return products


@lru_cache(maxsize=1)
def has_native() -> bool:
    """Whether native kernels are built, loaded and attested."""
    found = attestations()
    return bool(found) and all(a.kept for a in found)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_native(dtype: torch.dtype) -> bool:
    """Whether calls of this dtype go to native kernels."""
    return dtype in NATIVE_DTYPES and has_native()


def engine_of(dtype: torch.dtype) -> str:
    """The engine whose leaf order calls of this dtype have; it is part of every digest's meaning."""
    return "amx" if dtype == torch.bfloat16 and is_native(dtype) and native.pairs_bf16() else "chain"


# ---- which executors ran ---------------------------------------------------------------------------------


# Of operators whose launches have other sizes than (rows, n).
SIZE_NAMES: dict[str, tuple[str, ...]] = {"linear": ("rows", "k", "n")}


@dataclass(frozen=True)
class Launch:
    """One forward call of an operator, with its own sizes: linear's are (rows, K, N), a row function's (rows, n)."""

    operator: str
    executor: str  # native or portable
    dtype: str
    sizes: tuple[int, ...]

    def named(self) -> dict[str, int]:
        """Sizes by name: two problems with the same numbers in other places differ."""
        names = SIZE_NAMES.get(self.operator, ("rows", "n"))
        if len(names) != len(self.sizes):
            names = tuple(f"size {at}" for at in range(len(self.sizes)))
        return dict(zip(names, self.sizes, strict=True))


_recordings: list[list[Launch]] = []


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """The launches of this process while the context is open, of all its threads; compiled code is not seen."""
    launches: list[Launch] = []
    _recordings.append(launches)
    try:
        yield launches
    finally:
        # By identity: two recordings of the same launches are equal.
        del _recordings[next(i for i, known in enumerate(_recordings) if known is launches)]


def is_recording() -> bool:
    """Whether anyone asks; every call of every operator does, so that what a launch is told with costs nothing else."""
    return not torch.compiler.is_compiling() and bool(_recordings)


def record(operator: str, native: bool, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Tells every open recording of a launch."""
    launch = Launch(operator, "native" if native else "portable", str(dtype).removeprefix("torch."), sizes)
    for recording in _recordings:
        recording.append(launch)
