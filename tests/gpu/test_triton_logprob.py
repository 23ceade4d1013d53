"""The Triton executor of linear_logprob: log-probabilities and gradients without the logits of a whole batch.

1. In fp32 all bits are those of the CPU's executor; in 16 bits those of the plan over the target's tensor core.
2. How many logits are computed at a time has no effect, and [tokens, vocabulary] never exists.
3. A token does not depend on the others; another number of segments is caught.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import isobit

pytest.importorskip("triton")
from isobit.certifying import executing
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.foundation.launches import record_launches
from isobit.library.on_gpu.twins import source
from isobit.ops.logprob import portable
from isobit.ops.logprob import triton as executor
from isobit.ops.portable.elementary import exp_nonpositive, soft_cap
from isobit.ops.portable.sums import Pair, merge_pairs, one_nan, round_once, sum_products
from isobit.order.plan import FeaturePlan
from tests.certifying.plan import operators
from tests.certifying.plan.domain import Values
from tests.certifying.plan.operators import Arithmetic
from tests.certifying.running import raw
from tests.gpu.named_launches import SHORT
from tests.gpu.planted_attention import cap_by_reciprocal, cap_with_factored_slope
from tests.sweeps import mostly_full

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TEMPERATURE = 0.7
full = pytest.mark.full


def problem(dtype, tokens, width, words):
    generator = torch.Generator().manual_seed(words)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (tokens, words))
    hidden, weight = (hidden * 2 * width**-0.5).to(dtype), weight.to(dtype)
    targets = torch.randint(0, words, (tokens,), generator=generator)
    targets[tokens // 2] = -100
    return hidden, weight, targets, torch.randn(tokens, generator=generator)


def results(hidden, weight, targets, grad, lengths=None, cap=None):
    """Return log-probabilities and gradients."""
    given = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    samples = isobit.Samples.packed(lengths) if lengths else None
    how = {"temperature": TEMPERATURE, "samples": samples, "softcap": cap}
    found = isobit.linear_logprob(*given, targets, **how)
    return [found.detach(), *torch.autograd.grad(found, given, grad)]


def run(kind, target, *given):
    with executing(kind, target=target):
        return results(*given)


def planned(target, hidden, weight, targets, grad, lengths, cap=None):
    """Return the same by the plan over the tensor core of the target."""
    dtype = hidden.dtype
    plan = Arithmetic(Values(), SHORT[dtype], ENGINE_OF_TARGET[target])
    logits = torch.from_numpy(operators.linear(plan, raw(hidden), raw(weight)))
    inverse = portable.inverse(TEMPERATURE, F32)
    logits, slope = soft_cap(logits, cap) if cap else (logits, torch.ones(()))
    scaled, words = logits * inverse, FeaturePlan(len(weight))
    total = merge_pairs(scaled, words.segments, Pair)
    chosen = scaled.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    found, stats = portable.finish(one_nan(torch.cat([total.max, total.sum], 1)), chosen, targets)
    weights = exp_nonpositive((scaled - stats[:, :1]) - stats[:, 1:])
    is_target = torch.arange(len(weight)) == targets[:, None]
    upstream = torch.where(targets < 0, 0.0, grad * inverse)[:, None]
    spread = torch.where(is_target, 1.0 - weights, -weights) * upstream * slope
    samples = isobit.Samples.packed(lengths)
    if dtype == F16:
        by_token = sum_products(words.products, spread, weight.float().t())[0]
        by_word = sum_products(samples.segments, spread.t(), hidden.float().t())[0]
        return [found, round_once(by_token, dtype), round_once(by_word, dtype)]
    factors = raw(round_once(spread, dtype))
    sums = (
        operators.linear(plan, factors, np.ascontiguousarray(raw(weight).T)),
        operators.weight_grad(plan, factors, raw(hidden), samples),
    )
    return [
        found,
        *(torch.from_numpy(plan.result(each).view("int16")).view(dtype) for each in sums),
    ]


def same(left, right):
    assert len(left) == len(right) == 3
    return [isobit.bits.equal(a, b) for a, b in zip(left, right, strict=True)] == [True] * 3


# ---- bits ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tokens", "width", "words", "lengths"),
    [
        (6, 48, 30, [2, 4]),
        (5, 20, 1026, None),
        (3, 20, 1100, None),
        (3, 514, 5, [3, 0]),
        (2, 3, 1, None),
    ],
)
@pytest.mark.sweep(2)
def test_fp32_has_the_bits_of_the_cpu(tokens, width, words, lengths):
    given = (*problem(F32, tokens, width, words), lengths)
    assert same(results(*given), run("interpreter", "sm_90", *given))


@pytest.mark.parametrize("target", mostly_full(["sm_80", "sm_90"], ["sm_90"]))
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.sweep(1)
def test_16_bits_have_the_bits_of_the_plan(dtype, target):
    given = (*problem(dtype, 6, 40, 520), [2, 4])
    assert same(planned(target, *given), run("interpreter", target, *given))


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        pytest.param(dtype, target, marks=[] if kept else full)
        for dtype, target, kept in (
            (F32, "sm_80", False),
            (BF16, "sm_80", False),
            (F16, "sm_80", False),
            (F32, "sm_90", False),
            (BF16, "sm_90", True),
            (F16, "sm_100", False),
            (F32, "sm_100", False),
            (BF16, "sm_100", False),
        )
    ],
)
def test_compiled_code(dtype, target):
    given = (*problem(dtype, 4, 24, 34), [1, 3])
    assert same(planned_or_cpu(target, *given), run("machine", target, *given))


@pytest.mark.parametrize("cap", [30.0, 0.9])
@pytest.mark.sweep(1)
def test_a_soft_cap_has_the_bits_of_the_cpu(cap):
    given = (*problem(F32, 5, 20, 530), [2, 3], cap)
    assert same(results(*given), run("interpreter", "sm_90", *given))
    loss = [isobit.linear_cross_entropy(*given[:3], softcap=cap)]
    with executing("interpreter"), record_launches() as launches:
        loss.append(isobit.linear_cross_entropy(*given[:3], softcap=cap))
    assert {launch.executor for launch in launches} == {"triton"}
    assert isobit.bits.equal(*loss)


@pytest.mark.parametrize("dtype", mostly_full([BF16, F16], [BF16]))
def test_a_soft_cap_in_16_bits_has_the_bits_of_the_plan(dtype):
    given = (*problem(dtype, 6, 40, 270), [2, 4], 1.7)
    assert same(planned("sm_90", *given), run("interpreter", "sm_90", *given))


@pytest.mark.parametrize(
    ("dtype", "target"), [(F32, "sm_90"), pytest.param(BF16, "sm_80", marks=full)]
)
def test_a_soft_cap_in_compiled_code(dtype, target):
    given = (*problem(dtype, 3, 24, 34), [1, 2], 1.7)
    assert same(planned_or_cpu(target, *given), run("machine", target, *given))


def test_wrong_caps_are_caught(monkeypatch):
    given = (*problem(F32, 5, 20, 40), None, 1.7)
    expected = results(*given)
    for wrong in (cap_by_reciprocal, cap_with_factored_slope):
        with monkeypatch.context() as patch:
            patch.setattr(executor, "soft_cap", wrong)
            assert not same(expected, run("interpreter", "sm_90", *given))
    assert same(expected, run("interpreter", "sm_90", *given))


def planned_or_cpu(target, hidden, *rest):
    return results(hidden, *rest) if hidden.dtype == F32 else planned(target, hidden, *rest)


def test_hard_values():
    hidden, weight, targets, grad = problem(F32, 7, 20, 530)
    hidden[0, 3], hidden[1, 2], hidden[4] = torch.nan, torch.inf, -0.0
    weight[7, 5] = -torch.inf
    grad[5] = torch.inf
    expected = results(hidden, weight, targets, grad)
    assert expected[0].isnan().any()
    assert same(expected, run("interpreter", "sm_90", hidden, weight, targets, grad))


# ---- chunks and batches -------------------------------------------------------------------------
def test_logits_of_the_whole_batch_never_exist(monkeypatch):
    given = (*problem(BF16, 5, 16, 60), [2, 3])
    expected, sizes, launch = run("interpreter", "sm_90", *given), [], executor.run
    monkeypatch.setattr(executor, "CHUNK", 120)
    monkeypatch.setattr(executor, "WORDS", (48, 24, 6))

    def watch(kernel, grid, logits, *args, **how):
        sizes.append(logits.numel())
        launch(kernel, grid, logits, *args, **how)

    monkeypatch.setattr(executor, "run", watch)
    assert same(expected, run("interpreter", "sm_90", *given))
    assert len(sizes) == 2 * 3 + 3 + 3  # the words are scanned and chosen, then both gradients
    assert max(sizes) <= 120 < 5 * 60


def test_a_token_does_not_depend_on_its_batch():
    hidden, weight, targets, grad = problem(BF16, 3, 40, 270)
    whole = run("interpreter", "sm_80", hidden, weight, targets, grad)
    for i in range(3):
        one = slice(i, i + 1)
        alone = run("interpreter", "sm_80", hidden[one], weight, targets[one], grad[one])
        assert isobit.bits.equal(alone[0], whole[0][one])
        assert isobit.bits.equal(alone[1], whole[1][one])


def test_other_segments_of_the_vocabulary_are_caught(monkeypatch):
    given = problem(F32, 5, 20, 1024)
    expected = results(*given)
    monkeypatch.setattr(executor, "FeaturePlan", lambda words: SimpleNamespace(count=1))
    received = run("interpreter", "sm_90", *given)
    assert not isobit.bits.equal(expected[0], received[0])


# ---- a program per segment ----------------------------------------------------------------------
EXP = "total + exp_nonpositive(value - base)"
WRONG = {
    "segments are merged in a different sequence": (
        "tl.arange(0, SEGMENTS)[None, :]",
        "(tl.arange(0, SEGMENTS) * 3 % SEGMENTS)[None, :]",
    ),
    "a segment is read for its neighbour": (
        "segment = tl.program_id(1)",
        "segment = tl.program_id(1) // 2 * 2",
    ),
    "steps are added descending": (
        "at = start + 16 * step",
        "at = start + 16 * (STEPS - 1 - step)",
    ),
    "the last words are left out": (
        "range(WHOLE, LENGTH, 16)",
        "range(WHOLE, LENGTH // 16 * 16, 16)",
    ),
    "words after the segment are added": (f"tl.where(known, {EXP}, total)", EXP),
}


@pytest.mark.parametrize("name", [None, *WRONG])
def test_a_wrong_segment_is_caught(name):
    """1100 words are 4 segments of 275: 2 times 8 steps of 16, a step, and 3 words."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.rand(12, 1, generator=generator) * 0.5 + 1
    weight = -6 - 8 * torch.rand(1100, 1, generator=generator)
    weight[40::275] = 0.0  # a target in each segment, so likely that the logarithm hides few bits
    given = hidden, weight, torch.full((12,), 40)
    expected = isobit.linear_logprob(*given)
    change = source("isobit.ops.logprob.triton", WRONG[name]) if name else nullcontext
    with change(), executing("interpreter", target="sm_90"):
        received = isobit.linear_logprob(*given)
    assert isobit.bits.equal(received, expected) == (name is None)


@pytest.mark.parametrize("rows", [1, 3, 64, 441])
def test_each_segment_of_a_real_vocabulary_has_its_own_programs(rows, monkeypatch):
    """The kernels and their constants are the same for all numbers of rows."""
    found = []
    monkeypatch.setattr(
        executor, "run", lambda kernel, grid, *_, **how: found.append((kernel.__name__, grid, how))
    )
    logits = torch.empty(rows, 151_936, device="meta")
    executor.choose(logits, logits[:, 0], 1.0, logits[:, 0], logits[:, :2])
    constants = {"N": 151_936, "SEGMENTS": 8, "warps": 1}
    assert found == [
        ("sum_segments", (-(-rows // 2), 8), {**constants, "ROWS": 2}),
        ("choose_words", (-(-rows // 16),), {**constants, "ROWS": 16}),
    ]
