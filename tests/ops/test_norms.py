"""Norms have one order: a row's bits depend on that row alone, the weights' gradients on the samples alone.

1. Native equals portable, bit for bit, for every kind of extent, dtype and special value.
2. Sums over features and over tokens are the exact evaluator's; gradients are right in fp64.

rmsnorm-kernel-v1 and layernorm-kernel-v1 judge the orders, the invariances and the errors.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.layer_norm import portable as layer_portable
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.rms_norm import portable as rms_portable
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import Share, collecting
from isobit.order.evaluate import ENGINES, evaluate
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


def gradients(function, leaves: list[Tensor], grad: Tensor, **options) -> tuple[Tensor, ...]:
    """The output, then the gradient of each."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def same(found, expected) -> bool:
    return all(bits.first_difference(a, b) is None for a, b in zip(found, expected, strict=True))


def by_portable(x, parameters, grad, samples, heads=0, eps=1e-5):
    if len(parameters) == 1:
        y, scales = rms_portable.rms_norm(x, *parameters, eps)
        return y, *rms_portable.rms_norm_backward(grad, x, *parameters, scales, samples, heads)
    y, means, scales = layer_portable.layer_norm(x, *parameters, eps)
    return y, *layer_portable.layer_norm_backward(grad, x, parameters[0], means, scales, samples)


def norm(count: int, **fixed):
    """The norm that has so many parameters, with one eps."""
    function = rms_norm if count == 1 else layer_norm
    return lambda *given, **options: function(*given, eps=1e-5, **fixed, **options)


@needs_native
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 257, 512, 1025, 2050])
def test_native_equals_portable_over_features(n, dtype, count):
    x, grad = drawn((6, n), n, dtype), drawn((6, n), n + 1, dtype)
    parameters = [drawn((n,), n + 2 + i, dtype) for i in range(count)]
    expected = by_portable(x, parameters, grad, Samples.packed([6]))
    assert same(gradients(norm(count), [x, *parameters], grad), expected)


@needs_native
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 16, 40])
def test_special_values_and_statistics_that_overflow(n, dtype, count):
    x = drawn((9, n), n, dtype)
    x[0, n - 1], x[1, 0], x[2], x[3] = torch.nan, torch.inf, 0.0, torch.finfo(dtype).max
    x[4], x[5], x[6, 0] = torch.finfo(dtype).smallest_normal, -0.0, -torch.inf
    grad, parameters = drawn((9, n), 1, dtype), [drawn((n,), 2 + i, dtype) for i in range(count)]
    function = rms_norm if count == 1 else layer_norm
    for eps in (0.0, 1e-6):
        found = gradients(lambda *t, eps=eps: function(*t, eps=eps), [x, *parameters], grad)
        assert same(found, by_portable(x, parameters, grad, Samples.packed([9]), 0, eps))


def test_sums_are_the_exact_evaluators():
    n, tokens = 1040, 300
    x, weight = drawn((3, n), 1), torch.ones(n)
    squares = (x * x).double().tolist()
    exact = [
        evaluate(FeaturePlan(n).segments, [(t, 1.0) for t in row], ENGINES["striped"])
        for row in squares
    ]
    scale = 1 / (torch.tensor(exact).unsqueeze(1) / n + 1e-6).sqrt()
    assert bits.equal(rms_norm(x, weight), x * scale)
    x, grad, samples = drawn((tokens, 4), 2), drawn((tokens, 4), 3), Samples.packed([7, 280, 13])
    _, _, found = gradients(norm(1, samples=samples), [x, torch.ones(4)], grad)
    scales = rms_portable.rms_norm(x, torch.ones(4), 1e-5)[1].unsqueeze(1)
    terms = (grad * (x * scales)).double().t().tolist()
    want = [
        evaluate(samples.segments, [(t, 1.0) for t in row], ENGINES["striped"]) for row in terms
    ]
    assert bits.equal(found, torch.tensor(want))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (2, 3, 4), (2, 1, 3, 4)])
