"""What a kernel's name says about its order of addition.

A name proves nothing: `isobit audit` runs an operator again and compares bits. But some families are known to choose
the order by the shape, by the number of ranks or by which thread comes first, and a trace shows that they ran. Names
that belong to no family are unknown, and are said to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# What the order of a family's sums depends on.
ROW, TILE, SHAPE, RANKS, RUN = "row length", "tile", "shape", "ranks", "run"
NO_SUM, UNKNOWN = "no sum", "unknown"
DEPENDENT = (SHAPE, RANKS, RUN)  # these are findings; a tile is one only next to another trace


@dataclass(frozen=True)
class Order:
    """What the order of a kernel's sums depends on, in one word and in a sentence, and where that is written."""

    on: str
    words: str
    source: str = ""


@dataclass(frozen=True)
class Family:
    """Kernels whose names match, and their order."""

    pattern: re.Pattern[str]
    order: Order


def family(pattern: str, on: str, words: str, source: str) -> Family:
    """Return a family of kernels."""
    return Family(re.compile(pattern, re.I), Order(on, words, source))


# The first that matches counts: atomics before what splits a sum, and that before what computes a tile of it. A source
# that could not be opened when the family was written says so. Names of Triton's kernels are those of Python functions,
# which anyone may launch with any tile: they belong to a family only where its source is named. tests/profiling/
# test_order_names.py compares families with what `isobit certify` finds.
FAMILIES = (
    family(
        r"indexing_backward|embedding_backward(?!.*(?:sort|segment|codegen))|scatter_add|index_add|index_put.*accum|"
        r"atomic",
        RUN,
        "atomics: the order differs from run to run",
        "docs.pytorch.org, torch.use_deterministic_algorithms: list of operators",
    ),
    family(
        r"split_?k(?!v)|reduceSplitK",
        SHAPE,
        "split-K: the number of partial sums depends on the shape",
        "cuBLAS 12.1 manual, 4.1.4: bits may differ with the number of processors; which sizes are split is not "
        "published",
    ),
    family(
        r"stream_?k",
        SHAPE,
        "stream-K: where a sum is cut depends on the shape and the number of processors",
        "Osama et al., Stream-K, PPoPP 2023, arXiv:2301.03598, abstract",
    ),
    family(
        r"^Cijk_",
        UNKNOWN,
        "cannot be told from the name: split-K (GSU) is an argument at run time",
        "rocm.docs.amd.com, Tensile, kernel parameters: GlobalSplitU; github.com/ROCm/hipBLASLt/pull/247: it is passed "
        "as an argument",
    ),
    family(
        r"(?:flash|fmha|attn).*bwd|flash_bwd",
        RUN,
        "atomics in the gradient of the queries, unless deterministic=True",
        "flash-attention, flash_attn_interface.py: deterministic",
    ),
    family(
        r"flash_fwd_splitkv|splitkv|paged_attention|BatchDecodeWith|decode_att|kernel_unified_attention_3d|"
        r"^_fwd_(?:grouped_)?kernel_stage[12]$",
        SHAPE,
        "split keys: how many parts a row's keys have depends on their length, the batch and the processors",
        "flash-attention num_splits_heuristic(batch * heads * blocks, processors, …); vLLM paged_attn.py use_v1 and "
        "triton_decode_attention.py; FlashInfer scheduler.cuh PartitionPagedKVCacheBinarySearchMinNumPagePerBatch",
    ),
    family(
        r"flash_fwd|fmha.*(?:fwd|prefill)|^attn_fwd",
        TILE,
        "keys are added in tiles of one size, in order; the tile is chosen by head size, dropout, mask and device",
        "flash-attention, flash_fwd_launch_template.h: run_mha_fwd_hdim*, kBlockN",
    ),
    family(
        r"nccl.*(?:AllReduce|ReduceScatter|_Reduce_)|all_?reduce_kernel|cross_device_reduce",
        RANKS,
        "reduction over ranks: the order depends on their number, the algorithm and the size",
        "github.com/NVIDIA/nccl/issues/754: chosen by nodes, GPUs per node, size and bandwidth; vLLM "
        "custom_all_reduce.cuh: one or two stages by size",
    ),
    family(
        r"ncclDevKernel_Generic",
        UNKNOWN,
        "cannot be told from the name: RCCL runs every collective under it",
        "rccl, src/device/common.h: ncclDevKernel_Generic, which calls by funcIndex",
    ),
    family(
        r"\bgemv|gemmSN|gemmk1|::dot_kernel",
        SHAPE,
        "the path of few rows: larger batches use another kernel",
        "github.com/ROCm/rocBLAS/issues/1238: cuBLAS runs its gemv for a product where one side is 1; not opened: "
        "which sizes have gemmSN",
    ),
    family(
        r"fused_moe_kernel|moe_gemm|^bmm_\w+_t\d+x\d+x\d+",
        TILE,
        "the tile is chosen by the number of tokens of an expert",
        "vLLM fused_moe.py: get_config_func(M), M tokens; TensorRT-LLM calculate_tile_tokens_dim(num_tokens, …)",
    ),
    family(
        r"wgrad|dgrad|scudnn|winograd|convolve|implicit_gemm|igemm_|conv_fwd|bwd_weight",
        SHAPE,
        "the algorithm of a convolution is chosen by its shapes, or by a search",
        "docs.pytorch.org, notes/randomness: cuDNN benchmarks algorithms per set of sizes; rocm.docs.amd.com, MIOpen, "
        "find database: entries by the descriptors of tensors and convolution",
    ),
    family(
        r"gemm|nvjet|cutlass.*Kernel|_xmma_|wmma",
        TILE,
        "the tile is chosen by the sizes of the product, and a sum may be cut with it",
        "cuBLAS 12.1 manual, 4.1.4; docs.nvidia.com/cuda/cublasdx, warnings: bits may differ with SM, threads and "
        "leading dimensions",
    ),
    family(
        r"batch_norm_(?:collect|backward)|bn_(?:fw_tr|bw)|GammaBetaBackward|layer_norm_grad_gamma|::reduce_kernel",
        SHAPE,
        "a sum over rows: how many threads and blocks share it depends on their number",
        "ATen, Reduce.cuh: setReduceConfig, by the numbers of outputs and of inputs per output; Normalization.cuh: "
        "getNumThreads, flexible_launch_configs; layer_norm_kernel.cu: rows_per_block_y, partial_reduction; not "
        "opened: cuDNN",
    ),
    family(
        r"^triton_(?:poi|for)_(?!.*(?:scatter|index_put|index_add|embedding|bag))",  # these have atomics
        NO_SUM,
        "adds nothing over elements",
        "torch/_inductor/wrapper_benchmark.py: poi is pointwise, for is foreach",
    ),
    family(
        r"^triton_(?:red|per)_",
        SHAPE,
        "a sum of a compiled graph: its blocks are chosen by sizes, and some by a search",
        "torch/_inductor/runtime/triton_heuristics.py: reduction and persistent_reduction",
    ),
    family(
        r"vllm::\w*rms_norm",
        SHAPE,
        "a block per row, whose number of threads depends on the number of rows, unless vLLM is batch-invariant",
        "vLLM, csrc/layernorm_kernels.cu: max_block_size is 1024 below 256 tokens, else 256",
    ),
    family(
        r"SpatialSoftMax",
        SHAPE,
        "a softmax along an inner axis: how many threads share it depends on the sizes of the axes after it",
        "ATen, SoftMax.cu: SpatialSoftMax_getBlockSize(dim_size, inner_size)",
    ),
    # Norms of other libraries are unknown: their sources were not opened, and vLLM's is not one row at a time.
    family(
        r"at::native.*(?:layer_norm|RowwiseMoments|cunn_SoftMax|softmax.*forward)|::softmax_warp|"
        r"flashinfer::norm::\w*RMSNorm(?:Quant)?Kernel",
        ROW,
        "one row at a time: the order depends on the row's length, and on whether it is aligned for wide loads",
        "ATen, layer_norm_kernel.cu and PersistentSoftmax.cuh: a warp or a block per row; FlashInfer, norm.cuh: "
        "block_size by the row's length",
    ),
    family(
        r"elementwise|multi_tensor_apply|CatArray|[Cc]opy|permute_|transpose|nchwToNhwc|nhwcToNchw|rotary|act_and_mul|"
        r"store_kvcache|max_pool|RadixSort|AllGather|SendRecv|AllToAll|Broadcast|linearize_index|bounds_check",
        NO_SUM,
        "adds nothing over elements",
        "ATen, CUDALoops.cuh: a thread computes elements of its own; not opened: copies, sorts and exchanges of other "
        "libraries, which only move",
    ),
)
NOT_KNOWN = Order(
    UNKNOWN, "unknown: the name belongs to no family; isobit certify decides it for a Triton kernel"
)
# Rows x columns, and where the name has it x depth, of the tile that one group of threads computes.
TILES = (
    re.compile(r"MT(\d+x\d+x\d+)"),
    re.compile(r"tilesize(\d+x\d+x\d+)"),
    re.compile(r"_b?t(\d+x\d+x\d+)"),
    re.compile(r"(?:gemm|nvjet|cudnn)\w*?_(\d{2,3}x\d{2,3})(?:_(\d{2,3})x\d+_)?"),
)


@lru_cache(maxsize=1 << 16)  # a trace has few names
def order_of(kernel: str) -> Order:
    """Return what is known of the order of addition of a kernel."""
    return next((one.order for one in FAMILIES if one.pattern.search(kernel)), NOT_KNOWN)


@lru_cache(maxsize=1 << 16)
def tile_of(kernel: str) -> str:
    """Return the tile that a kernel of a product computes, such as 128x256x32, as far as its name has it."""
    for pattern in TILES:
        found = pattern.search(kernel)
        if found:
            return "x".join(word for word in found.groups() if word)
    return ""
