"""Cross entropy of logits in Triton: a loss per row, and a mean that is added by atomics.

Try, from the root of the repository:

    isobit certify examples/certify/cross_entropy.py:cross_entropy --rows 1,3,20
    isobit certify examples/certify/cross_entropy.py:mean_by_atomics
"""

import torch
import triton
import triton.language as tl

VOCABULARY = 1000


@triton.jit
def cross_entropy_kernel(
    logits,  # [rows, n_cols]
    labels,  # [rows]
    losses,  # [rows], or one number with MEAN
    n_rows,
    n_cols,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row * n_cols
    highest = -float("inf")
    total = 0.0
    # Online softmax: a running maximum, and a running sum that is rescaled when it grows.
    for start in range(0, n_cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < n_cols, other=-float("inf"))
        values = values.to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), axis=0)
        highest = higher
    label = tl.load(labels + row)
    loss = tl.log(total) + highest - tl.load(logits + label).to(tl.float32)
    if MEAN:
        tl.atomic_add(losses, loss / n_rows)
    else:
        tl.store(losses + row, loss)


def loss_of(logits, labels, block, mean=False, num_warps=4):
    """Return the loss of each row, or their mean."""
    rows, columns = logits.shape
    losses = torch.zeros(1 if mean else rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, labels, losses, rows, columns, block, mean, num_warps=num_warps
    )
    return losses


def operands(rows):
    """Return logits, and one label for all rows: integers are part of the expression."""
    return torch.randn(rows, VOCABULARY).to(torch.bfloat16), torch.full((rows,), 7)


def cross_entropy(rows, BLOCK=256, num_warps=4):
    """Certify a loss per row."""
    return loss_of(*operands(rows), BLOCK, num_warps=num_warps)


def mean_by_atomics():
    """Certify a mean that every program adds its loss to. It has no rows, so there is no `rows`."""
    return loss_of(*operands(8), block=256, mean=True)
