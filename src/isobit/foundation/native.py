"""Load the native kernels, or give the reason why they cannot serve.

[Note: One OpenMP runtime]
The library names no OpenMP library, so the loader finds its symbols where torch's are found: a GNU, LLVM or Intel
runtime, under whatever file name torch ships it. Other packages (NumPy, SciPy, scikit-learn) may load a runtime of
their own, which does no harm. What would: kernels that are bound to another runtime than torch, since they would ignore
`torch.set_num_threads` and keep a second pool of threads. That is tested by behaviour after loading.
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1]
LIBRARY = "_native.so"
# The path of the library that was loaded, or "not built". No entry where it could not be loaded, or is
# bound to another OpenMP runtime.
_loads: list[str] = []


@lru_cache(maxsize=1)
def load() -> str | None:
    """Load the library once; return None, or the reason why there are no native kernels."""
    path = FOLDER / LIBRARY
    if not path.exists():
        noted = FOLDER / "native_build_failure.txt"
        known = noted.read_text().strip() if noted.exists() else ""
        _loads.append("not built")
        return f"not built: {known or 'the package was installed without them'}"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        refused = find_second_openmp(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        cause = error.__cause__ or error  # torch's own message does not name the symbol
        return f"built, but not loadable under torch {torch.__version__}: {cause}"
    if refused is None:
        _loads.append(str(path))
    return refused


def remedy(reason: str) -> str:
    """Return what a person can do about a reason that `load` gave, or about kernels that do not attest."""
    if "pure Python" in reason:
        return (
            "on Linux on x86-64, install the wheel for it; elsewhere the portable executor serves the CPU, and GPUs "
            "have their own kernels"
        )
    if reason.startswith("not built"):
        return "install a C++ compiler (g++ 12 or later), then install isobit again"
    if reason.startswith("bound to"):
        return (
            "load no OpenMP library before torch (LD_PRELOAD, ctypes), or build the kernels anew "
            "with `pip install --no-build-isolation --no-deps --force-reinstall .` in the checkout"
        )
    return (
        "use a torch version of docs/reference/torch-versions.md, or build the kernels for this "
        "torch: `pip install --no-build-isolation --no-deps --force-reinstall .` in the checkout"
    )


def find_second_openmp(library: ctypes.CDLL) -> str | None:
    """Return None if kernels and torch share one OpenMP runtime, else the names of the runtimes."""
    library.isobit_shares_openmp.restype = ctypes.c_bool
    if library.isobit_shares_openmp():
        return None
    library.isobit_openmp_address.restype = ctypes.c_void_p
    own = mapped_file(library.isobit_openmp_address())
    others = ", ".join(sorted(openmp_files() - {own})) or "one that it was linked with"
    return f"bound to another OpenMP runtime than torch: the kernels to {own}, torch to {others}"


def openmp_files() -> set[str]:
    """Return the OpenMP runtimes that this process has loaded."""
    runtime = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*$")
    return {path for _, _, path in mappings() if runtime.search(path)}


def mapped_file(address: int) -> str:
    """Return the file that is mapped at an address."""
    return next((path for start, end, path in mappings() if start <= address < end), "unknown")


def mappings() -> list[tuple[int, int, str]]:
    """Return (start, end, path) of the files that this process has mapped; empty where Linux's /proc is missing."""
    listing = Path("/proc/self/maps")
    rows = listing.read_text().splitlines() if listing.exists() else []
    found = []
    for row in rows:
        fields = row.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(word, 16) for word in fields[0].split("-"))
            found.append((start, end, fields[5]))
    return found


def load_count() -> int:
    """Return how many times this process loaded the library, or found that it was not built."""
    return len(_loads)


def build_flags() -> str:
    """Return the compiler flags, read back from the library itself."""
    return str(torch.ops.isobit.build_flags()) if load() is None else "no library"


def pairs_bf16() -> bool:
    """Tell whether the tile engine takes bf16 as pairs (AMX); elsewhere bf16 is widened to fp32."""
    return load() is None and bool(torch.ops.isobit.pairs_bf16())
