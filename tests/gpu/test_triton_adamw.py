"""Steps of AdamW and exact clipping by Triton kernels have the CPU's bits, in fp32, bf16 and fp16."""

import math

import pytest
import torch

pytest.importorskip("triton")

import isobit.certifying
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.foundation.launches import record_launches
from isobit.library.on_gpu.twins import source
from isobit.ops.adamw import portable
from isobit.ops.attesting import wide_values
from isobit.ops.exact_sum import portable as exact_digits
from isobit.ops.gpu import executors
from isobit.ops.gpu.attestation import attest_operator
from isobit.optim import AdamW, clip_grad_norm_, get_total_norm
from tests.sweeps import mostly_full

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGETS = ["sm_80", "sm_90", "sm_100"]
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in ((5, 7), (530,), (1,), (0, 3)):
        p = torch.nn.Parameter(wide_values(shape, dtype, generator) / 8)
        p.grad = wide_values(shape, dtype, generator) / 8
        found.append(p)
    return found


def trained(dtype, steps=2, **options):
    """Return the parameters, norms and moments after some steps with clipping."""
    given = parameters(dtype)
    optimizer, norms = AdamW(given, lr=1e-2, weight_decay=0.1, **options), []
    for number in range(steps):
        for p, other in zip(given, parameters(dtype, number), strict=True):
            p.grad = other.grad
        norms.append(clip_grad_norm_(given, 1.0))
        optimizer.step()
    moments = [
        optimizer.state[p][name] for p in given for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    return [*(p.detach() for p in given), *norms, *moments]


def moved(numbers, dtype):
    """Return the arguments of a step, and its result by the definition."""
    generator = torch.Generator().manual_seed(5)
    p, grad, first, second = (wide_values((3, 900), dtype, generator) for _ in range(4))
    grad[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-44]).to(dtype)
    given = (p, grad, first, second.abs())
    return given, portable.adamw(*given, numbers)


def by_kernel(given, numbers, kind="interpreter", target="sm_90"):
    executors.prepare("adamw", given[0].dtype)
    with isobit.certifying.executing(kind, target=target):
        return torch.ops.isobit.triton_adamw(*given, *numbers)


@of_dtypes
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_a_step_has_the_bits_of_the_definition(dtype, betas):
    numbers = portable.numbers_of(1e-2, betas, 1e-8, 0.1, 3.0)
    given, expected = moved(numbers, dtype)
    assert all(map(bits.equal, by_kernel(given, numbers), expected))


@of_dtypes
def test_a_compiled_step_has_the_bits_of_the_definition(dtype):
    """One target per dtype; the full run has all."""
    assert compiled_differences(dtype, TARGETS[DTYPES.index(dtype)]) == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@of_dtypes
def test_a_compiled_step_on_every_target(dtype, target):
    assert compiled_differences(dtype, target) == []


def compiled_differences(dtype, target):
    """Return which of the three results differ."""
    numbers = portable.numbers_of(1e-2, (0.9, 0.999), 1e-8, 0.1, 3.0)
    given, expected = moved(numbers, dtype)
    given, expected = ([t[:1, :600].contiguous() for t in each] for each in (given, expected))
    found = by_kernel(given, numbers, "machine", target)
    return [
        at for at, pair in enumerate(zip(found, expected, strict=True)) if not bits.equal(*pair)
    ]


@pytest.mark.parametrize(
    "change",
    [
        (
            "mean * keep_mean + g * add_mean",
            "tl.math.fma(mean, keep_mean + mean * 0, g * add_mean)",
        ),
        ("(g * add_square) * g", "(g * g) * add_square"),
        ("tl.sqrt_rn(square) * spread + eps", "tl.sqrt_rn(square * (spread * spread)) + eps"),
        ("tl.sqrt_rn(square)", "square * tl.div_rn(1.0, tl.sqrt_rn(square))"),
        ("tl.div_rn(mean * rate, divisor)", "tl.div_rn(mean, divisor) * rate"),
        ("* spread + eps", "* spread"),
    ],
    ids=["fused", "squared first", "corrected inside", "root", "divided first", "without eps"],
)
def test_a_wrong_step_is_found(change):
    numbers = portable.numbers_of(1e-2, (0.9, 0.999), 1e-3, 0.1, 3.0)
    given, expected = moved(numbers, torch.float32)
    executors.prepare("adamw", torch.float32)
    with source("isobit.ops.adamw.triton", change)():
        found = by_kernel(given, numbers)
    assert not all(map(bits.equal, found, expected))


