"""The cases of the golden digests: inputs whose sums cancel, and the digests of what a layer makes of them."""

import torch

from isobit import bits
from isobit.contracts.judge.recipes import mirror
from isobit.library.claims import SAMPLE_LENGTHS
from isobit.ops.attesting import wide_values
from isobit.order.samples import Samples

# (K, N): four and eight segments of K, one segment, eight longer ones; two long segments of N, for dX.
SIZES = ((1024, 192), (3072, 70), (333, 65), (4096, 65), (65, 2550))
CASES = [(dtype, k, n) for dtype in ("float32", "bfloat16", "float16") for k, n in SIZES]


def key_of(dtype, engine, k, n):
    return f"{dtype} {engine} {k}x{n}"


def digests(output, input_grad, parameter_grads, dtype, k, n):
    """Return the digests of y, dX, dW and db, as three functions compute them."""
    dtype = getattr(torch, dtype)

    def draw(*shape, seed):
        return wide_values(shape, dtype, torch.Generator().manual_seed(seed))

    # Every sum cancels: see docs/decisions/0004.
    weight = mirror(mirror(draw(n, k, seed=1), 1, -1), 0, -1)
    bias = draw(n, seed=2) * 2.0**-20
    x, grad = mirror(draw(5, k, seed=1), 1, 1), mirror(draw(5, n, seed=2), 1, 1)
    rows = sum(SAMPLE_LENGTHS)
    token_grad, token_x = mirror(draw(rows, n, seed=3), 0, -1), mirror(draw(rows, k, seed=4), 0, 1)
    weight_grad, bias_grad = parameter_grads(token_grad, token_x, Samples.packed(SAMPLE_LENGTHS))
    return {
        "x": bits.digest(x),
        "y": bits.digest(output(x, weight, bias)),
        "dX": bits.digest(input_grad(grad, weight)),
        "dW": bits.digest(weight_grad),
        "db": bits.digest(bias_grad),
    }
