"""Wrong Triton kernels of rows: norms, softmax, log-softmax, mixtures of experts and linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isobit.library.causal_conv import Convolution
from isobit.library.delta_rule import Rule
from isobit.library.mixture_of_experts import ours
from isobit.library.on_gpu.twins import function, source, twin
from isobit.ops.causal_conv.op import causal_conv
from isobit.ops.delta_rule.op import delta_rule
from isobit.ops.experts.rows import combine
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.softmax.op import softmax
from isobit.order.samples import Samples

RMS, LAYER = "isobit.ops.rms_norm.triton", "isobit.ops.layer_norm.triton"
SOFTMAX, LOG_SOFTMAX = "isobit.ops.softmax.triton", "isobit.ops.log_softmax.triton"
ROWS = "isobit.ops.gpu.ordered_rows"
NARROW = ".to(tl.bfloat16).to(tl.float32)"
TOGETHER = "tl.zeros((ROWS, 1), tl.float32)"  # gives all rows of a program the value of one

# ---- rms_norm --------------------------------------------------------------------------------------------

ROOT = "tl.div_rn(1.0, tl.sqrt_rn(mean + eps))"
rms_eps_outside = twin(rms_norm, source(RMS, (ROOT, "tl.div_rn(1.0, tl.sqrt_rn(mean) + eps)")))
rms_over_the_batch = twin(
    rms_norm, source(RMS, (ROOT, f"{ROOT.replace('mean', 'tl.max(mean)')} + {TOGETHER}"))
)
SQUARES = "total = total + value * value\n"
rms_bf16_accumulator = twin(
    rms_norm, source(RMS, (SQUARES, f"total = (total + value * value){NARROW}\n"))
)
rms_without_eps = twin(rms_norm, source(RMS, (ROOT, "tl.div_rn(1.0, tl.sqrt_rn(mean))")))
rms_without_a_root = twin(rms_norm, source(RMS, (ROOT, "tl.div_rn(1.0, mean + eps)")))
# A sum that overflows is infinite, and its root divided by itself is not a number.
rms_squares_in_fp16 = twin(
    rms_norm,
    source(
        RMS,
        ("value * value", "(value * value).to(tl.float16).to(tl.float32)"),
        (ROOT, "tl.div_rn(tl.sqrt_rn(mean + eps), mean + eps)"),
    ),
)
TAIL = "known = TAIL + lane < LENGTH\n"
rms_without_the_last = twin(rms_norm, source(RMS, (TAIL, TAIL.replace("LENGTH", "LENGTH - 1"))))

# ---- gradients of the norms' parameters ------------------------------------------------------------------

LEAF = "tl.store(sums + place, merge_lanes(total, BLOCK)"
CHAINS = (
    ("for at in range(0, length, 16):", "for at in range(0, length, 1):"),
    ("known = at + lane < length", "known = (at + lane < length) & (lane == 0)"),
)


def all_rows(right: Any) -> Any:
    """Take all rows for one sample, padding too."""
    return lambda *given: Samples.packed([right(*given).rows])


def from_the_end(right: Any) -> Any:
    """Sum items from the last to the first."""
    return lambda rows, *given: right(rows.flip(0), *given)


def leaves_of_memory(right: Any) -> Any:
    """Cut leaves where memory does, at every 16th row, instead of at the first token of a sample."""

    def wrong(samples: Any, apart: bool) -> Any:
        return [[piece for leaf in run for piece in pieces(leaf)] for run in right(samples, apart)]

    return wrong


def pieces(leaf: Any) -> list[Any]:
    """Cut a leaf at every 16th row of memory."""
    ends = [*range((leaf.start // 16 + 1) * 16, leaf.start + leaf.length, 16)]
    starts = [leaf.start, *ends]
    stops = [*ends, leaf.start + leaf.length]
    return [replace(leaf, start=a, length=b - a) for a, b in zip(starts, stops, strict=True)]


CHAIN = source(ROWS, *CHAINS)
NARROW_ROWS = source(ROWS, (LEAF, f"{LEAF}{NARROW}"))
AT_PADDING = function(ROWS, "segments_of", leaves_of_memory)

rms_one_chain, layer_one_chain = twin(rms_norm, CHAIN), twin(layer_norm, CHAIN)
rms_bf16_sums = twin(rms_norm, NARROW_ROWS)
layer_bf16_sums = twin(layer_norm, NARROW_ROWS)
rms_padding_counted = twin(rms_norm, function(RMS, "whole_samples", all_rows))
layer_padding_counted = twin(layer_norm, function(LAYER, "whole_samples", all_rows))
rms_leaves_at_padding = twin(rms_norm, AT_PADDING)
layer_leaves_at_padding = twin(layer_norm, AT_PADDING)
rms_heads_descending = twin(rms_norm, function(ROWS, "merge_items", from_the_end))

# ---- layer_norm ------------------------------------------------------------------------------------------

SCALE = "tl.div_rn(1.0, tl.sqrt_rn(variance + eps))"
layer_eps_outside = twin(
    layer_norm, source(LAYER, (SCALE, "tl.div_rn(1.0, tl.sqrt_rn(variance) + eps)"))
)
layer_over_the_batch = twin(
    layer_norm,
    source(LAYER, (SCALE, f"{SCALE.replace('variance', 'tl.max(variance)')} + {TOGETHER}")),
)
layer_unbiased = twin(
    layer_norm, source(LAYER, ("N * 1.0)\n    scale", "(N - 1) * 1.0)\n    scale"))
)
REST = "other=0.0).to(tl.float32) - mean\n        total"
layer_one_pass = twin(
    layer_norm,
    source(
        LAYER,
        (REST, REST.replace(" - mean", "")),
        (
            "N * 1.0)\n    scale",
            "N * 1.0)\n    variance = tl.abs(variance - mean * mean)\n    scale",
        ),
    ),
)

# ---- softmax and log_softmax -----------------------------------------------------------------------------

TOP = "top = tl.max(most, 1)[:, None]"
softmax_without_shift = twin(
    softmax, source(SOFTMAX, (TOP, "top = tl.zeros((ROWS, 1), tl.float32)"))
)
softmax_over_the_batch = twin(softmax, source(SOFTMAX, (TOP, f"top = tl.max(most) + {TOGETHER}")))
softmax_without_the_last = twin(
    softmax, source(SOFTMAX, (TAIL, TAIL.replace("LENGTH", "LENGTH - 1")))
)
TERM = "term = exp_nonpositive(value - top)"
softmax_wiggling = twin(
    softmax,
    source(SOFTMAX, (TERM, f"{TERM} * tl.where((value > -2.0) & (value < -1.0), 0.5, 1.0)")),
)
LOG = "log_sum = log_positive(whole)"
log_over_the_batch = twin(
    log_softmax, source(LOG_SOFTMAX, (LOG, f"{LOG} + tl.max(top) * 0.0009765625"))
)
ADDED = "total + exp_nonpositive(value - base)"
log_without_the_tail = twin(
    log_softmax,
    source(LOG_SOFTMAX, (f"tl.where(known, {ADDED}", f"tl.where(at + 16 <= LENGTH, {ADDED}")),
)
BASE = 'base = tl.where(tops == -float("inf"), 0.0, tops)'
log_not_rescaled = twin(log_softmax, source(LOG_SOFTMAX, (BASE, f"{BASE} + 0.0625")))
SHARE = "tl.div_rn(exp_nonpositive(value - top), whole + tl.zeros_like(value))"
log_of_softmax = twin(
    log_softmax,
    source(
        LOG_SOFTMAX,
        ("(value - top) - log_sum", f"log_positive(tl.maximum({SHARE}, 1.1754943508222875e-38))"),
    ),
)
LAST = "(value - top) - log_sum"
log_wiggling = twin(
    log_softmax,
    source(LOG_SOFTMAX, (LAST, f"({LAST}) - tl.where((value > 1.0) & (value < 2.0), 0.5, 0.0)")),
)
log_plain_gradient = twin(
    log_softmax,
    source(
        LOG_SOFTMAX,
        ("upstream - weight * whole", "tl.math.fma(-weight, whole + weight * 0.0, upstream)"),
    ),
)

# ---- mixtures of experts -----------------------------------------------------------------------------------

EXPERTS = "isobit.ops.experts.triton"
SLOT = "slot = token * CHOSEN + tl.load(order + token * CHOSEN + at)"
experts_by_slot = replace(
    ours, combine=twin(combine, source(EXPERTS, (SLOT, "slot = token * CHOSEN + at")))
)
experts_by_one_chain = replace(
    ours, combine=twin(combine, source(EXPERTS, ("(segment == owner)", "(segment == 0)")))
)
LOWEST_ID = "tl.min(tl.min(tl.where(key == top, at, E), 1), 0)"
HIGHEST_ID = "tl.max(tl.max(tl.where(key == top, at, -1), 1), 0)"


def highest_id(*given: Any, **named: Any) -> Any:
    """Break ties by the highest id."""
    with source(EXPERTS, (LOWEST_ID, HIGHEST_ID))():
        return ours.route(*given, **named)


experts_by_highest_id = replace(ours, route=highest_id)

# ---- linear attention --------------------------------------------------------------------------------------

CONVOLUTION, CHUNKS = "isobit.ops.causal_conv.triton", "isobit.ops.delta_rule.triton_chunks"
convolution_leaks = Convolution(
    twin(causal_conv, source(CONVOLUTION, ("inside & (row >= start)", "inside & (row >= 0)")))
)
convolution_gradient_leaks = Convolution(
    twin(causal_conv, source(CONVOLUTION, ("(row + tap < stop)", "(row + tap < size // C)")))
)
TERM_OF_TAP = "total + value * factor"
convolution_in_16_bits = Convolution(
    twin(causal_conv, source(CONVOLUTION, (TERM_OF_TAP, f"({TERM_OF_TAP}){NARROW}")))
)
NEW = "new = rate[:, None] * (given - fade * reads)"
delta_in_16_bits = Rule(
    twin(
        delta_rule, source(CHUNKS, (NEW, f"new = (rate[:, None] * (given - fade * reads)){NARROW}"))
    )
)
