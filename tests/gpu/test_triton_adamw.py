"""Steps of AdamW and exact clipping by Triton kernels have the CPU's bits, or are refused by name.

torch's square root of fp32 is not correctly rounded on every CPU, so AdamW in fp32 is refused where it is not; its
kernel is compared with the definition, which has the right root. Wrong kernels are found.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

import isobit.compiled
from isobit import bits
from isobit.errors import EngineError, UnsupportedError
from isobit.library.on_gpu.twins import source
from isobit.ops.adamw import portable, step
from isobit.ops.gpu import executors
from isobit.ops.gpu.attestation import attest_operator
from isobit.ops.portable.hard_inputs import wide_values
from isobit.optim import AdamW, clip_grad_norm_, get_total_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
    """Return the arguments of a step, and its result with a square root that is correctly rounded."""
    generator = torch.Generator().manual_seed(5)
    p, grad, first, second = (wide_values((3, 900), dtype, generator) for _ in range(4))
    second = second.abs()
    given = (p, grad, first, second)
    return given, portable.adamw(*given, numbers, portable.exact_root)


def by_kernel(given, numbers, kind="interpreter"):
    executors.prepare("adamw", given[0].dtype)
    with isobit.compiled.executing(kind, target="sm_90"):
        return torch.ops.isobit.triton_adamw(*given, *numbers)


@of_dtypes
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.25, 0.5)])
def test_a_step_has_the_bits_of_the_definition(dtype, betas):
    numbers = portable.numbers_of(1e-2, betas, 1e-8, 0.1, 3.0)
    given, expected = moved(numbers, dtype)
    assert all(map(bits.equal, by_kernel(given, numbers), expected))


def test_a_compiled_step_has_the_bits_of_the_definition():
    numbers = portable.numbers_of(1e-2, (0.9, 0.999), 1e-8, 0.1, 3.0)
    given, expected = moved(numbers, torch.float32)
    given, expected = ([t[:1, :600].contiguous() for t in each] for each in (given, expected))
    assert all(map(bits.equal, by_kernel(given, numbers, "machine"), expected))


@pytest.mark.parametrize(
    "change",
    [
        ("tl.math.fma(weight, g - old, old if NEAR else g)", "weight * (g - old) + old"),
        (
            "tl.math.fma(g * ADDED, g, rounded(squares * KEEP, dtype))",
            "g * g * ADDED + squares * KEEP",
        ),
        ("tl.div_rn(mean * STEP, divisor)", "tl.div_rn(mean, divisor) * STEP"),
        ("rounded(divisor + EPS, dtype)", "divisor"),
    ],
    ids=["mean not fused", "squares not fused", "divided first", "without eps"],
)
def test_a_wrong_step_is_found(change):
    numbers = portable.numbers_of(1e-2, (0.9, 0.999), 1e-3, 0.1, 3.0)
    given, expected = moved(numbers, torch.float32)
    executors.prepare("adamw", torch.float32)
    with source("isobit.ops.adamw.triton", change)():
        found = by_kernel(given, numbers)
    assert not all(map(bits.equal, found, expected))


def test_training_in_bf16_has_the_bits_of_the_cpu():
    expected = trained(torch.bfloat16)
    with isobit.compiled.executing("interpreter"):
        found = trained(torch.bfloat16)
    assert len(found) == len(expected) == 18
    assert all(map(bits.equal, found, expected))


def test_fp32_is_refused_where_the_square_root_of_torch_is_inexact(monkeypatch):
    with isobit.compiled.executing("interpreter"):
        monkeypatch.setattr(portable, "inexact_roots", lambda dtype: (3, 10))
        with pytest.raises(EngineError, match="3 of 10 that are not"):
            trained(torch.float32, 1)
        monkeypatch.setattr(portable, "inexact_roots", lambda dtype: (0, 10))
        assert len(trained(torch.float32, 1)) == 17
    assert trained(torch.float32, 1)  # on the CPU it is torch's step


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_without_a_kernel_are_refused_before_anything_changes(option):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], **{option: True})
    with (
        isobit.compiled.executing("interpreter"),
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
    with isobit.compiled.executing("interpreter"):
        assert all(map(bits.equal, found(), expected))


@pytest.mark.parametrize(
    "values", [[math.inf, -math.inf], [math.nan, 1.0], [1e-45] * 2, [3e38] * 2, [-math.inf], []]
)
def test_norms_of_special_values(values):
    x = torch.tensor(values)
    with isobit.compiled.executing("interpreter"):
        found = get_total_norm(x)
    assert bits.equal(found, get_total_norm(x))


@of_dtypes
def test_it_is_attested(dtype):
    with isobit.compiled.executing("interpreter"):
        found = attest_operator("adamw", dtype, torch.device("cpu"))
    assert (found.kept, found.checks) == (True, 1)


def test_a_wrong_kernel_is_not_attested():
    executors.prepare("adamw", torch.float32)
    wrong = source(
        "isobit.ops.adamw.triton", ("tl.sqrt_rn(squares)", "tl.sqrt_rn(squares * 1.0000001)")
    )
    with isobit.compiled.executing("interpreter"), wrong():
        found = attest_operator("adamw", torch.float32, torch.device("cpu"))
    assert (found.kept, "AdamW's step" in found.detail) == (False, True)


def test_digits_of_the_norm_are_attested():
    with isobit.compiled.executing("interpreter"):
        found = attest_operator("exact_sum", torch.bfloat16, torch.device("cpu"))
    assert (found.kept, found.checks) == (True, 1)


@of_dtypes
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_portable_step_is_that_of_torch(dtype, decay):
    numbers = portable.numbers_of(1e-2, (0.8, 0.95), 1e-3, decay, 1.0)
    (p,) = parameters(dtype)[1:2]
    zeros = torch.zeros_like(p.detach())
    expected = step.adamw(p, p.grad, zeros, zeros, numbers)
    optimizer = AdamW([p], lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)
    optimizer.step()
    moments = optimizer.state[p]
    found = (p.detach(), moments["exp_avg"], moments["exp_avg_sq"])
    assert all(map(bits.equal, found, expected))