def test_shapes_are_stocks(shape):
    leaves = [drawn(s, i).requires_grad_() for i, s in enumerate((shape, (4,), (4,)))]
    grad = drawn(shape, 3)
    for ours, stock, used in (
        (layer_norm(*leaves), F.layer_norm(leaves[0], (4,), *leaves[1:]), leaves),
        (rms_norm(*leaves[:2]), F.rms_norm(leaves[0], (4,), leaves[1], 1e-6), leaves[:2]),
    ):
        torch.testing.assert_close(ours, stock)
        found, expected = (torch.autograd.grad(y, used, grad) for y in (ours, stock))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_share_of_the_samples_is_refused_under_autograd():
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    share = Samples.packed([2, 2], first=0, total=4)
    for function in (rms_norm, layer_norm):
        with pytest.raises(
            UnsupportedError, match="samples 0 to 2 of 4, while no share is collected"
        ):
            function(x, weight, samples=share)
        with torch.no_grad():
            assert function(x, weight, samples=share).shape == x.shape


def test_gradcheck_in_fp64():
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2, 5), (5,), (5,))
    )
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, heads=True), (x, weight))
    assert torch.autograd.gradcheck(layer_norm, (x, weight, bias))
    assert torch.autograd.gradcheck(layer_norm, (x, weight))


@needs_native
def test_opcheck():
    rms_norm(torch.ones(1, 1), torch.ones(1)), layer_norm(torch.ones(1, 1), torch.ones(1))
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((2, 5, 3, 7), (7,), (7,)))
    for prefix in ("", "portable_"):
        torch.library.opcheck(
            getattr(torch.ops.isobit, f"{prefix}rms_norm"), (x, weight, 1e-6, None, True)
        )
        torch.library.opcheck(
            getattr(torch.ops.isobit, f"{prefix}layer_norm"), (x, weight, bias, 1e-6, None)
        )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [rms_norm, layer_norm], ids=lambda f: f.__name__)
