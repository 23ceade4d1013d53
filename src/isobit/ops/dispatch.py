"""Attest the native kernels, and choose the executor of a call: native where attested, else portable.

The choice depends on the dtype and on the attestation, never on a shape.

[Note: complete before it is used]
An operator that torch knows without its gradient returns `grad = None` silently. The native operators exist once their
library is loaded, so `when_attested` registers their formulas then, all of them and under a lock, before `has_native`
returns True. A module that is imported later registers its own while it is imported.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from isobit.errors import PortableWarning, UnsupportedError
from isobit.foundation import backends, native
from isobit.foundation.machine import run_apart
from isobit.foundation.records import Attestation

# Mark functions whose results torch.compile takes as constants.
#
# torch.compiler.assume_constant_result does the same, and imports the compiler, which takes as long as torch itself.

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call a function while it traces, and keep the result in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


T = TypeVar("T")

# Every folder with an op.py is an operator. A function `difference` in its portable.py, or in attest.py where it is
# long, compares an executor with the portable one on hard inputs. Both are imported by name when they are needed, so
# that no operator's digest covers the source of the others.
OPERATORS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/op.py")))
FOLDERS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/portable.py")))
# fp64 is for gradcheck: it has the same tree and no native kernel.
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_lock = threading.Lock()
_pending: list[Callable[[], None]] = []
_is_attested = False


def when_attested(register: Callable[[], None]) -> None:
    """Call `register` once the native kernels are attested; at once where they are already."""
    with _lock:
        if _is_attested:
            register()
        else:
            _pending.append(register)


def register_native_operators() -> None:
    """Run everything that waits for the native kernels."""
    global _is_attested
    with _lock:
        while _pending:
            _pending[0]()
            del _pending[0]
        _is_attested = True


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

    The bits of the kernels must not depend on the settings under which a process happens to call isobit first, so
    neither may this.
    """
    if native.load() is not None:
        return ()
    try:
        torch.ops.isobit.attest(True)  # the probes are calls of the kernels themselves
        with enabled_onednn():
            found = run_apart(attest_kernels)
        kept = all(a.kept for a in found)
        if kept:
            register_native_operators()
        torch.ops.isobit.attest(kept)
    except Exception as error:
        # A kernel that is missing or raises: the library was built for another torch or isobit.
        withdraw_attestation()
        return tuple(unattested(dtype, error) for dtype in NATIVE_DTYPES)
    except BaseException:
        withdraw_attestation()
        raise
    return found


@contextmanager
def enabled_onednn() -> Iterator[None]:
    """Enable oneDNN, which torch.backends.mkldnn.flags may have disabled for the process; the kernels ask for it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


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
    """Compare the kernels of every dtype with the order of addition, then with the portable executors."""
    products = find_attestation("linear").attest_kernels()
    return tuple(attest_operators(attestation) for attestation in products)


def attest_operators(products: Attestation) -> Attestation:
    """Extend a dtype's attestation of products by a comparison of every other operator with its portable executor."""
    for operator in FOLDERS if products.kept else ():
        difference = getattr(find_attestation(operator), "difference", None)
        if operator == "linear" or difference is None:  # it is attested, or has no native kernel
            continue
        products = replace(products, checks=products.checks + 1)
        found = difference(getattr(torch, products.dtype))
        if found is not None:
            return replace(
                products, kept=False, detail=f"{found} differs from the portable executor"
            )
    return products


def find_attestation(operator: str) -> Any:
    """Import the module that compares an operator's executors with its definition: attest.py, else portable.py."""
    apart = (Path(__file__).parent / operator / "attest.py").is_file()
    return import_module(f"isobit.ops.{operator}.{'attest' if apart else 'portable'}")


@lru_cache(maxsize=1)
def has_native() -> bool:
    """Return whether native kernels are built, loaded and attested."""
    found = attestations()
    return bool(found) and all(a.kept for a in found)


@constant_in_graphs
def is_native(dtype: torch.dtype) -> bool:
    """Return whether calls of this dtype use native kernels; warn once where they should and cannot.

    Raises:
        UnsupportedError: If a backend for Triton executors is chosen: what asks here has none.
    """
    refuse_chosen()
    if dtype not in NATIVE_DTYPES:
        return False
    if has_native():
        return True
    warn_of_portable()
    return False


def refuse_chosen() -> None:
    """Raise if a backend for Triton executors is chosen; called by what has only native and portable executors."""
    backend = backends.chosen()
    if backend is not None:
        raise UnsupportedError(
            expected="functions with a Triton executor while a backend is chosen",
            received=f"one that only the CPU's executors serve, while {backend} is chosen",
            remedy="call it outside of isobit.certifying.executing",
        )


def executor_of(dtype: torch.dtype) -> str:
    """Return the name of the executor that serves calls of this dtype on the CPU."""
    return "native" if is_native(dtype) else "portable"


def serves_native(dtype: torch.dtype) -> bool:
    """Return the same as `is_native` without a warning."""
    return dtype in NATIVE_DTYPES and has_native()


@lru_cache(maxsize=1)
def warn_of_portable() -> None:
    """Warn that calls will be slow, and why; once per process."""
    broken = "; ".join(f"{a.dtype}: {a.detail}" for a in attestations() if not a.kept)
    reason = native.load() or f"kernels that do not keep the order ({broken})"
    warnings.warn(
        "isobit: expected native kernels; calls use the portable executor, which keeps one order too but is thousands "
        f"of times slower\n  received: {reason}\n  remedy: {native.remedy(reason)}; `isobit doctor` shows the state",
        PortableWarning,
        stacklevel=2,
    )


def engine_of(dtype: torch.dtype) -> str:
    """Return the engine, i.e. the leaf arithmetic, of calls of this dtype; digests are comparable per engine."""
    return (
        "amx"
        if dtype == torch.bfloat16 and serves_native(dtype) and native.pairs_bf16()
        else "chain"
    )
