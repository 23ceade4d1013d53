"""Write the golden digests of this version of the order: `python -m tests.golden.write_digests` (a minute).

Run it once for a new version, and read the difference before committing it. The digests come from
the definition in plain torch operations, not from the kernels, so any machine writes the same file;
test_digests.py then compares the kernels of the machine at hand with it.
"""

import json
from pathlib import Path

import torch

from isobit.ops.linear import portable
from isobit.ops.portable.sums import multiply_add, one_nan, round_once, widen_rows
from isobit.order.evaluate import AMX_BLOCK, SMALLEST_NORMAL
from isobit.order.plan import VERSION, FeaturePlan
from isobit.order.tree import merge
from tests.golden.golden_cases import CASES, digests, key_of

PATH = Path(__file__).parent / "linear.json"


def chain_parameter_grads(grad, x, samples):
    return portable.weight_grad(grad, x, samples), portable.bias_grad(grad, samples)


def flush(values):
    """Replace subnormal numbers by zeros with their sign."""
    zero = torch.copysign(torch.zeros_like(values), values)
    return torch.where(values.abs() < SMALLEST_NORMAL, zero, values)


def amx_leaf(total, leaf, left, right):
    """Continue `total` [R, C] by a leaf of left [R, k] against right [C, k]: see order.evaluate.amx_engine."""
    if not leaf.length:
        return total + 0.0
    stop = leaf.start + leaf.length
    for start in range(leaf.start, stop, AMX_BLOCK):
        halves = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, min(start + AMX_BLOCK, stop)):
            half = (k - start) % 2
            halves[half] = flush(multiply_add(left[:, k, None], right[None, :, k], halves[half]))
        total = flush(flush(total) + flush(halves[0] + halves[1]))
    return total


def amx_products(segments, left, right):
    """Return [R, C], the sums of left [R, k] against right [C, k] over all segments."""
    left, right, sums = flush(left), flush(right), []
    for segment in segments:
        total = torch.zeros(len(left), len(right))
        for leaf in segment:
            total = amx_leaf(total, leaf, left, right)
        sums.append(total)
    return one_nan(merge(sums, torch.add))


def amx_output(x, weight, bias):
    total = amx_products(FeaturePlan(x.shape[-1]).segments, widen_rows(x), widen_rows(weight))
    return round_once(total + bias.float(), x.dtype)


def amx_input_grad(grad, weight):
    segments = FeaturePlan(grad.shape[-1]).segments
    return round_once(amx_products(segments, widen_rows(grad), widen_rows(weight).t()), grad.dtype)


def amx_parameter_grads(grad, x, samples):
    total = amx_products(samples.segments, widen_rows(grad).t(), widen_rows(x).t())
    return round_once(total, x.dtype), portable.bias_grad(grad, samples)


CHAIN = portable.linear, portable.input_grad, chain_parameter_grads
AMX = amx_output, amx_input_grad, amx_parameter_grads


def all_digests():
    """Return the digests of every case and engine, by key."""
    found = {}
    for case in CASES:
        dtype, k, n = case
        for engine, functions in {"chain": CHAIN, "amx": AMX}.items():
            if engine == "chain" or dtype == "bfloat16":
                found[key_of(dtype, engine, k, n)] = digests(*functions, *case)
    return found


if __name__ == "__main__":
    written = {"order": VERSION, "digests": all_digests()}
    PATH.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{PATH.name}: {len(written['digests'])} cases of version {VERSION} of the order")
