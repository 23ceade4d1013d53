"""Compiled executors against the definition in the PTX machine: operators × dtypes × targets × tiles, counted.

In fp32, and for operators without products, bits are those of the CPU's executor; products of 16 bits have the bits of
the plan over the target's tensor core. Names are compared where the plan has them. Results are kept in build/, by a
digest of the sources, so that a run can be taken up again; with `--quick` only kept ones are shown.
"""

import hashlib
import json
import time
from collections import Counter
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.kernel_launches import SHORT
from benchmarks.records import ROOT
from isobit.certifying import executing
from isobit.ops.attesting import wide_values
from isobit.ops.gpu.executors import prepare
from isobit.ops.linear import triton as linear
from isobit.order.engines import ENGINE_OF_TARGET
from tests.gpu import attention_plans, test_triton_logprob
from tests.gpu.named_launches import Plan, count_differences, forward, input_grad, run_named
from tests.gpu.named_launches import weight_grad as planned_weight_grad
from tests.gpu.operator_calls import SMALL

KEPT = ROOT / "build" / "comparisons"
TARGETS, DTYPES = ("sm_80", "sm_90", "sm_100"), tuple(SHORT)
SAMPLES = isobit.Samples.packed([258, 0, 5, 3])


def draw(*shape, dtype, seed):
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


def compare_bits(pairs):
    """Count values and those whose bits differ; a difference of shape or dtype is one of every value."""
    found = Counter(bits=0, bits_differ=0, names=0, names_differ=0)
    for known, received in pairs:
        found["bits"] += known.numel()
        if isobit.bits.equal(known, received):
            continue
        alike = known.dtype == received.dtype and known.shape == received.shape
        kind = torch.int32 if known.dtype == torch.float32 else torch.int16
        found["bits_differ"] += (
            int((known.view(kind) != received.view(kind)).sum()) if alike else known.numel()
        )
    return found


def compare_call(name, dtype, target):
    """Compare an operator and its gradients with the CPU's executor, on small hard inputs."""
    found = Counter()
    for call in SMALL[name](dtype):
        known = call.results()
        with executing("machine", target=target):
            received = call.results()
        found.update(compare_bits(zip(known, received, strict=True)))
    return found


def compare_plan(target, inputs, function, expected):
    """Compare names and bits of one result with the plan over the target's tensor core."""
    y, names, _ = run_named(target, inputs, function)
    want = Plan(inputs, ENGINE_OF_TARGET[target])(expected)
    differ = count_differences(y, names, want)
    return Counter(bits=y.numel(), bits_differ=differ[1], names=names.size, names_differ=differ[0])


def register(dtype):
    """Import the operator linear, which declares its executor, and register that."""
    assert callable(isobit.linear)
    prepare("linear", dtype)


def compare_linear(dtype, target, many=128):
    """Compare y; `many` is from how many rows on the kernel and the tile of many rows are used."""
    register(dtype)
    given = {"x": (5, 1024), "weight": (20, 1024), "bias": (20,)}
    inputs = {k: draw(*v, dtype=dtype, seed=n) for n, (k, v) in enumerate(given.items())}
    with patch.object(linear, "MANY_ROWS", many):
        return compare_plan(target, inputs, isobit.linear, forward)


def compare_linear_grads(dtype, target):
    """Compare the gradients of input and weight."""
    register(dtype)
    ops = torch.ops.isobit
    by_weight = {
        "grad": draw(3, 514, dtype=dtype, seed=4),
        "weight": draw(514, 18, dtype=dtype, seed=5),
    }
    found = compare_plan(target, by_weight, ops.triton_linear_input_grad, input_grad)
    tokens = {"grad": draw(266, 18, dtype=dtype, seed=6), "x": draw(266, 21, dtype=dtype, seed=7)}

    def sum_tokens(grad, x):
        return ops.triton_linear_weight_grad(grad, x, torch.tensor(SAMPLES.spans), 0)

    found.update(compare_plan(target, tokens, sum_tokens, planned_weight_grad(SAMPLES)))
    return found


