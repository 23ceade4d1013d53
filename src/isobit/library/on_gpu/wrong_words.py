"""Wrong Triton kernels of log-probabilities, and of the head and the loss that are made of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.library.cross_entropy import Loss
from isobit.library.distillation.planted import Distilled
from isobit.library.lm_head import Head, ours
from isobit.library.logprob.claims import Scored
from isobit.library.on_gpu.twins import Change, function, source, twin
from isobit.ops.distillation.loss import distillation_loss
from isobit.ops.linear.op import linear_fp32
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import linear_logprob
from isobit.order.samples import Samples

LOGPROB, LINEAR = "isobit.ops.logprob.triton", "isobit.ops.linear.triton"
PRODUCTS = "isobit.ops.linear.triton_products"
NARROW = ".to(tl.bfloat16).to(tl.float32)"
FEW = 8  # rows below which some twins take another order


def scored(*changes: Change) -> Scored:
    """Return log-probabilities with wrong kernels in both passes."""
    return Scored(twin(linear_logprob, *changes))


def averaged(*changes: Change) -> Loss:
    """Return the loss with wrong kernels of its log-probabilities in both passes."""
    return Loss(twin(linear_cross_entropy, *changes))


def headed(*changes: Change) -> Head:
    """Return a head with wrong kernels of its logits; its log-probabilities are right."""
    return Head(twin(linear_fp32, *changes), linear_logprob)


def trained(*changes: Change) -> Head:
    """Return a head with wrong kernels of its log-probabilities; its logits are right."""
    return Head(ours.logits, twin(linear_logprob, *changes))


# ---- values ----------------------------------------------------------------------------------------------

LOG = "log_sum = log_positive(whole)"
OVER_THE_BATCH = source(LOGPROB, (LOG, f"{LOG} + tl.max(top) * 0.0009765625"))
TARGET = "tl.load(targets + row, mask=row < m, other=-1)"
NEIGHBOURS = source(
    LOGPROB, (TARGET, TARGET.replace("targets + row", "targets + tl.maximum(row - 1, 0)"))
)
COUNTED = source(LOGPROB, (TARGET, f"tl.maximum({TARGET}, 0)"))
ADDED = "total + exp_nonpositive(value - base)"
NO_TAIL = source(LOGPROB, (f"tl.where(known, {ADDED}", f"tl.where(at + 16 <= LENGTH, {ADDED}"))
BASE = 'base = tl.where(top == -float("inf"), 0.0, top)'
NOT_RESCALED = source(LOGPROB, (BASE, f"{BASE} + 0.0625"))
RESULT = "(chosen - top) - log_sum"
HAIR_MORE = source(LOGPROB, (RESULT, f"{RESULT} + 9.5367431640625e-07"))
# How logits are loaded: for the maximum, for the sum and for the end of it, and the target's.
LOADS = (
    'mask=inside, other=-float("inf"))',
    "(at + lane), mask=row < m, other=0.0)",
    "mask=(row < m) & known, other=0.0)",
    "mask=target >= 0, other=0.0)",
)
BF16_LOGITS = source(LOGPROB, *((load, f"{load}{NARROW}") for load in LOADS))
COOLED_LATE = source(
    LOGPROB,
    *((f"{load} * inverse", load) for load in LOADS),
    (RESULT, f"({RESULT}) * inverse"),
)
END_OF_ROW = "(2 * row + 1) * N - 1"
WORDS_REVERSED = source(
    LOGPROB,
    *(
        (
            f"place + (at + {word})",
            f"tl.where(m < {FEW}, {END_OF_ROW} - place - (at + {word}), place + (at + {word}))",
        )
        for word in ("column", "lane")
    ),
)

# ---- gradients -------------------------------------------------------------------------------------------


def all_rows(right: Any) -> Any:
    """Take all rows for one sample, padding too."""
    return lambda *given: Samples.packed([right(*given).rows])


def words_backwards(right: Any) -> Any:
    """Sum dhidden of few rows from the last word to the first."""

    def wrong(x: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        if named.get("transposed") and len(x) < FEW:
            x, weight = x.flip(1), weight.flip(0)
        return right(x, weight, *given, **named)  # type: ignore[no-any-return]

    return wrong


def tokens_from_the_end(right: Any) -> Any:
    """Sum dweight with the tokens of a sample from the last to the first."""

    def wrong(grad: Tensor, x: Tensor, samples: Samples, *given: Any, **named: Any) -> Tensor:
        spans = tuple((samples.rows - start - length, length) for start, length in samples.spans)
        turned = Samples(spans, samples.rows, samples.first, samples.total)
        return right(grad.flip(0), x.flip(0), turned, *given, **named)  # type: ignore[no-any-return]

    return wrong


SCALED = "tl.where(target < 0, 0.0, tl.load(grad + row) * inverse)"
PULLED = source(LOGPROB, (SCALED, "tl.load(grad + row) * inverse"))
WARM = source(LOGPROB, (SCALED, SCALED.replace(" * inverse", "")))
SPREAD = "1.0 - weight, 0.0 - weight) * scaled"
BLUNTED = source(LOGPROB, (SPREAD, f"{SPREAD} * 0.999755859375"))
BACKWARDS = function(LOGPROB, "sum_weight_grad", tokens_from_the_end)

# ---- the twins -------------------------------------------------------------------------------------------

word_over_the_batch, word_neighbours_target = scored(OVER_THE_BATCH), scored(NEIGHBOURS)
word_ignored_counted, word_without_the_tail = scored(COUNTED), scored(NO_TAIL)
word_not_rescaled, word_a_hair_more = scored(NOT_RESCALED), scored(HAIR_MORE)
word_bf16_logits, word_temperature_after = scored(BF16_LOGITS), scored(COOLED_LATE)
word_vocabulary_reversed = scored(WORDS_REVERSED)
word_padding_counted = scored(function(LOGPROB, "whole_samples", all_rows))
word_dhidden_by_rows = scored(function(LOGPROB, "multiply", words_backwards))
word_ignored_pulled, word_without_temperature = scored(PULLED), scored(WARM)
word_blunted, word_tokens_backwards = scored(BLUNTED), scored(BACKWARDS)

loss_over_the_batch, loss_neighbours_target = averaged(OVER_THE_BATCH), averaged(NEIGHBOURS)
loss_bf16_logits, loss_ignored_pulled = averaged(BF16_LOGITS), averaged(PULLED)
loss_tokens_backwards = averaged(BACKWARDS)

# ---- distillation ----------------------------------------------------------------------------------------

# The terms as differences, without the series near 0: what is left of them where models are alike is rounding.
NEAR = "tl.where(a < 1.0, (a * a) * polynomial(a), a - (1.0 - exp_nonpositive(-a)))"
BY_DIFFERENCES = source("isobit.ops.distillation.triton", (NEAR, "a - (1.0 - exp_nonpositive(-a))"))
distilled_by_differences = Distilled(twin(distillation_loss, BY_DIFFERENCES))

# ---- logits ----------------------------------------------------------------------------------------------


def rounded_to_inputs(right: Any) -> Any:
    """Round to the dtype of the inputs and widen again."""
    return lambda x, weight, bias, dtype, **named: right(x, weight, bias, x.dtype, **named).to(
        dtype
    )


def features_backwards(right: Any) -> Any:
    """Sum the features of few rows from the last to the first."""

    def wrong(x: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        if x.shape[:-1].numel() < FEW:
            x, weight = x.flip(-1), weight.flip(-1)
        return right(x, weight, *given, **named)  # type: ignore[no-any-return]

    return wrong


END = "    return total{}\n\n\n@triton.jit\ndef store_tile"
FIRST = "LENGTH if x.dtype.element_ty != tl.float32 else min(LENGTH, LEAF)"
head_bf16_logits = headed(source(PRODUCTS, (END.format(""), END.format(NARROW))))
head_widened_late = headed(function(LINEAR, "multiply", rounded_to_inputs))
head_decoding_otherwise = headed(function(LINEAR, "multiply", features_backwards))
head_without_the_last_feature = headed(
    source(
        PRODUCTS,
        (FIRST, FIRST.replace("LENGTH", "(LENGTH - 1)")),
        ("if WHOLE < LENGTH:", "if WHOLE < LENGTH - 1:"),
    )
)
head_temperature_after, head_neighbours_target = trained(COOLED_LATE), trained(NEIGHBOURS)
head_without_the_tail = trained(NO_TAIL)
