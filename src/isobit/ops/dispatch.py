"""Picks the executor of a call: native where it is attested, else portable. Never per shape, never silently."""

from __future__ import annotations

from functools import lru_cache

import torch

from isobit import native
from isobit.ops.linear import attest
from isobit.records import Attestation

# fp64 serves gradcheck; it has the order's tree and no native kernel.
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def attestations() -> tuple[Attestation, ...]:
    """What the loaded kernels were found to do; empty where there are none. Attested once per process."""
    if native.load() is not None:
        return ()
    torch.ops.isobit.attest(True)  # the probes are calls of the kernels themselves
    try:
        found = attest.attest_kernels()
    except BaseException:
        torch.ops.isobit.attest(False)
        raise
    torch.ops.isobit.attest(all(a.kept for a in found))
    return found


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
