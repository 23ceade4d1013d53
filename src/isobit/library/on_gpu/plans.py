"""Plans: per contract, the sizes of cases, and the claims and planted subjects that have no meaning on a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROWS, WIDTH = (
    17,
    23,
)  # the largest sizes of axes of rows, and of other axes, unless a plan names others

THREADS = "a kernel on a GPU has no CPU threads"
REFUSALS = (
    "arguments are checked by the same Python before an executor is chosen; judged on the CPU"
)
PARTIAL = "partial sums have no Triton executor"
PACKED = "packed weights have no Triton executor"
LONG = "samples of 4,100 keys take minutes in the interpreter; tests/gpu compares chunks of keys"
FEWER = "it runs on fewer tokens"
COSTLY = (
    "a case takes long in the interpreter; tests/gpu and `benchmarks comparisons` have this dtype"
)
OWN = "isobit.library.on_gpu.claims:"
ROW_COUNTS = ("qkv_rows", "o_rows", "gate_up_rows", "down_rows")
ROTATED = ("wide_heads", "gradients", "heads_apart", "normal32", "normal16")
# Inputs of attention that fill a block of 64 keys and a quarter of another: 16 rows are one tile, and an order of
# blocks shows only where the second block adds several keys.
TOKENS = 80
TWO_BLOCKS = ("tokens", "typed", "windowed", "windowed_narrow", "narrow_types", "single")
ANY = "what it asks of any kernel, the operator's own contract asks too"
ANY_KERNELS = (
    "attention",
    "cross-entropy",
    "embedding",
    "gelu",
    "gqa",
    "layer-norm",
    "linear",
    "log-softmax",
    "logprob",
    "rms-norm",
    "rope",
    "silu",
    "softmax",
    "swiglu",
)
MODULES = "it is about Python modules that call operators, not about a kernel"


@dataclass(frozen=True)
class Plan:
    """How a contract is judged on a backend.

    Attributes:
        sizes: By name of inputs, other sizes than the default ones, by axis.
        left_out: By claim, why it does not apply.
        predicates: By claim, a predicate in place of the contract's, and what of it is left out.
        inputs_left_out: Inputs that take too long, where a claim has others.
        edges: Patterns of special values that are kept.
        dtypes: By name of inputs, the dtypes that are kept where one case takes long.
        tried_first: Inputs that come first where a claim has several: planted subjects are tried on the first.
    """

    sizes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    predicates: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    inputs_left_out: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tried_first: tuple[str, ...] = ()


PLANS: dict[str, Plan] = {
    "rmsnorm-kernel-v1": Plan(
        sizes={"tokens": {"n": (5,)}},
        predicates={
            "samples": (f"{OWN}norm_head_samples", FEWER),
            "gradients-agree": (f"{OWN}norm_gradients", FEWER),
        },
        edges=("huge",),  # so that squares in fp16 overflow
    ),
    "layernorm-kernel-v1": Plan(
        sizes={"tokens": {"n": (5,)}},
        predicates={
            "samples": (f"{OWN}norm_samples", FEWER),
            "gradients-agree": (f"{OWN}norm_gradients", FEWER),
        },
    ),
    "softmax-kernel-v1": Plan(edges=("huge",)),
    "log-softmax-kernel-v1": Plan(),
    "silu-kernel-v1": Plan(edges=("nans",)),
    "gelu-kernel-v1": Plan(),
    "swiglu-kernel-v1": Plan(),
    "rope-kernel-v1": Plan(
        sizes={
            **{name: {"heads": (2,), "d": (34,)} for name in ROTATED},
            "tokens": {"tokens": (1, 17), "heads": (2,), "d": (34,)},
            "narrow_heads": {"heads": (3,), "d": (2,)},
        },
    ),
    "embedding-kernel-v1": Plan(
        sizes={"tokens": {"n": (3,), "v": (7,)}},
        predicates={
            "samples": (f"{OWN}embedding_samples", FEWER),
            "padding": (f"{OWN}embedding_padding", FEWER),
        },
    ),
    "exact-sum-kernel-v1": Plan(
        left_out={"pieces": PARTIAL, "threads": THREADS},
        sizes={name: {"rows": (3,), "n": (23,)} for name in ("rows", "cancelling")},
        edges=("infinities",),
    ),
    "matmul-kernel-v1": Plan(
        left_out={"ranks": PARTIAL, "packed-weights": PACKED},
        inputs_left_out=("qkv", "o", "gate_up", "down", *ROW_COUNTS),
        # Stock's kernel for several rows is one chain too; its kernel for one row is not.
        sizes={"square": {"k": (70,), "n": (70,)}, "parity": {"rows": (1, 17), "k": (70,)}},
        predicates={"samples": (f"{OWN}linear_samples", f"micro-batches: {PARTIAL}; {FEWER}")},
    ),
    "linear-group-kernel-v1": Plan(
        left_out={"ranks": PARTIAL},
        sizes={"group": {"n": (1024,), "k": (5,)}, "narrow": {"n": (32,)}, "bounded": {"n": (32,)}},
        predicates={"samples": (f"{OWN}group_samples", FEWER)},
    ),
    "attention-kernel-v1": Plan(
        left_out={
            "long-decode-is-prefill": LONG,
            "unseen-chunks": LONG,
            "executors-agree-on-chunks": LONG,
            "no-gradient-through-a-cache": REFUSALS,
        },
        sizes={
            **{name: {"rows": (TOKENS,), "heads": (1,)} for name in TWO_BLOCKS},
            **{name: {"t": (TOKENS,)} for name in ("edge", "block", "block_windowed")},
            "units": {"rows": (5,)},
            "batches": {"t": (4,), "heads": (1,)},
            "few": {"t": (7,), "heads": (1,)},
        },
        dtypes={"batches": ("bfloat16",), "few": ("float32",)},
        tried_first=("tokens",),  # in `edge` one key has nearly all weight: no order shows
        predicates={
            "decode-is-prefill": (f"{OWN}attention_decode", FEWER),
            "samples": (f"{OWN}attention_samples", FEWER),
        },
    ),
    "gqa-kernel-v1": Plan(
        sizes={"samples": {"t": (18,)}, "edge": {"t": (66,)}},
        dtypes={"groups": ("float32", "bfloat16"), "samples": ("bfloat16",)},
    ),
    "logprob-kernel-v1": Plan(
        left_out={"vocabulary-shares": PARTIAL},
        # One word has the log-probability 0, above which a hair shows.
        sizes={"rows": {"k": (23,)}, "small": {"v": (1, 17)}},
        # A rounding to 16 bits hides the order of dhidden.
        dtypes={"rows": ("float32", "bfloat16")},
        predicates={"samples": (f"{OWN}logprob_samples", FEWER)},
    ),
    "lm-head-kernel-v1": Plan(sizes={"rows": {"k": (23,)}}, dtypes={"rows": ("bfloat16",)}),
    "grad-norm-kernel-v1": Plan(sizes={"rows": {"rows": (2,), "n": (23,)}}, edges=("tiny",)),
    "adamw-kernel-v1": Plan(
        sizes={name: {"rows": (3,), "n": (17,)} for name in ("defined", "plain")},
        edges=("tiny",),
    ),
    "cross-entropy-kernel-v1": Plan(left_out={"counts": PARTIAL}),
    "dimension-independent-kernels-v1": Plan(
        left_out={"DIM-002": "it counts loads of the native library; `binaries` counts Triton's"},
        # Stock's kernel for several rows is one chain too; its kernel for one row is not.
        sizes={
            "made": {"rows": (1, 17), "k": (70,)},
            **{name: {"rows": (17,), "k": (70,)} for name in ("shapes", "executors")},
        },
        dtypes={"executors": ("float32", "bfloat16")},
    ),
}

ELSEWHERE = {
    "tree-collective-v1": "collectives move bytes between ranks and add on the CPU",
    "audit-v1": MODULES,
    "gradient-accumulation-v1": PARTIAL,
    "kv-cache-kernel-v1": "caches of keys have no Triton executor",
    "chain-v1": "whole models: tests/gpu/test_whole_model.py",
    "rank-agreement-v1": MODULES,
    "tolerance-table-v1": "a table of bounds, which no kernel computes",
    "training-config-kernel-v1": MODULES,
    "training-stability-v1": MODULES,
    "distributed-training-v1": "whole runs over ranks: tests/gpu/test_parallel_on_card.py",
    **{f"any-{name}-v1": ANY for name in ANY_KERNELS},
}

PLANTS_LEFT_OUT = {
    "isobit.library.linear.planted:summed_in_call_order": f"micro-batches: {PARTIAL}",
    "isobit.library.linear.planted:samples_reversed": f"only micro-batches show it: {PARTIAL}",
    "isobit.library.log_softmax.planted:cut_by_threads": THREADS,
    "isobit.library.logprob.planted:cut_by_threads": THREADS,
    "isobit.library.attention.planted:thread_gradients": THREADS,
    "isobit.library.lm_head.claims:by_threads": THREADS,
}
