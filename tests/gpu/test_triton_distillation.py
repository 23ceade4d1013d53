"""The Triton executor of distillation_loss: divergences and gradients without the logits of a whole batch.

1. In fp32 all bits are those of the CPU's executor; in 16 bits those of the plan over the target's tensor core.
2. How many logits are computed at a time has no effect, and [tokens, vocabulary] never exists.
3. A token does not depend on the others; wrong kernels are caught.
"""

import numpy as np
import pytest
import torch
from stand_in_card import Card, on_card
from stand_in_card import operators as operators_run

import isobit
from isobit import bits
from isobit.errors import ArgumentError

pytest.importorskip("triton")
from isobit.certifying import executing
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.foundation.launches import record_launches
from isobit.library.on_gpu.twins import source
from isobit.ops.distillation import portable
from isobit.ops.distillation import triton as executor
from isobit.ops.logprob import triton as logprob_executor
from isobit.ops.logprob.portable import finish, inverse
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import Pair, merge_pairs, one_nan, round_once, sum_last
from isobit.order.plan import FeaturePlan
from tests.certifying.plan import operators
from tests.certifying.plan.domain import Values
from tests.certifying.plan.operators import Arithmetic
from tests.certifying.running import raw
from tests.sweeps import mostly_full

F32, BF16 = torch.float32, torch.bfloat16
TEMPERATURE, BETA = 0.7, 0.3
ALPHA = 31 / 32  # so that the cross-entropy does not hide the last bits of a divergence
KINDS = ("live", "logits", "words")
CASES = [(direction, kind) for direction in portable.DIRECTIONS for kind in KINDS]
full = pytest.mark.full


