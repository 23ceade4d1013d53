"""Golden digests: version 1 of the order gives these bits, on this engine, for ever. A change is a new version."""

import json
from pathlib import Path

import pytest
import torch

from isobit import bits
from isobit.contracts.relations import Problem
from isobit.contracts.subject import OURS
from isobit.contracts.transforms import SAMPLE_LENGTHS
from isobit.ops import dispatch
from isobit.order.plan import VERSION
from isobit.order.samples import Samples

GOLDEN = json.loads((Path(__file__).parent / "linear.json").read_text())
CASES = [(d, k, n) for d in ("float32", "bfloat16", "float16") for k, n in ((1024, 192), (3072, 70), (333, 65))]


def digests(dtype, k, n):
    problem = Problem("golden", k, n, dtype)
    x, grad = problem.x(5, seed=1), problem.grad(5, seed=2)
    token_grad, token_x = problem.tokens(sum(SAMPLE_LENGTHS), seed=3)
    weight_grad, bias_grad = OURS.parameter_grads(token_grad, token_x, Samples.packed(SAMPLE_LENGTHS))
    return {
        "x": bits.digest(x),
        "y": bits.digest(OURS.output(x, problem.weight, problem.bias)),
        "dX": bits.digest(OURS.input_grad(grad, problem.weight)),
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
