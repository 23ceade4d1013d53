"""Theorem: the order column never denies a dependence that `isobit certify` finds in a kernel of that name.

Names of the kernels of examples/certify are compared with what is proven of functions that launch them. Only Triton's
kernels can be certified, so that families of CUDA and HIP rest on their sources.
"""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from isobit.profiling.order_names import (
    FAMILIES,
    NO_SUM,
    ROW,
    RUN,
    SHAPE,
    TILE,
    UNKNOWN,
    order_of,
    tile_of,
)

EXAMPLES = Path(__file__).parents[2] / "examples/certify"
# What each word allows; the tile is a dependence of its own.
ALLOWS = {
    ROW: set(),
    NO_SUM: set(),
    TILE: {"tile"},
    SHAPE: {"tile", "rows"},
    RUN: {"tile", "rows", "run"},
    UNKNOWN: {"tile", "rows", "run"},
}


@dataclass(frozen=True)
class Kernel:
    """A name as a trace has it, and what certify finds of (function, row counts, what varies)."""

    name: str
    on: str
    found: dict = field(hash=False)


KERNELS = (
    Kernel("split_k_kernel", SHAPE, {("matmul.py:split_k_by_rows", (3, 20), None): {"rows"}}),
    Kernel("split_k_atomic_kernel", RUN, {("matmul.py:matmul_atomic", (1,), None): {"run"}}),
    # flash-attention's forward is the algorithm of this example.
    Kernel(
        "attn_fwd",
        TILE,
        {
            ("flash_attention.py:prefill", (1, 3), None): set(),
            ("flash_attention.py:prefill", (1,), ("BLOCK_N", (16, 32))): {"tile"},
        },
    ),
    # As vLLM's, its first stage writes a partial result for each part of the keys.
    Kernel(
        "_fwd_kernel_stage1",
        SHAPE,
        {("flash_attention.py:split_by_batch", (1, 3), None): {"rows"}},
    ),
    # One name, two verdicts: only the launch decides.
    Kernel(
        "rms_norm_kernel",
        UNKNOWN,
        {
            ("rms_norm.py:rms_norm", (1, 3), None): set(),
            ("rms_norm.py:tile_by_rows", (3, 17), None): {"rows"},
        },
    ),
    Kernel(
        "softmax_kernel",
        UNKNOWN,
        {
            ("softmax.py:softmax", (1, 3), None): set(),
            ("softmax.py:warps_by_rows", (3, 9), None): {"rows"},
        },
    ),
    Kernel(
        "cross_entropy_kernel",
        UNKNOWN,
        {
            ("cross_entropy.py:cross_entropy", (1, 3), None): set(),
            ("cross_entropy.py:mean_by_atomics", None, None): {"run"},
        },
    ),
    Kernel("matmul_kernel", UNKNOWN, {("matmul.py:matmul", (1, 3), ("BLOCK_M", (16, 64))): set()}),
)


def dependences(function, rows, vary):
    """Return what `isobit certify` finds that a function's results depend on."""
    import isobit

    sys.path.insert(0, str(EXAMPLES))
    try:
        load = importlib.import_module("verdicts").load
    finally:
        sys.path.remove(str(EXAMPLES))
    varied = dict([vary]) if vary else {}
    found = isobit.certify(load(function), rows=rows, vary=varied, targets=("sm_90",))
    (target,) = found.targets
    assert not target.refused, str(found)
    if target.broken:
        assert all("whose order differs between runs" in one.reason for one in target.broken)
        return {"run"}
    if found.kept:
        return set()
    return {"tile"} if vary else {"rows"}


def denied(name, found):
    """Return the dependences that certify finds and the name's family excludes."""
    return found - ALLOWS[order_of(name).on]


def check(kernel):
    assert order_of(kernel.name).on == kernel.on
    for case, wanted in kernel.found.items():
        found = dependences(*case)
        assert found == wanted, (kernel.name, case, found)
        assert not denied(kernel.name, found), (kernel.name, case, found)


def test_a_family_that_says_too_much_is_found():
    """The plant: a split-K that adds by atomics, if its name were only split-K, or a tile."""
    pytest.importorskip("triton")
    found = dependences("matmul.py:matmul_atomic", (1,), None)
    assert found == {"run"}
    assert not denied("split_k_atomic_kernel", found)
    for name in ("split_k_kernel", "attn_fwd", "at::native::vectorized_layer_norm_kernel"):
        assert denied(name, found) == {"run"}


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_names_allow_what_certify_finds(kernel):
    pytest.importorskip("triton")
    check(kernel)


@pytest.mark.parametrize(
    ("kernel", "on", "tile"),
    [
        ("void splitKreduce_kernel<32, 16, int, float>", "shape", ""),
        ("volta_scudnn_128x128_stridedB_splitK_small_nn_v1", "shape", "128x128"),
        ("void at::native::indexing_backward_kernel<float, 4>(long const*)", "run", ""),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "run", ""),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "tile", ""),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<64>", "shape", ""),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<bf16>", "shape", ""),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "ranks", ""),
        ("void gemv2T_kernel_val<int, float>", "shape", ""),
        ("Cijk_Alik_Bljk_BBS_BH_UserArgs_MT256x192x64_GSU0", "unknown", "256x192x64"),
        ("cutlass_80_tensorop_s1688gemm_64x64_streamk", "shape", "64x64"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_nn_align8", "tile", "128x64x64"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "tile", "128x256x64"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "tile", "128x128x64"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16", "tile", "128x16x256"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "shape", ""),
        ("void at::native::vectorized_layer_norm_kernel<float>", "row length", ""),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>", "row length", ""),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>", "row length", ""),
        ("void at::native::(anonymous namespace)::cunn_SpatialSoftMaxForward<float>", "shape", ""),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", "shape", ""),
        ("enable_if<1>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "shape", ""),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "row length", ""),
        ("void aiter::rmsnorm2d_fwd_kernel<1>", "unknown", ""),
        ("void at::native::vectorized_elementwise_kernel<4>", "no sum", ""),
        ("ncclDevKernel_AllGather_RING_LL", "no sum", ""),
        ("ncclDevKernel_Generic", "unknown", ""),
        ("triton__0d1d2d3d", "unknown", ""),
        ("triton_poi_fused_add_mul_3", "no sum", ""),
        ("triton_poi_fused_embedding_dense_backward_0", "unknown", ""),
        ("triton_per_fused_native_layer_norm_1", "shape", ""),
        ("_fwd_grouped_kernel_stage1", "shape", ""),
        ("_layer_norm_bwd_dx_fused", "unknown", ""),
        ("splitk_gemm_atomic", "run", ""),
        ("my_kernel", "unknown", ""),
    ],
)
def test_names_of_kernels_say_what_is_known_of_their_order(kernel, on, tile):
    assert (order_of(kernel).on, tile_of(kernel)) == (on, tile)
    assert all(family.order.source and family.order.words for family in FAMILIES)