def problem(tokens, words, kind="live", dtype=F32, width=16):
    """Return (hidden, weight, teacher, targets), with words on which both models agree.

    Many words are likely, so that each one's term counts.
    """
    generator = torch.Generator().manual_seed(words)
    hidden, weight, other, head = (
        (torch.randn(n, width, generator=generator) * spread).to(dtype)
        for n, spread in ((tokens, 0.25), (words, 1.0)) * 2
    )
    other[0], head[: words // 2] = hidden[0], weight[: words // 2]
    targets = torch.randint(0, words, (tokens,), generator=generator)
    targets[tokens // 2] = -100
    logits = torch.nn.functional.linear(other.float(), head.float())
    known = (logits / TEMPERATURE).log_softmax(-1).topk(min(3, words))
    ids, logprobs = known.indices, known.values - 1e-3
    ids[-1, -1] = -1
    teachers = {"live": (other, head), "logits": logits.to(dtype), "words": (ids, logprobs)}
    return hidden, weight, teachers[kind], targets


def results(hidden, weight, teacher, targets, direction, lengths=None):
    """Return losses of tokens and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    how = {"temperature": TEMPERATURE, "direction": direction, "beta": BETA, "reduction": "none"}
    how["alpha"] = ALPHA
    samples = isobit.Samples.packed(lengths) if lengths else None
    found = isobit.distillation_loss(*leaves, teacher, targets, samples=samples, **how)
    grad = torch.randn(targets.shape, generator=torch.Generator().manual_seed(3))
    return [found.detach(), *torch.autograd.grad(found, leaves, grad.to(targets.device))]


def run(given, direction, *rest, kind="interpreter", target="sm_90"):
    with executing(kind, target=target), record_launches() as launches:
        found = results(*given, direction, *rest)
    assert {launch.executor for launch in launches} == {"triton"}
    return found


def same(left, right):
    assert len(left) == len(right) == 3
    return all(bits.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- bits ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("direction", "kind"), CASES)
@pytest.mark.sweep(4)
def test_fp32_has_the_bits_of_the_cpu(direction, kind):
    given = problem(5, 37, kind)
    assert same(run(given, direction, [2, 3]), results(*given, direction, [2, 3]))


@pytest.mark.parametrize("case", mostly_full(CASES, [CASES[0], CASES[-1]]), ids=str)
@pytest.mark.sweep(1)
def test_segments_of_words_have_the_bits_of_the_cpu(case):
    """1100 words are 4 segments of 275: 4 times 4 steps of 16, a step, and 3 words."""
    direction, kind = case
    given = problem(3, 1100, kind)
    assert same(run(given, direction), results(*given, direction))


@pytest.mark.parametrize("direction", portable.DIRECTIONS)
@pytest.mark.sweep(1)
def test_hard_values(direction):
    hidden, weight, (other, head), targets = problem(9, 37)
    hidden[1, 3], hidden[2, 2], hidden[3], other[4] = torch.nan, torch.inf, -0.0, -0.0
    hidden[5] *= 2.0**60
    other[6] *= 2.0**60
    head[7, 5] = -torch.inf
    other[8], hidden[8] = 2.0**-140, 2.0**-140
    given = hidden, weight, (other, head), targets
    expected = results(*given, direction)
    assert expected[0].isnan().any()
    assert same(run(given, direction), expected)


def planned(target, hidden, weight, teacher, targets, direction, lengths):
    """Return the same by the plan over the tensor core of the target, in bf16, with a live teacher."""
    plan = Arithmetic(Values(), "bf16", ENGINE_OF_TARGET[target])
    plain, others = (
        torch.from_numpy(operators.linear(plan, raw(a), raw(b)))
        for a, b in ((hidden, weight), teacher)
    )
    factor, words = inverse(TEMPERATURE, F32), FeaturePlan(len(weight))
    total = merge_pairs(plain, words.segments, Pair)
    chosen = plain.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    logprob, of_targets = finish(one_nan(torch.cat([total.max, total.sum], 1)), chosen, targets)
    stats = torch.zeros(len(plain), portable.STATS)
    stats[:, :2] = portable.maximum_and_log(plain * factor)
    stats[:, 2:4] = portable.maximum_and_log(others * factor)
    compared = portable.words_of(plain * factor, others * factor, stats, False)
    beta = torch.tensor(BETA)
    terms, offsets = compared.terms(direction, beta)
    divergence = torch.where(targets < 0, 0.0, sum_last(terms).squeeze(1))
    offset = divergence[:, None] if offsets is None else sum_last(offsets)
    weighed = torch.tensor(ALPHA * TEMPERATURE * TEMPERATURE)
    found = divergence * weighed + logprob * torch.tensor(ALPHA - 1)
    grad = torch.randn(targets.shape, generator=torch.Generator().manual_seed(3))
    none = targets < 0
    by_divergence = torch.where(none, 0.0, grad * weighed * factor)[:, None]
    by_target = torch.where(none, 0.0, grad * torch.tensor(ALPHA - 1))[:, None]
    likely = exp_nonpositive(portable.normalised(plain, of_targets))
    toward = torch.where(torch.arange(len(weight)) == targets[:, None], 1.0 - likely, -likely)
    spread = compared.gradient(direction, beta, offset) * by_divergence + toward * by_target
    factors, samples = raw(round_once(spread, BF16)), isobit.Samples.packed(lengths)
    sums = (
        operators.linear(plan, factors, np.ascontiguousarray(raw(weight).T)),
        operators.weight_grad(plan, factors, raw(hidden), samples),
    )
    grads = [torch.from_numpy(plan.result(each).view("int16")).view(BF16) for each in sums]
    return [found, *grads]


@pytest.mark.parametrize("direction", mostly_full(portable.DIRECTIONS, ["jsd"]))
def test_16_bits_have_the_bits_of_the_plan(direction):
    given = problem(5, 37, dtype=BF16)
    expected = planned("sm_90", *given, direction, [2, 3])
    assert same(run(given, direction, [2, 3]), expected)


@pytest.mark.parametrize(
    "case", mostly_full(CASES, [("jsd", "live"), ("reverse", "words")]), ids=str
)
@pytest.mark.sweep(1)
def test_compiled_code(case):
    direction, kind = case
    given = problem(3, 34, kind)
    assert same(run(given, direction, kind="machine"), results(*given, direction))


@full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_compiled_code_in_16_bits(target):
    given = problem(3, 34, dtype=BF16)
    expected = planned(target, *given, "forward", [3])
    assert same(run(given, "forward", [3], kind="machine", target=target), expected)


def test_a_model_and_itself_have_no_divergence_and_no_gradient():
    for dtype in (F32, BF16):
        hidden, weight, _, targets = problem(5, 37, dtype=dtype)
        for direction in portable.DIRECTIONS:
            leaf = hidden.clone().requires_grad_()
            with executing("interpreter"):
                how = {"alpha": 1.0, "temperature": TEMPERATURE, "direction": direction}
                loss = isobit.distillation_loss(leaf, weight, (hidden, weight), targets, **how)
                loss.backward()
            assert bits.equal(loss.detach(), torch.zeros(()))
            assert not leaf.grad.any()


def test_a_teacher_in_another_dtype():
    hidden, weight, (other, head), targets = problem(4, 21)
    given = hidden, weight, (other[:, :8].half().float(), head[:, :8].half().float()), targets
    narrow = hidden, weight, tuple(t.half() for t in given[2]), targets
    with executing("interpreter"):
        found = results(*narrow, "forward")
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found, results(*given, "forward"), rtol=1e-3, atol=1e-4)


# ---- chunks and batches -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(1)
def test_logits_of_the_whole_batch_never_exist(monkeypatch, kind):
    given = problem(6, 60, kind)
    expected, sizes, launch = results(*given, "jsd", [2, 4]), [], executor.run
    monkeypatch.setattr(logprob_executor, "CHUNK", 240)
    monkeypatch.setattr(logprob_executor, "WORDS", (48, 24, 6))

    def watch(kernel, grid, logits, *args, **how):
        sizes.extend(t.numel() for t in (logits, *args) if isinstance(t, torch.Tensor))
        launch(kernel, grid, logits, *args, **how)

    monkeypatch.setattr(executor, "run", watch)
    assert same(run(given, "jsd", [2, 4]), expected)
    assert max(sizes) <= 120 < 6 * 60


def test_a_token_does_not_depend_on_its_batch():
    hidden, weight, (other, head), targets = problem(4, 37, dtype=BF16)
    whole = run((hidden, weight, (other, head), targets), "jsd")
    for i in range(4):
        one = slice(i, i + 1)
        alone = run((hidden[one], weight, (other[one], head), targets[one]), "jsd")
        assert bits.equal(alone[0], whole[0][one])


# ---- wrong kernels ------------------------------------------------------------------------------
DISTILLATION = "isobit.ops.distillation.triton"
WRONG = {
    "no series near 0": ("forward", "(a * a) * polynomial(a), a - ", "a - (1.0 - exp_nonpositive(-a)), a - "),
    "the digits of 1 - part": ("jsd", "tl.div_rn(part, 1.0 - middle)", "1.0"),
    "the offset": ("reverse", "(0.0 - ratio) - offset", "(0.0 - ratio) - offset * 1.0000001"),
    "words that are not known": ("forward", "tl.where(unknown, rest, ratio)", "tl.where(unknown, 0.0, ratio)"),
    "lanes": ("forward", "tl.arange(0, 16)[None, :]", "(tl.arange(0, 16) * 3 % 16)[None, :]"),
    "segments": ("jsd", "tl.arange(0, SEGMENTS)[None, :]", "(tl.arange(0, SEGMENTS) * 3 % SEGMENTS)[None, :]"),
    "steps": ("forward", "at = start + 16 * step", "at = start + 16 * (STEPS - 1 - step)"),
    "the end of a segment": ("reverse", "range(WHOLE, LENGTH, 16)", "range(WHOLE, LENGTH // 16 * 16, 16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sweep(3)
def test_a_wrong_kernel_is_caught(name):
    direction, old, new = WRONG[name]
    words = 1100 if name in ("segments", "steps", "the end of a segment") else 37
    given = problem(5, words, "words" if "known" in name else "live")
    if "near 0" in name:
        given = *given[:2], (given[0] * 1.0625, given[1]), given[3]
    expected = results(*given, direction)
    with source(DISTILLATION, (old, new))():
        assert not same(run(given, direction), expected)
    assert same(run(given, direction), expected)


# ---- devices ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_on_a_card_stays_there(kind):
    def move(part):
        return tuple(map(move, part)) if isinstance(part, tuple) else Card(part.clone())

    given = problem(4, 21, kind)
    with on_card():
        moved = [move(part) for part in given]
        found = results(*moved, "jsd")
        assert all(isinstance(t, Card) for t in found)
        ours = {name for name in operators_run if name.startswith("isobit::")}
        assert "isobit::triton_distillation_loss_backward" in ours
        assert all(name.startswith("isobit::triton_") for name in ours)
        with pytest.raises(ArgumentError, match="a teacher on cpu"):
            isobit.distillation_loss(*moved[:2], given[2], moved[3])
    assert same([t.held for t in found], results(*given, "jsd"))
