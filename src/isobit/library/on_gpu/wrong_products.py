"""Wrong Triton kernels with products: linear and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isobit.library.attention.planted import attention
from isobit.library.linear.planted import OURS, grads_by, input_grad_by
from isobit.library.on_gpu.twins import source, twin
from isobit.ops.linear.op import linear

PRODUCTS = "isobit.ops.linear.triton_products"
FORWARD = "isobit.ops.attention.triton_forward"
NARROW = ".to(tl.bfloat16).to(tl.float32)"


def layer_with(*changes: Any) -> Any:
    """Return a linear layer with wrong kernels in all passes."""
    wrong = twin(linear, *changes)
    return replace(
        OURS,
        output=wrong,
        input_grad=lambda grad, weight: input_grad_by(wrong, grad, weight),
        parameter_grads=lambda grad, x, samples: grads_by(wrong, grad, x, samples),
    )


END = "    return total{}\n\n\n@triton.jit\ndef store_tile"
linear_bf16_segments = layer_with(source(PRODUCTS, (END.format(""), END.format(NARROW))))

# ---- attention -------------------------------------------------------------------------------------------

SEES = "end = tl.minimum(position + 1 + after, key_count)"
FACTOR = "factor = exp_nonpositive(most - base)"
FOLD = "for first in range(start, stop, BLOCK):"
STATE = "output = tl.where(folds, output * factor + added, output)"
attention_sees_the_next = twin(
    attention, source(FORWARD, (SEES, "end = tl.minimum(position + 2 + after, key_count)"))
)
NEW = "new = tl.maximum(most, tl.max(scores, 1)[:, None])"
# Each block has its own maximum, and what was added before is not rescaled to it.
attention_without_rescaling = twin(
    attention,
    source(
        FORWARD,
        (NEW, "new = tl.max(scores, 1)[:, None]"),
        (FACTOR, "factor = tl.where(most == -float('inf'), 0.0, 1.0)"),
    ),
)
attention_bf16_accumulator = twin(attention, source(FORWARD, (STATE, f"{STATE}{NARROW}")))
SUM = "total * factor + add_lanes(weights, ROWS)"
attention_by_count = twin(
    attention,
    source(FORWARD, (SUM, f"({SUM}) * (1.0 + tl.minimum(query_count, 2) * 1.1920929e-07)")),
)
attention_backwards = twin(
    attention,
    source(
        FORWARD,
        (
            FOLD,
            "for back in range(start, stop, BLOCK):\n        first = start // BLOCK * BLOCK + "
            "(stop - 1) // BLOCK * BLOCK - back // BLOCK * BLOCK",
        ),
    ),
)
attention_heads_mixed = twin(
    attention,
    source(
        FORWARD,
        ("* KEY_HEADS + head\n", "* KEY_HEADS + (KEY_HEADS - 1 - head)\n"),
    ),
)
# A maximum over a tile would not leave its sample: the first key of the call is of any sample.
FIRST_KEY = "tl.max(tl.abs(tl.load(k + tl.arange(0, 16)).to(tl.float32))) * 4.0"
attention_batch_maximum = twin(
    attention, source(FORWARD, (NEW, f"{NEW}\n        new = tl.maximum(new, {FIRST_KEY})"))
)
attention_row_blocks = twin(
    attention,
    source(
        FORWARD,
        (FOLD, "for first in range(start - tl.load(blocks) % BLOCK, stop, BLOCK):"),
        ("tl.load(blocks + first // BLOCK)", "tl.load(blocks) + first"),
    ),
)
