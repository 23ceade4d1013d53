"""The step of AdamW has the bits of its definition, whichever executor computes it and wherever an element lies.

1. The definition is that of numpy's fp32, operation by operation, on hard values; square roots are correctly rounded.
2. The native step in place is the definition, for every size, storage and number of threads.
3. Tensors that share memory are stepped one after another.
"""

import numpy
import pytest
import torch

import isobit.optim
from isobit import bits
from isobit.foundation.machine import thread_count
from isobit.ops import dispatch
from isobit.ops.adamw import portable, step
from isobit.ops.attesting import wide_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
NUMBERS = portable.numbers_of(1e-3, (0.9, 0.999), 1e-8, 0.1, 3.0)
SPECIAL = [0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-45, -1e-40, 3e38, -3e38]
SIZES = (0, 1, 15, 16, 17, 40, 16383, 16385, 3 * 16384 + 5)  # a piece of the kernel has 16384


def draw(shape, dtype, seed=0):
    """Return p, grad, first, second; special values meet each other in many ways."""
    generator = torch.Generator().manual_seed(seed)
    found = [wide_values(shape, dtype, generator) for _ in range(4)]
    for tensor in found:
        flat, special = tensor.view(-1), torch.tensor(SPECIAL).to(dtype)
        at = torch.randint(0, max(flat.numel(), 1), (flat.numel() // 5,), generator=generator)
        flat[at] = special[torch.randint(0, len(SPECIAL), (len(at),), generator=generator)]
    found[3].abs_()
    return found


def native(given, numbers=NUMBERS, factor=1.0):
    """Return a step of the native executor; the arguments are not changed."""
    p, grad, first, second = ([tensor.clone() for tensor in each] for each in given)
    updates = [step.Update(*each, numbers) for each in zip(p, grad, first, second, strict=True)]
    step.adamw_(updates, factor)
    return [*p, *first, *second]


def by_numpy(given, numbers):
    """Return a step in numpy's fp32, written out: one operation per line."""
    with numpy.errstate(all="ignore"):
        decay, keep, add, keep_square, add_square, spread, eps, rate = map(numpy.float32, numbers)
        p, g, m, v = (tensor.float().numpy() for tensor in given)
        kept = m * keep
        added = g * add
        mean = kept + added
        kept = v * keep_square
        part = g * add_square
        added = part * g
        square = kept + added
        root = numpy.sqrt(square)
        divisor = root * spread
        divisor = divisor + eps
        update = mean * rate
        update = update / divisor
        decayed = p * decay
        value = decayed - update
    dtype = given[0].dtype
    found = (torch.from_numpy(x).to(dtype) for x in (value, mean, square))
    return [torch.where(x.isnan(), torch.nan, x) for x in found]


@of_dtypes
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
@pytest.mark.parametrize("count", [1.0, 100_000.0])
def test_the_definition_is_that_of_numpy(dtype, betas, count):
    numbers = portable.numbers_of(1e-3, betas, 1e-8, 0.1, count)
    given = draw((4001,), dtype)
    found = portable.adamw(*given, numbers)
    assert all(x.dtype == dtype for x in found)
    assert any(x.isnan().any() for x in found)
    assert all(map(bits.equal, found, by_numpy(given, numbers)))


def test_square_roots_are_correctly_rounded():
    """All of bf16, and 2^17 mantissas of fp32 in two neighbouring binades, subnormals, zeros and infinity."""
    generator = torch.Generator().manual_seed(1)
    mantissas = torch.rand(2**17, generator=generator) * 3 + 1
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([mantissas, mantissas * 2.0**-130, every[every.isfinite()]])
    with numpy.errstate(all="ignore"):
        expected = torch.from_numpy(numpy.sqrt(values.numpy()))
    assert bits.equal(portable.exact_root(values), expected)
    wrong = values * values.rsqrt()  # what a GPU's fast mode does
    assert not bits.equal(wrong[: 2**17], expected[: 2**17])


@of_dtypes
def test_the_native_step_is_the_definition(dtype):
    assert dispatch.is_native(dtype)
    groups = [draw((size,), dtype, size) for size in SIZES]
    expected = [portable.adamw(*group, NUMBERS) for group in groups]
    given = tuple(zip(*groups, strict=True))
    for threads in (1, 2, 3):
        with thread_count(threads):
            found = native(given)
        wanted = [each[part] for part in range(3) for each in expected]
        assert len(found) == 3 * len(SIZES)
        assert all(map(bits.equal, found, wanted))


@of_dtypes
def test_a_factor_is_that_of_scaled_gradients(dtype):
    groups = [draw((size,), dtype, size) for size in SIZES]
    p, grads, first, second = zip(*groups, strict=True)
    for factor in (0.3, 1e-5, 1.0):
        smaller = [portable.scaled(grad, factor) for grad in grads]
        expected = native((p, smaller, first, second))
        assert all(map(bits.equal, native((p, grads, first, second), factor=factor), expected))
        assert (factor == 1.0) == all(map(bits.equal, native((p, grads, first, second)), expected))


def test_every_value_of_fp16_is_read_and_rounded():
    """The processor's conversion, and the one in C++ where it has none, are the definition's."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for power in range(-30, 30):
        for factor in (2.0**power, 1.3 * 2.0**power):
            found = every.clone()
            step.scale_([found], factor)
            assert bits.equal(found, portable.scaled(every, factor)), factor


@of_dtypes
def test_storage_does_not_matter(dtype):
    groups = draw((24, 35), dtype, 7)
    expected = portable.adamw(*groups, NUMBERS)

    def stored(tensor, kind):
        room = torch.zeros(70, 90, dtype=dtype)
        places = {
            "transposed": room.as_strided((24, 35), (1, 24)),
            "sliced": room[1:49:2, 3:38],
            "shifted": room.view(-1)[1:841].view(24, 35),
        }
        return places[kind].copy_(tensor)

    kinds = ("transposed", "sliced", "shifted")
    for own in kinds:
        for of_grad in kinds:
            p, first, second = (stored(groups[at], own) for at in (0, 2, 3))
            update = step.Update(p, stored(groups[1], of_grad), first, second, NUMBERS)
            update.check()
            step.adamw_([update])
            assert all(map(bits.equal, (p, first, second), expected)), (own, of_grad)


def test_parameters_that_share_memory_are_stepped_in_turn():
    p, grad, first, second = draw((40_000,), torch.float32, 9)
    expected = p.clone()
    for part in (expected[:30_000], expected[10_000:]):
        part.copy_(portable.adamw(part, grad[:30_000], first[:30_000], second[:30_000], NUMBERS)[0])
    parts = (p[:30_000], p[10_000:])
    moments = [(first[:30_000].clone(), second[:30_000].clone()) for _ in parts]
    with thread_count(2):
        step.adamw_(
            [
                step.Update(part, grad[:30_000], *each, NUMBERS)
                for part, each in zip(parts, moments, strict=True)
            ]
        )
    assert bits.equal(p, expected)


def test_autograd_sees_that_a_parameter_has_changed():
    p = torch.nn.Parameter(torch.ones(3))
    y = (p * p).sum()
    p.grad = torch.ones(3)
    isobit.optim.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@of_dtypes
def test_the_native_scaling_is_the_definition(dtype):
    given = [draw((size,), dtype, size)[0] for size in SIZES]
    strided = torch.zeros(30, 20, dtype=dtype)[::2, 1::3].copy_(draw((15, 7), dtype)[0])
    factor = float(torch.tensor(0.3))
    expected = [portable.scaled(x, factor) for x in (*given, strided)]
    step.scale_([*given, strided], factor)
    assert all(map(bits.equal, (*given, strided), expected))


def test_direct_calls_are_checked():
    x, y = torch.ones(3), torch.ones(4)
    call, numbers = torch.ops.isobit.adamw_, list(NUMBERS)
    isobit.optim.get_total_norm(x)  # attests the kernels
    for given, message in (
        (([x], [y], [x], [x], numbers), "like the parameter"),
        (([x], [x], [x], [], numbers), "two moments for each"),
        (([x], [x], [x], [x], numbers[1:]), "8 numbers"),
        (([x.double()], [x.double()], [x.double()], [x.double()], numbers), "float32, bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*given)
    assert bits.equal(x, torch.ones(3))
