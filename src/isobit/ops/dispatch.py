"""Picks the executor of a call: native where it is attested, else portable, never by shape. Records launches."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, update_wrapper
from importlib import import_module
from typing import Generic, TypeVar

import torch

from isobit import native
from isobit.errors import PortableWarning
from isobit.isolation import run_apart
from isobit.ops.registration import register_native_operators
from isobit.records import Attestation

T = TypeVar("T")


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


class Once(Generic[T]):
    """A function without arguments that runs once, while other threads wait for its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        update_wrapper(self, function)
        self._function, self._lock = function, threading.Lock()
        self._found: list[T] = []

    def __call__(self) -> T:
        with self._lock:
            if not self._found:
                self._found.append(self._function())
            return self._found[0]

    def cache_clear(self) -> None:
        """Forget the result."""
        with self._lock:
            self._found.clear()


@Once
def attestations() -> tuple[Attestation, ...]:
    """Attest the loaded kernels, once per process; return nothing where there are none.

    Their bits must not depend on the settings under which a process happens to call isobit first, so neither may this.
    """
    if native.load() is not None:
        return ()
    try:
        torch.ops.isobit.attest(True)  # the probes are calls of the kernels themselves
        found = run_apart(attest_kernels)
        kept = all(a.kept for a in found)
        if kept:
            register_native_operators()
        torch.ops.isobit.attest(kept)
    except (
        Exception
    ) as error:  # a kernel that is missing or raises: a library for another torch or isobit
        withdraw_attestation()
        return tuple(unattested(dtype, error) for dtype in NATIVE_DTYPES)
    except BaseException:
        withdraw_attestation()
        raise
    return found


def withdraw_attestation() -> None:
    """Make the library refuse every call."""
    if hasattr(torch.ops.isobit, "attest"):
        torch.ops.isobit.attest(False)


def unattested(dtype: torch.dtype, error: Exception) -> Attestation:
    """Return the attestation of kernels whose probes raised."""
    first = (str(error).splitlines() or [""])[0]
    detail = f"could not be compared: {type(error).__name__}: {first}"
    return Attestation(str(dtype).removeprefix("torch."), "unknown", False, 0, detail)


def attest_kernels() -> tuple[Attestation, ...]:
    """Compare the kernels of every dtype with the order, then with the portable executors."""
    products = import_module("isobit.ops.linear.attest").attest_kernels()
    return tuple(attest_rows(attestation) for attestation in products)


def attest_rows(products: Attestation) -> Attestation:
    """The dtype's attestation, held to the portable executor of every other operator too."""
    for operator in OPERATORS if products.kept else ():
        products = replace(products, checks=products.checks + 1)
        attest = import_module(f"isobit.ops.{operator}.attest")
        found = attest.difference(getattr(torch, products.dtype))
        if found is not None:
            return replace(
                products, kept=False, detail=f"{found} differs from the portable executor"
            )
    return products


@lru_cache(maxsize=1)
def has_native() -> bool:
    """Whether native kernels are built, loaded and attested."""
    found = attestations()
    return bool(found) and all(a.kept for a in found)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_native(dtype: torch.dtype) -> bool:
    """Tell whether calls of this dtype go to native kernels; warn once where there should be one and is none."""
    if serves_native(dtype):
        return True
    if dtype in NATIVE_DTYPES:
        warn_of_portable()
    return False


def serves_native(dtype: torch.dtype) -> bool:
    """Tell the same, without a call in mind."""
    return dtype in NATIVE_DTYPES and has_native()


@lru_cache(maxsize=1)
def warn_of_portable() -> None:
    """Warn that calls will be slow, and why; once per process."""
    broken = "; ".join(f"{a.dtype}: {a.detail}" for a in attestations() if not a.kept)
    reason = native.load() or f"kernels that do not keep the order ({broken})"
    warnings.warn(
        f"isobit: expected native kernels; received {reason}. The portable executor serves: one order too, but "
        "thousands of times slower (a linear of 256 rows and a weight of 1024 x 1024 took 86 s on two cores). "
        f"remedy: {native.remedy(reason)}; `isobit doctor` shows the state",
        PortableWarning,
        stacklevel=2,
    )


def engine_of(dtype: torch.dtype) -> str:
    """The engine whose leaf order calls of this dtype have; it is part of every digest's meaning."""
    return (
        "amx"
        if dtype == torch.bfloat16 and serves_native(dtype) and native.pairs_bf16()
        else "chain"
    )


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
    launch = Launch(
        operator, "native" if native else "portable", str(dtype).removeprefix("torch."), sizes
    )
    for recording in _recordings:
        recording.append(launch)