def compare_logprob(dtype, target):
    """Compare log-probabilities and both gradients."""
    given = (*test_triton_logprob.problem(dtype, 4, 24, 34), [1, 3])
    known = test_triton_logprob.planned_or_cpu(target, *given)
    return compare_bits(zip(known, test_triton_logprob.run("machine", target, *given), strict=True))


def compare_attention(dtype, target):
    """Compare y and the gradients of a causal sample of 9 tokens."""
    q, k, v = attention_plans.problem(9, 9, heads=1, dtype=dtype)
    grad = attention_plans.draw(*q.shape, dtype=dtype, seed=9)
    if dtype == torch.float32:
        known = attention_plans.with_grads(q, k, v, grad, is_causal=True)
    else:
        plan = attention_plans.SamplePlan(q, k, v, target=target)
        known = [plan.forward(), *plan.backward(grad)]
    with executing("machine", target=target):
        received = attention_plans.with_grads(q, k, v, grad, is_causal=True)
    return compare_bits(zip(known, received, strict=True))


CASES = {
    **{
        (f"{name}, with gradients", "default"): lambda dtype, target, name=name: compare_call(
            name, dtype, target
        )
        for name in SMALL
    },
    ("linear", "few rows: segments on the grid"): compare_linear,
    ("linear", "many rows: counter"): lambda dtype, target: compare_linear(dtype, target, many=1),
    ("linear, gradients", "input, weight"): compare_linear_grads,
    ("linear_logprob, with gradients", "default"): compare_logprob,
    ("attention, with gradients", "default"): compare_attention,
}


def sources():
    """Return the digest of what results depend on."""
    digest = hashlib.sha256()
    for folder in ("ops", "order", "certifying"):
        for path in sorted((ROOT / "src" / "isobit" / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def outcome(key, compare, quick):
    """Return what one case gave: kept, or run now; None if it was not run."""
    file = KEPT / sources() / ("_".join(key).replace(" ", "-").replace(",", "") + ".json")
    if file.is_file():
        return json.loads(file.read_text())
    if quick:
        return None
    begun = time.process_time()
    dtype = next(each for each, short in SHORT.items() if short == key[2])
    found = {**compare(dtype, key[3]), "seconds": time.process_time() - begun}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    return found


def run(quick, threads, dtypes):
    """Print the table; return 1 if something differs, or nothing was run. One target per dtype comes first."""
    console, found, total = Console(highlight=False, width=200), {}, Counter()
    order = sorted(
        ((dtype, target) for dtype in DTYPES for target in TARGETS),
        key=lambda pair: DTYPES.index(pair[0]) != TARGETS.index(pair[1]),
    )
    for dtype, target in order:
        for (operator, tile), compare in CASES.items():
            key = (operator, tile, SHORT[dtype], target)
            found[key] = outcome(key, compare, quick)
    table = Table("operator", "tile", "dtype", *(f"{t}: names, bits differ" for t in TARGETS))
    for operator, tile in CASES:
        for short in SHORT.values():
            cells = []
            for target in TARGETS:
                each = found[operator, tile, short, target]
                total.update(each or {"not run": 1}, cases=bool(each))
                cells.append(describe(each))
            table.add_row(operator, tile, short, *cells)
    console.print(table)
    console.print(
        f"{total['cases']} of {len(found)} cases run: {total['names_differ']} of {total['names']:,} names and"
        f" {total['bits_differ']} of {total['bits']:,} outputs differ; {total['seconds']:.0f} s of one core"
    )
    return int(not total["bits"] or bool(total["names_differ"] + total["bits_differ"]))


def describe(each):
    """Return a cell: "0 of 100 names, 0 of 100"."""
    if each is None:
        return "not run"
    bits = f"{each['bits_differ']} of {each['bits']:,}"
    return f"{each['names_differ']} of {each['names']:,}; {bits}" if each["names"] else f"–; {bits}"
