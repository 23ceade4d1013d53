"""Golden digests: version 1 of the order gives these bits, on this engine, for ever. A change is a new version."""

import json
from pathlib import Path

import pytest
import torch

from isobit import bits
from isobit.contracts.judge.recipes import mirror
from isobit.library.linear.implementations import OURS
from isobit.library.placements import SAMPLE_LENGTHS
from isobit.ops import dispatch
from isobit.ops.portable.hard_inputs import wide_values
from isobit.order.plan import VERSION
from isobit.order.samples import Samples

GOLDEN = json.loads((Path(__file__).parent / "linear.json").read_text())
CASES = [
    (d, k, n)
    for d in ("float32", "bfloat16", "float16")
    for k, n in ((1024, 192), (3072, 70), (333, 65))
]


def digests(dtype, k, n):
    def draw(*shape, seed):
        return wide_values(shape, dtype, torch.Generator().manual_seed(seed))

    # Every sum cancels: see docs/decisions/0004.
    weight = mirror(mirror(draw(n, k, seed=1), 1, -1), 0, -1)
    bias = draw(n, seed=2) * 2.0**-20
    x, grad = mirror(draw(5, k, seed=1), 1, 1), mirror(draw(5, n, seed=2), 1, 1)
    rows = sum(SAMPLE_LENGTHS)
    token_grad, token_x = mirror(draw(rows, n, seed=3), 0, -1), mirror(draw(rows, k, seed=4), 0, 1)
    weight_grad, bias_grad = OURS.parameter_grads(
        token_grad, token_x, Samples.packed(SAMPLE_LENGTHS)
    )
    return {
        "x": bits.digest(x),
        "y": bits.digest(OURS.output(x, weight, bias)),
        "dX": bits.digest(OURS.input_grad(grad, weight)),
        "dW": bits.digest(weight_grad),
        "db": bits.digest(bias_grad),
    }


@pytest.mark.parametrize(("dtype", "k", "n"), CASES)
def test_golden(dtype, k, n):
    engine = dispatch.engine_of(getattr(torch, dtype))
    key = f"v{VERSION} {dtype} {engine} {k}x{n}"
    if key not in GOLDEN:
        pytest.skip(f"no golden digest for engine {engine}")
    assert digests(getattr(torch, dtype), k, n) == GOLDEN[key]
