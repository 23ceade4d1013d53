"""Wrong Triton kernels of elements: SiLU, GELU, SwiGLU, rotary, embedding, the exact sum, the norm and AdamW."""

from __future__ import annotations

from typing import Any

from isobit.library.adamw import stepped
from isobit.library.embedding import Embedded
from isobit.library.on_gpu.twins import function, source, twin
from isobit.ops.embedding.op import embedding
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.gelu.op import gelu
from isobit.ops.rotary.op import rotary
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from isobit.optim import get_total_norm
from isobit.order.samples import Samples

SILU, GELU, ROTARY = (f"isobit.ops.{name}.triton" for name in ("silu", "gelu", "rotary"))
SWIGLU = "isobit.ops.swiglu.triton"
EMBEDDING, EXACT = "isobit.ops.embedding.triton", "isobit.ops.exact_sum.triton"
ADAMW = "isobit.ops.adamw.triton"
STATE = "isobit.ops.exact_sum.triton_state"
NARROW = ".to(tl.bfloat16).to(tl.float32)"

# ---- SiLU, GELU and SwiGLU -------------------------------------------------------------------------------

QUOTIENT = "tl.div_rn(value, denominator)"
silu_rounded_twice = twin(silu, source(SILU, (QUOTIENT, "value * tl.div_rn(1.0, denominator)")))
silu_rounded_between = twin(
    silu, source(SILU, (QUOTIENT, f"value * tl.div_rn(1.0, denominator){NARROW}"))
)
silu_too_steep = twin(
    silu,
    source(
        SILU,
        ("logistic(value)", "logistic(value * 1.702)"),
        (
            "sigmoid_and_slope(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))",
            "sigmoid_and_slope(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * 1.702)",
        ),
    ),
)
PRODUCT = "result = value * share"
gelu_rounded_between = twin(
    gelu,
    source(
        GELU,
        (PRODUCT, f"{PRODUCT}{NARROW}"),
        (QUOTIENT, f"value * tl.div_rn(1.0, denominator){NARROW}"),
    ),
)
gelu_rounded_twice = twin(gelu, source(GELU, (QUOTIENT, "value * tl.div_rn(1.0, denominator)")))
gelu_by_difference = twin(
    gelu, source(GELU, ("share, _ = normal_share(value)", "share = 1.0 - normal_share(-value)[0]"))
)


def gelu_where(condition: str, other: str) -> Any:
    """Return GELU, by either formula, with another result where a condition of `value` is true."""
    stored = "tl.store(y + at, round_once({}, y.dtype.element_ty)"
    chosen = f"tl.where({condition}, {other}, result)"
    return twin(gelu, source(GELU, (stored.format("result"), stored.format(chosen))))


gelu_of_a_leaky_kind = gelu_where("value < -3.0", "value * 0.1")
gelu_above_x = gelu_where("value > 4.0", "value * 1.015625")
# It falls at every second eighth, so that few elements show it.
gelu_with_steps = gelu_where("(value * 8.0).to(tl.int32) % 2 == 1", "result - 0.0625")

GATED = f"{QUOTIENT} * factor"
swiglu_by_sigmoid = twin(swiglu, source(SWIGLU, (GATED, "tl.div_rn(1.0, denominator) * factor")))
swiglu_with_a_limit = twin(
    swiglu, source(SWIGLU, (GATED, f"{QUOTIENT} * tl.minimum(tl.maximum(factor, -7.0), 7.0)"))
)

# ---- rotary ----------------------------------------------------------------------------------------------

rotary_wrong_in_one_half = twin(
    rotary,
    source(
        ROTARY,
        ("low * cos_low - high * sin_low", "low * cos_low + high * sin_low"),
        ("high * cos_high - low * sin_low", "high * cos_high + low * sin_low"),
    ),
)
ANGLE = "% period * (2 * HALF) + {}"
rotary_frequencies_reversed = twin(
    rotary, source(ROTARY, (ANGLE.format("at % HALF"), ANGLE.format("HALF - 1 - at % HALF")))
)
rotary_rounded_between = twin(
    rotary,
    source(
        ROTARY,
        (
            "low * cos_low - high * sin_low",
            "(low * cos_low).to(y.dtype.element_ty).to(tl.float32) - high * sin_low",
        ),
    ),
)