@pytest.mark.parametrize("dtype", mostly_full(DTYPES, DTYPES[1:2]), ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("maximize", [False, True])
def test_training_has_the_bits_of_the_cpu(dtype, maximize):
    expected = trained(dtype, maximize=maximize)
    with isobit.certifying.executing("interpreter"):
        found = trained(dtype, maximize=maximize)
    assert len(found) == len(expected) == 18
    assert all(map(bits.equal, found, expected))


def test_a_step_writes_in_place_and_counts_the_write():
    """Also with clipping inside; one that cannot be written in place is copied, with the same bits."""
    found = {}
    for layout in ("contiguous", "strided"):
        p = torch.arange(1.0, 13.0).reshape(3, 4)
        p = torch.nn.Parameter(p if layout == "contiguous" else p.t().contiguous().t())
        p.grad = torch.full_like(p, 3.0)
        optimizer = AdamW([p], lr=1e-2)
        version = p._version
        with isobit.certifying.executing("interpreter"), record_launches() as launches:
            optimizer.clip_and_step(1.0)
        assert p._version > version
        found[layout] = [launch.operator for launch in launches], p.detach().contiguous()
    assert "adamw_" in found["contiguous"][0]
    assert "scaled" not in found["contiguous"][0]
    assert "adamw_" not in found["strided"][0]
    assert bits.equal(found["contiguous"][1], found["strided"][1])


def test_the_norm_of_a_tensor_is_added_in_parts(monkeypatch):
    """A GPU adds digits of 2^28 values at once; here of 100, with a default device that is no CPU."""
    x = wide_values((1003,), torch.float32, torch.Generator().manual_seed(4))
    expected = get_total_norm(x)
    monkeypatch.setattr(exact_digits, "MOST_AT_ONCE", 100)
    with isobit.certifying.executing("interpreter"), record_launches() as launches:
        found = get_total_norm(x)
        with torch.device("meta"):
            again = get_total_norm(x)
    assert bits.equal(found, expected)
    assert bits.equal(again, expected)
    assert [launch.operator for launch in launches] == ["exact_state"] * 22


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_without_a_kernel_are_refused_before_anything_changes(option):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], **{option: True})
    with (
        isobit.certifying.executing("interpreter"),
        pytest.raises(UnsupportedError, match=f"without {option}"),
    ):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, dtype=torch.bfloat16))
    assert not optimizer.state


@of_dtypes
def test_norms_and_clipped_gradients_have_the_bits_of_the_cpu(dtype):
    """Also of values whose squares are below or above the range of fp32."""

    def found():
        given = parameters(dtype)
        given[1].grad[:4] = torch.tensor([1e-30, 3e-45, -2.0, 1e30]).to(dtype).nan_to_num(posinf=1)
        return [clip_grad_norm_(given, 1.0), *(p.grad for p in given)]

    expected = found()
    with isobit.certifying.executing("interpreter"):
        assert all(map(bits.equal, found(), expected))


@pytest.mark.parametrize(
    "values", [[math.inf, -math.inf], [math.nan, 1.0], [1e-45] * 2, [3e38] * 2, [-math.inf], []]
)
def test_norms_of_special_values(values):
    x = torch.tensor(values)
    with isobit.certifying.executing("interpreter"):
        found = get_total_norm(x)
    assert bits.equal(found, get_total_norm(x))


@of_dtypes
def test_it_is_attested(dtype):
    with isobit.certifying.executing("interpreter"):
        found = attest_operator("adamw", dtype, torch.device("cpu"))
    assert (found.kept, found.checks) == (True, 1)


def test_a_wrong_kernel_is_not_attested():
    executors.prepare("adamw", torch.float32)
    wrong = source(
        "isobit.ops.adamw.triton", ("tl.sqrt_rn(square)", "tl.sqrt_rn(square * 1.0000001)")
    )
    with isobit.certifying.executing("interpreter"), wrong():
        found = attest_operator("adamw", torch.float32, torch.device("cpu"))
    assert (found.kept, "AdamW's step" in found.detail) == (False, True)


@pytest.mark.full
def test_digits_of_the_norm_are_attested():
    with isobit.certifying.executing("interpreter"):
        found = attest_operator("exact_sum", torch.bfloat16, torch.device("cpu"))
    assert (found.kept, found.checks) == (True, 1)
