"""tcgen05 of sm_100: whole GEMMs have the plan's names and bits, and what a GPU would not order is refused."""

import re

import numpy as np
import pytest

from isobit.certifying.machine import tensor_memory
from isobit.certifying.running.refusals import (
    BarrierWaitError,
    DivergentBranchError,
    MachineError,
    RaceError,
)
from isobit.errors import UnsupportedError
from tests.certifying import asynchronous_kernels as kernels

SMALL = (100, "bf16", 64, 64, 32, 160)
SHAPES = [
    {"dtype": "bf16", "BM": 64, "BN": 64, "BK": 32, "K": 160},
    {"dtype": "fp16", "BM": 128, "BN": 32, "BK": 64, "K": 128, "trans": (1, 1), "stages": 4},
    {"dtype": "bf16", "BM": 128, "BN": 64, "BK": 32, "K": 64, "warps": 8, "stages": 1},
    {"dtype": "bf16", "BM": 64, "BN": 128, "BK": 16, "K": 64, "trans": (0, 1), "M": 70},
    {"dtype": "fp32", "BM": 64, "BN": 32, "BK": 32, "K": 64},  # tf32
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_is_the_plan(shape):
    assert kernels.run_gemm(100, **shape) == (0, 0)


@pytest.mark.parametrize("rows", [64, 128])
def test_operand_in_tensor_memory_is_the_plan(rows):
    assert kernels.run_two_dots(100, rows, 32, 64, 96, 2, 4) == (0, 0)


def test_sm_103_emits_the_same():
    assert kernels.run_gemm(103, "bf16", 64, 32, 32, 64) == (0, 0)


@pytest.mark.parametrize(
    ("pattern", "which", "error"),
    [
        (r"fence\.proxy\.async", 0, RaceError),
        (r"cp\.async\.wait_group", 0, RaceError),
        (r"tcgen05\.wait::st", 0, RaceError),
        (r"tcgen05\.wait::ld", 0, RaceError),
        (r"mbarrier\.try_wait", 0, RaceError),  # tiles are overwritten while the mma may read them
        (r"mbarrier\.try_wait", -1, BarrierWaitError),
        (r"mbarrier\.init", 0, BarrierWaitError),
        (r"tcgen05\.commit", 0, BarrierWaitError),
        (r"tcgen05\.commit", -1, BarrierWaitError),
        (r"tcgen05\.dealloc", 0, UnsupportedError),
    ],
)
def test_missing_order_is_refused(pattern, which, error):
    with pytest.raises(error):
        kernels.run_gemm(*SMALL, edit=kernels.without(pattern, which))


def test_accumulator_is_not_read_before_its_barrier():
    """Without the wait and without the end of the barrier objects, the load itself is the race."""

    def edit(ptx):
        for pattern in (r"mbarrier\.try_wait", r"mbarrier\.inval", r"mbarrier\.inval"):
            ptx = kernels.without(pattern, -1)(ptx)
        return ptx

    with pytest.raises(RaceError, match=r"tensor memory that it uses: tcgen05\.mma"):
        kernels.run_gemm(*SMALL, edit=edit)


def test_store_to_tensor_memory_needs_a_barrier():
    def edit(ptx):
        store = [m.end() for m in re.finditer(r"tcgen05\.wait::st", ptx)][2]
        return ptx[:store] + kernels.without(r"bar\.sync")(ptx[store:])

    with pytest.raises(RaceError, match=r"tensor memory that it uses: tcgen05\.st"):
        kernels.run_two_dots(100, 64, 32, 64, 96, 2, 4, edit=edit)


# Triton 3.7.1: descriptor constants of the two mma of a block, and the instruction descriptor.
DESCRIPTOR = r"(or\.b64\s+%rd\d+, %rd\d+, )(-?\d{15,})"
CHANGES = {
    "swapped": kernels.exchanged("9223301530671644672", "9223301530671644670"),
    "stride": kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) - (1 << 32)}"),
    "accumulate": kernels.replaced(r"(mov\.pred\s+%p\d+, )-1", lambda m: f"{m[1]}0", which=-1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_text_has_other_names(change):
    bits, names = kernels.run_gemm(*SMALL, edit=CHANGES[change])
    assert names > 0
    assert bits > 0


INSTRUCTION = r"(mov\.b32\s+%r\d+, )68158608;"


@pytest.mark.parametrize(
    "edit",
    [
        kernels.replaced(INSTRUCTION, lambda m: f"{m[1]}{68158608 | 1 << 13};"),  # A negated
        kernels.replaced(INSTRUCTION, lambda m: f"{m[1]}{68158608 | 1 << 2};"),  # sparse
        kernels.replaced(INSTRUCTION, lambda m: f"{m[1]}{68158608 & ~(0b11 << 4)};"),  # D in f16
        kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) | 1 << 52}"),
        kernels.replaced(DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) & ~(0b111 << 61)}"),
        kernels.replaced(r"kind::f16", "kind::f8f6f4"),
        kernels.replaced(r"cta_group::1\.kind", "cta_group::2.kind"),
        kernels.replaced(r"16x32bx2\.x32\.b32", "16x256b.x8.b32"),
    ],
)
def test_unknown_form_is_refused(edit):
    with pytest.raises((MachineError, UnsupportedError)):
        kernels.run_gemm(*SMALL, edit=edit)


def test_one_thread_starts_the_tensor_core():
    with pytest.raises(DivergentBranchError, match="32 threads"):
        kernels.run_gemm(*SMALL, edit=kernels.replaced(r"@%p\d+ (tcgen05\.mma)", lambda m: m[1]))


def test_barrier_inside_the_branch_of_a_warp_is_refused():
    edit = kernels.replaced(r"(@%p\d+ tcgen05\.commit)", lambda m: f"bar.sync 0; {m[1]}")
    with pytest.raises(DivergentBranchError, match="32 of 128 threads"):
        kernels.run_gemm(*SMALL, edit=edit)


def test_lanes_of_another_warp_are_refused():
    addresses = np.repeat([1 << 21, 0, 2 << 21, 3 << 21], 32)
    with pytest.raises(UnsupportedError, match="own lanes"):
        tensor_memory.message_cells("32x32b", 4, addresses, None)


def test_columns_that_nobody_allocated_are_refused():
    memory = tensor_memory.TensorMemory(names=False)
    memory.allocate(32)
    with pytest.raises(UnsupportedError, match="column 32"):
        memory.check_allocated(np.arange(40), "tcgen05.ld")