def test_compiles_whole_with_the_same_bits(function, dynamic):
    x, weight = torch.randn(3, 5, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    options = {"fullgraph": True, "backend": "aot_eager", "dynamic": dynamic}
    compiled = torch.compile(lambda *t: function(*t).square().sum(), **options)
    plain = torch.autograd.grad(function(x, weight).square().sum(), (x, weight))
    assert same(torch.autograd.grad(compiled(x, weight), (x, weight)), plain)


def test_autocast_computes_and_answers_in_fp32():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    for function in (rms_norm, layer_norm):
        with torch.autocast("cpu", torch.bfloat16):
            found = function(x, weight)
        assert bits.equal(found, function(x.float(), weight))


def test_second_order_is_refused():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    (first,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first-order"):
        first.sum().backward()


REFUSED = {
    "dtype": lambda x, w: rms_norm(x.int(), w),
    "two dtypes": lambda x, w: layer_norm(x, w.bfloat16()),
    "weight's size": lambda x, w: rms_norm(x, w[:4]),
    "weight's shape": lambda x, w: layer_norm(x, x),
    "bias's size": lambda x, w: layer_norm(x, w, w[:4]),
    "no heads": lambda x, w: rms_norm(x[0], w, heads=True),
    "eps": lambda x, w: rms_norm(x, w, -1.0),
    "eps that is a tensor": lambda x, w: layer_norm(x, w, eps=w),
    "samples": lambda x, w: rms_norm(x, w, samples=Samples.packed([3])),
    "samples that count heads": lambda x, w: rms_norm(
        x.view(2, 2, 8), w, samples=Samples.packed([4]), heads=True
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_expected_received_and_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.randn(4, 8), torch.ones(8))


@needs_native
def test_direct_calls_are_guarded():
    x, weight = torch.randn(2, 8), torch.ones(8)
    y, scales = torch.ops.isobit.rms_norm(x, weight, 1e-6, None, False)
    for wrong in (x[:1], x.bfloat16()):
        with pytest.raises(RuntimeError, match="remedy"):
            torch.ops.isobit.rms_norm_backward(wrong, x, weight, scales, None, False)
    with pytest.raises(RuntimeError, match="remedy"):
        torch.ops.isobit.rms_norm_backward(y, x, weight, scales, torch.tensor([[0, 3]]), False)
    with pytest.raises(RuntimeError, match="remedy"):
        torch.ops.isobit.layer_norm(x, weight[:4], None, 1e-6, None)


def stock_gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As GemmaRMSNorm.forward of transformers."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_is_added_to_the_weight_in_fp32(dtype, heads):
    """The bits are those of fp32 rows and of the fp32 factor, rounded once; not of 1 + w rounded first."""
    shape = (9, heads, 24) if heads else (9, 24)
    x, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    x, grad, weight = x.to(dtype), grad.to(dtype), (drawn((24,), 3) * 0.01).to(dtype)
    options = {"samples": Samples.packed([4, 0, 5]), "heads": bool(heads)}
    found = gradients(norm(1, offset=1.0, **options), [x, weight], grad)
    wide = [x.float(), 1.0 + weight.float()]
    expected = gradients(norm(1, **options), wide, grad.float())
    assert same(found, [t.to(dtype) for t in expected])
    # The definition, and its own gradient: within the roundings of the dtype.
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    stock = stock_gemma(*leaves, 1e-5)
    room = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    wanted = (stock, *torch.autograd.grad(stock, leaves, grad))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=room, atol=8 * room)
    if dtype != torch.float32:  # planted: what a caller would do without `offset`
        rounded = gradients(norm(1, **options), [x, 1.0 + weight], grad)
        assert not bits.equal(found[0], rounded[0])


def test_an_offset_of_any_executor_batch_and_layout_has_one_result():
    x, grad, weight = drawn((12, 40), 1), drawn((12, 40), 2), drawn((40,), 3)
    whole = gradients(norm(1, offset=1.0, samples=Samples.packed([5, 7])), [x, weight], grad)
    expected = by_portable(x, [1.0 + weight], grad, Samples.packed([5, 7]))
    assert same(whole, expected)
    padded = Samples.of_spans([(1, 5), (8, 7)], 16, 0, 2)
    places = [*range(1, 6), *range(8, 15)]
    rows, upstream = drawn((16, 40), 4), torch.zeros(16, 40)
    rows[places], upstream[places] = x, grad
    y, dx, dweight = gradients(norm(1, offset=1.0, samples=padded), [rows, weight], upstream)
    assert same((y[places], dx[places], dweight), whole)
    assert bits.equal(norm(1, offset=1.0)(x[3:4], weight), whole[0][3:4])


def test_an_offset_of_zero_is_the_plain_norm_and_others_must_be_finite():
    x, weight = drawn((3, 8), 1), drawn((8,), 2)
    assert bits.equal(rms_norm(x, weight, offset=0.0), rms_norm(x, weight))
    for wrong in (float("nan"), float("inf"), "1", None):
        with pytest.raises(ArgumentError, match="offset as a finite number"):
            rms_norm(x, weight, offset=wrong)


def test_a_gradient_of_a_share_is_not_rounded_with_an_offset():
    """Whole batch and two shares have one gradient of a bf16 weight."""
    x, grad = drawn((8, 6), 1, torch.bfloat16), drawn((8, 6), 2, torch.bfloat16)
    weight = torch.nn.Parameter(drawn((6,), 3, torch.bfloat16))
    whole = Samples.packed([2, 2, 2, 2])
    _, _, expected = gradients(norm(1, offset=1.0, samples=whole), [x, weight], grad)
    found = []
    weight.grad_dtype = torch.float32
    for first in (0, 2):
        rows = slice(2 * first, 2 * first + 4)
        with collecting(Share(first, 4, 2)):
            samples = Samples.packed([2, 2], first=first, total=4)
            y = rms_norm(x[rows], weight, 1e-5, samples=samples, offset=1.0)
            (part,) = torch.autograd.grad(y, [weight], grad[rows])
        assert part.dtype == torch.float32
        found.append(part)
    assert bits.equal((found[0] + found[1]).to(torch.bfloat16), expected)
