"""Bulk copies (TMA) with tensor maps that the kernel makes: the plan's names and bits, and what is refused."""

import numpy as np
import pytest

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.machine.bulk_copies import TensorMap
from isobit.certifying.ptx import parse
from isobit.certifying.running.refusals import (
    BarrierWaitError,
    OpcodeError,
    PtxSyntaxError,
    RaceError,
)
from isobit.errors import ArgumentError
from tests.certifying import asynchronous_kernels as kernels

SHAPE = {"BM": 64, "BN": 64, "BK": 64, "K": 192, "M": 64, "N": 64}


@pytest.mark.parametrize("target", [90, 100, 120])
def test_gemm_is_the_plan(target):
    assert kernels.run_descriptors(target, **SHAPE) == (0, 0)


@pytest.mark.parametrize("target", [90, 100])
def test_rows_outside_the_tensor_are_zeros_and_not_written(target):
    shape = {**SHAPE, "BN": 32, "BK": 32, "K": 64, "M": 40, "N": 24}
    assert kernels.run_descriptors(target, **shape) == (0, 0)


@pytest.mark.parametrize("target", [90, 100])
def test_descriptors_of_the_host_are_the_plan(target):
    shape = {**SHAPE, "BN": 32, "K": 128, "M": 40}
    assert kernels.run_host_descriptors(target, **shape) == (0, 0)


def test_buffer_in_place_of_a_descriptor_is_refused():
    types = (("a_map", "tensordesc<bf16[64,64]>"), ("b_map", "tensordesc<bf16[32,64]>"))
    types += (("c_map", "tensordesc<fp32[64,32]>"),)
    constants = (("K", 128), ("BM", 64), ("BN", 32), ("BK", 64))
    ptx, _ = kernels.compiled(kernels.gemm_of_host_descriptors, 90, types, constants, 2, 4)
    with pytest.raises(ArgumentError, match="TensorArgument"):
        Machine(parse(ptx)).run((1,), [Buffer(np.zeros((64, 128), np.uint16))])


WARP_SPECIALISED = kernels.replaced(
    r"(\n\s*)ret;", lambda m: f"{m[1]}setmaxnreg.inc.sync.aligned.u32 64;{m[0]}"
)
CLUSTER = kernels.replaced(r"\.reqntid 128", ".reqntid 128 .explicitcluster .reqnctapercluster 2")


@pytest.mark.parametrize(
    ("edit", "remedy"), [(WARP_SPECIALISED, "warp_specialize=False"), (CLUSTER, "num_ctas=1")]
)
def test_specialised_warps_and_clusters_are_refused(edit, remedy):
    with pytest.raises((OpcodeError, PtxSyntaxError), match=remedy):
        kernels.run_descriptors(90, **SHAPE, edit=edit)


@pytest.mark.parametrize(
    ("target", "pattern", "which", "error"),
    [
        (90, r"mbarrier\.try_wait", 0, RaceError),
        (90, r"wgmma\.wait_group.* 1;", 0, RaceError),
        (90, r"mbarrier\.arrive\.expect_tx", 0, BarrierWaitError),
        (90, r"cp\.async\.bulk\.wait_group\.read", -1, RaceError),
        (90, r"fence\.proxy\.async", -1, RaceError),  # before the bulk store
        (100, r"mbarrier\.try_wait", 0, RaceError),
        (100, r"mbarrier\.arrive\.expect_tx", 1, BarrierWaitError),
        (100, r"fence\.proxy\.tensormap", 0, RaceError),
        (100, r"tensormap\.cp_fenceproxy", 0, OpcodeError),
        (100, r"fence\.proxy\.async", 0, RaceError),  # before the first bulk copy
    ],
)
def test_missing_order_is_refused(target, pattern, which, error):
    with pytest.raises(error, match="PTX line"):
        kernels.run_descriptors(target, **SHAPE, edit=kernels.without(pattern, which))


def test_bytes_that_never_come_are_refused():
    edit = kernels.replaced(r"(expect_tx.*, )16384;", lambda m: f"{m[1]}16400;")
    with pytest.raises(BarrierWaitError, match="nobody completes"):
        kernels.run_descriptors(100, **SHAPE, edit=edit)


def test_another_box_has_other_names():
    stride = kernels.replaced(r"mov\.b64(\s+%rd\d+), 384;", lambda m: f"mov.b64{m[1]}, 368;")
    assert kernels.run_descriptors(100, **SHAPE, edit=stride)[1] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("swizzle_mode", 4),
        ("elemtype", 13),
        ("interleave_layout", 1),
        ("fill_mode", 1),
        ("rank", 2),
    ],
)
def test_unknown_fields_are_refused(field, value):
    fields = {
        "global_address": 4096, "rank": 1, "elemtype": 10, "interleave_layout": 0, "swizzle_mode": 3,
        "fill_mode": 0, ("global_stride", 0): 128, **{("box_dim", d): 64 for d in (0, 1)},
        **{("global_dim", d): 64 for d in (0, 1)}, **{("element_stride", d): 1 for d in (0, 1)},
    }  # fmt: skip
    outer, inner, inside, size = TensorMap(dict(fields)).box([0, 32], 2048, ValueError)
    assert size == 2
    assert inside.sum() == 32 * 64
    assert sorted(inner) == list(range(2048, 2048 + 64 * 128, 2))
    assert np.array_equal(outer[:64], 4096 + 32 * 128 + 2 * np.arange(64))
    with pytest.raises(ValueError, match="tensor map"):
        TensorMap({**fields, field: value}).box([0, 32], 2048, ValueError)