# ---- embedding -------------------------------------------------------------------------------------------


def all_rows(right: Any) -> Any:
    """Take all rows for one sample, padding too."""
    return lambda *given: Samples.packed([right(*given).rows])


def one_segment(right: Any) -> Any:
    """Put all leaves of all samples into one segment, one leaf."""

    def wrong(samples: Any) -> Any:
        tokens, leaf, segment = right(samples)
        return tokens, leaf * 0, segment * 0

    return wrong


ADDED = (
    "total = total + tl.load(grad + token * WIDTH + column, mask=inside, other=0.0).to(\n"
    "            tl.float32\n        )"
)
ZEROS = "total = tl.zeros((BLOCK,), tl.float32)"
embedding_padding_counted = Embedded(
    twin(embedding, function(EMBEDDING, "whole_samples", all_rows))
)
embedding_one_chain = Embedded(twin(embedding, function(EMBEDDING, "tokens_in_order", one_segment)))
embedding_duplicates_dropped = Embedded(
    twin(embedding, source(EMBEDDING, (ADDED, ADDED.replace("total = total + ", "total = "))))
)
embedding_bf16_sums = Embedded(
    twin(embedding, source(EMBEDDING, (ADDED, f"{ADDED}\n        total = total{NARROW}")))
)
embedding_negative_zeros = Embedded(twin(embedding, source(EMBEDDING, (ZEROS, f"{ZEROS} * -1.0"))))
embedding_off_by_one = Embedded(
    twin(
        embedding,
        source(
            EMBEDDING,
            ("weight + row * WIDTH + column", "weight + (row + 1) % ROWS * WIDTH + column"),
        ),
    )
)

# ---- the exact sum ---------------------------------------------------------------------------------------

exact_in_digits_of_one_program = twin(
    exact_sum, source(EXACT, ("(lost != 0) | ((kept & 1) != 0)", "(kept & 1) != 0"))
)
exact_truncated = twin(
    exact_sum,
    source(
        EXACT, ("kept += tl.where((lost != 0) | ((kept & 1) != 0), half, 0)", "kept += half * 0")
    ),
)

# ---- AdamW -----------------------------------------------------------------------------------------------

MEAN, ROOT = "mean * keep_mean + g * add_mean", "tl.sqrt_rn(square)"
adamw_fused_products = twin(
    stepped, source(ADAMW, (MEAN, "tl.math.fma(mean, keep_mean + mean * 0, g * add_mean)"))
)
adamw_approximate_root = twin(stepped, source(ADAMW, (ROOT, f"square * tl.div_rn(1.0, {ROOT})")))
adamw_corrected_inside = twin(
    stepped, source(ADAMW, (f"{ROOT} * spread", "tl.sqrt_rn(square * (spread * spread))"))
)
adamw_divided_first = twin(
    stepped, source(ADAMW, ("tl.div_rn(mean * rate, divisor)", "tl.div_rn(mean, divisor) * rate"))
)
adamw_rounded_between = twin(stepped, source(ADAMW, ("mean * rate", f"mean{NARROW} * rate")))
adamw_eps_inside = twin(
    stepped,
    source(ADAMW, (f"{ROOT} * spread + eps", "tl.sqrt_rn(square * (spread * spread) + eps)")),
)
adamw_coupled = twin(
    stepped,
    source(
        ADAMW,
        (f"mean = {MEAN}", f"g += 0.1 * value\n    mean = {MEAN}"),
        ("value * decay", "value"),
    ),
)

PIECES = "digit, pieces = pieces_of(bits, SQUARED)"
norm_by_lane = twin(
    get_total_norm,
    source(
        STATE,
        (PIECES, PIECES.replace("bits", "tl.where(at % 2 == 0, bits & -0x40000, bits)")),
    ),
)
