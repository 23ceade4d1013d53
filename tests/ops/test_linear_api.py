"""The operator in torch's world: opcheck, gradcheck, compile, autocast, specials, refusals, freezing."""

import warnings

import numpy as np
import pytest
import torch

import isobit
from isobit import Samples, bits
from isobit.ops import dispatch
from isobit.ops.linear import op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def test_poison_is_on():
    assert torch.empty(8).isnan().all()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_native(dtype):
    isobit.linear(torch.zeros(1, 1), torch.zeros(1, 1))
    x = torch.randn(2, 5, 70, dtype=dtype, requires_grad=True)
    w, b = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((9, 70), (9,)))
    torch.library.opcheck(torch.ops.isobit.linear, (x, w, b, None, None))
    spans = torch.tensor(Samples.packed([4, 6]).spans)
    torch.library.opcheck(torch.ops.isobit.linear, (x, w, None, spans, None))
    grad = torch.randn(2, 5, 9, dtype=dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.isobit.linear_input_grad, (grad, w.detach()), test_utils=tests)
    torch.library.opcheck(
        torch.ops.isobit.linear_weight_grad, (grad, x.detach(), None), test_utils=tests
    )
    torch.library.opcheck(torch.ops.isobit.linear_bias_grad, (grad, spans), test_utils=tests)


def test_opcheck_portable():
    x, w = torch.randn(2, 5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    torch.library.opcheck(torch.ops.isobit.portable_linear, (x, w, None, None))


def test_gradcheck_in_fp64():
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (3,)))
    assert torch.autograd.gradcheck(isobit.linear, (x, w, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_whole_with_the_same_bits(dtype):
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    layer = isobit.nn.Linear(64, 32, dtype=dtype)
    samples = Samples.packed([5, 10])

    def step(x):
        return layer(x, samples=samples).square().sum()

    plain = torch.autograd.grad(step(x), (x, *layer.parameters()))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(plain, torch.autograd.grad(compiled(x), (x, *layer.parameters())), strict=True):
        assert bits.equal(a, b)


def test_vmap_and_second_order_are_refused():
    x, w = torch.randn(3, 4, 8), torch.randn(5, 8, requires_grad=True)
    with pytest.raises(isobit.UnsupportedError, match="vmap"):
        torch.func.vmap(lambda v: isobit.linear(v, w.detach()))(x)
    (first,) = torch.autograd.grad(isobit.linear(x, w).square().sum(), w, create_graph=True)
    with pytest.raises(isobit.UnsupportedError, match="first-order"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 8), (2, 0, 8), (0, 3, 8), (8,), (1, 8), (2, 3, 4, 8), (3, 0)]
)
def test_leading_shapes(dtype, shape):
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    w, b = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((5, shape[-1]), (5,)))
    y = isobit.linear(x, w, b)
    stock = torch.nn.functional.linear(x, w, b)
    assert y.shape == stock.shape
    torch.testing.assert_close(y, stock)
    grads, wanted = (torch.autograd.grad(t.sum(), (x, w, b)) for t in (y, stock))
    for g, s in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_propagate_as_in_stock(dtype):
    x, w = torch.randn(4, 600, dtype=dtype), torch.randn(70, 600, dtype=dtype)
    x[0, 5], x[1, 6], x[2, 7], x[2, 300] = torch.nan, torch.inf, torch.inf, -torch.inf
    w[3, 9], w[4, 6] = torch.nan, 0.0
    ours, stock = isobit.linear(x, w), torch.nn.functional.linear(x, w)
    assert torch.equal(ours.isnan(), stock.isnan())
    assert torch.equal(ours.isposinf(), stock.isposinf())
    assert torch.equal(ours.isneginf(), stock.isneginf())
    payloads = bits.as_integers(ours)[ours.isnan()].unique()
    assert len(payloads) == 1  # one NaN, whatever met on the way
    # Two NaNs of different payload meet: which survives must not depend on the path taken.
    x.fill_(1.0)
    x[0, 0] = torch.nan
    w[0, 0] = -torch.tensor(torch.nan, dtype=dtype)
    assert bits.equal(isobit.linear(x[:1], w), isobit.linear(x, w)[:1])


def test_fp16_overflow_and_subnormals_round_once():
    x = torch.tensor([[300.0, 300.0], [2.0**-13, 0.0]], dtype=torch.float16)
    w = torch.tensor([[300.0, 300.0], [2.0**-11, 0.0]], dtype=torch.float16)
    y = isobit.linear(x, w)
    assert y[0, 0].item() == torch.inf
    assert y[1, 1].item() == 2.0**-24


def test_flush_denormal_mode_does_not_reach_the_kernels():
    x, w = torch.full((1, 8), 2.0**-70), torch.full((64, 8), 2.0**-70)
    before = isobit.linear(x, w)
    assert (before > 0).all()
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("no flush mode here")
        after = isobit.linear(x, w)
    finally:
        torch.set_flush_denormal(False)
    assert bits.equal(before, after)


@needs_native
def test_a_disabled_engine_is_refused():
    x = torch.randn(2, 64)
    isobit.linear(x, x)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags does
    try:
        with pytest.raises(RuntimeError, match=r"(?s)oneDNN.*remedy"):
            isobit.linear(x, x)
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_autocast_casts_as_stock_does():
    x, w = torch.randn(3, 64), torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = isobit.linear(x, w)
    assert y.dtype == torch.bfloat16
    assert bits.equal(y, isobit.linear(x.bfloat16(), w.bfloat16()))


REFUSED = {
    "dtype": lambda x, w: isobit.linear(x.int(), w.int()),
    "two dtypes": lambda x, w: isobit.linear(x, w.bfloat16()),
    "device": lambda x, w: isobit.linear(x, w.to("meta")),
    "width": lambda x, w: isobit.linear(x[:, :5], w),
    "vector weight": lambda x, w: isobit.linear(x, w[0]),
    "scalar input": lambda x, w: isobit.linear(x[0, 0], w),
    "bias": lambda x, w: isobit.linear(x, w, w[0]),
    "sparse": lambda x, w: isobit.linear(x.to_sparse(), w),
    "list": lambda x, w: isobit.linear(x.tolist(), w),
    "nested": lambda x, w: isobit.linear(nested(x), w),
    "rows": lambda x, w: isobit.linear(x, w, samples=Samples.packed([3, 4])),
}


def nested(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([x, x[:2]])


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_expected_received_and_remedy(case):
    with pytest.raises(
        isobit.ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.randn(4, 8), torch.randn(5, 8))


def test_a_share_has_outputs_and_no_autograd_gradient():
    x, w = torch.randn(4, 8), torch.randn(5, 8, requires_grad=True)
    share = Samples.packed([4], first=0, total=2)
    with pytest.raises(
        isobit.UnsupportedError, match=r"(?s)samples 0 to 1 of 2.*parallel\.Gradients"
    ):
        isobit.linear(x, w, samples=share)
    assert bits.equal(isobit.linear(x, w.detach(), samples=share), isobit.linear(x, w).detach())


@needs_native
class TestFreeze:
    """A frozen weight: same bits, memory said, every write seen."""

    WRITES = {
        "data.copy_": lambda w: w.data.copy_(torch.randn_like(w)),
        "data element": lambda w: w.data.__setitem__((0, 0), 7.0),
        "data replaced": lambda w: setattr(w, "data", torch.randn_like(w)),
        "transposed in place": lambda w: setattr(w, "data", w.data.t()),
        "numpy": lambda w: w.detach().numpy().__setitem__((0, 0), 7.0),
        "dlpack": lambda w: np.from_dlpack(w.detach()).__setitem__((0, 0), 7.0),
        "storage": lambda w: w.untyped_storage().copy_(torch.randn(64, 64).untyped_storage()),
        "optimizer": lambda w: (
            setattr(w, "grad", torch.ones_like(w)),
            torch.optim.AdamW([w], lr=1.0).step(),
        ),
        "out=": lambda w: torch.mul(torch.randn_like(w), 2, out=w.data),
    }

    @pytest.mark.parametrize("write", WRITES)
    def test_every_write_is_seen(self, write):
        layer, x = isobit.nn.Linear(64, 64), torch.randn(3, 64)
        with isobit.freeze(layer):
            before = layer(x)
            assert bits.equal(before, isobit.linear(x, layer.weight, layer.bias))
            self.WRITES[write](layer.weight)
            after = layer(x)
            assert bits.equal(after, isobit.linear(x, layer.weight, layer.bias))
            assert not bits.equal(before, after)

    def test_an_alias_kept_by_others_is_never_trusted(self):
        layer, x = isobit.nn.Linear(64, 64), torch.randn(3, 64)
        with isobit.freeze(layer):
            layer(x)
            alias = layer.weight.detach().numpy()
            for value in (1.0, 2.0, 3.0):
                alias[0, 0] = value
                assert bits.equal(layer(x), isobit.linear(x, layer.weight, layer.bias))
        with pytest.raises(isobit.ArgumentError, match="owners"):
            isobit.freeze(layer)

    def test_foreign_memory_is_refused(self):
        layer = isobit.nn.Linear(64, 64)
        layer.weight.data.share_memory_()
        with pytest.raises(isobit.ArgumentError, match=r"(?s)remedy: .*clone"):
            isobit.freeze(layer)

    def test_nests_says_its_memory_and_survives_errors(self):
        model = torch.nn.Sequential(isobit.nn.Linear(64, 128), isobit.nn.Linear(128, 10))
        outer = isobit.freeze(model)
        assert outer.nbytes == 4 * (64 * 128 + 128 * 64)  # ten outputs take a panel of 64
        assert "2 linear layers" in repr(outer)
        with pytest.raises(KeyError), isobit.freeze(model):
            raise KeyError
        assert "_isobit_packed" in model[0].__dict__
        outer.thaw()
        outer.thaw()
        assert "_isobit_packed" not in model[0].__dict__
        isobit.freeze(model[0])
        blocked = torch.nn.Sequential(
            isobit.nn.Linear(8, 8), isobit.nn.Linear(8, 8, dtype=torch.float64)
        )
        with pytest.raises(isobit.EngineError):
            isobit.freeze(blocked)
        assert "_isobit_packed" not in blocked[0].__dict__
        with pytest.raises(isobit.ArgumentError, match=r"isobit\.nn\.Linear"):
            isobit.freeze(torch.nn.Linear(3, 3))

    def test_gradients_flow_while_frozen(self):
        layer, x = isobit.nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
        plain = torch.autograd.grad(layer(x).sum(), (x, layer.weight))
        with isobit.freeze(layer):
            frozen = torch.autograd.grad(layer(x).sum(), (x, layer.weight))
        assert all(bits.equal(a, b) for a, b in zip(plain, frozen, strict=True))


def test_sharing_keeps_parameters_and_state():
    stock = torch.nn.Linear(16, 8)
    ours = isobit.nn.Linear.sharing(stock)
    assert ours.weight is stock.weight
    assert ours.bias is stock.bias
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert isobit.nn.Linear.sharing(torch.nn.Linear(16, 8, bias=False)).bias is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_overlapping_and_repeated_storage(dtype):
    row, weight = torch.randn(1, 64).to(dtype), torch.randn(40, 64).to(dtype)
    run = torch.randn(200).to(dtype)
    for x in (
        row.expand(5, 64),
        row[0].as_strided((3, 64), (0, 1)),
        run.unfold(0, 64, 3),
        run.as_strided((1, 64), (1, 1)),
    ):
        assert bits.equal(isobit.linear(x, weight), isobit.linear(x.contiguous(), weight))
        assert bits.equal(isobit.linear(weight, x), isobit.linear(weight, x.contiguous()))


@needs_native
def test_direct_calls_cannot_read_outside_memory():
    grad, x = torch.randn(4, 3), torch.randn(4, 5)
    isobit.linear(x, x)
    outside = Samples(((2, 50),), 4, 0, 1)
    with pytest.raises(RuntimeError, match=r"(?s)inside 4 rows.*remedy"):
        isobit.linear(x, torch.randn(3, 5, requires_grad=True), samples=outside).sum().backward()
    for spans in (
        torch.tensor([[0, 5]]),
        torch.tensor([[-1, 2]]),
        torch.tensor([0, 4]),
        torch.tensor([[0.0, 4.0]]),
    ):
        with pytest.raises(RuntimeError, match="remedy"):
            torch.ops.isobit.linear_weight_grad(grad, x, spans)
        with pytest.raises(RuntimeError, match="remedy"):
            torch.ops.isobit.linear_bias_grad(grad, spans)
    with pytest.raises(RuntimeError, match="remedy"):
        torch.ops.isobit.linear_weight_grad(grad, x[:2], None)
    with pytest.raises(RuntimeError, match="remedy"):
        torch.ops.isobit.linear(x, grad, None, None, None)
    with pytest.raises(RuntimeError, match="remedy"):
        torch.ops.isobit.linear_input_grad(x, grad)


def test_portable_and_native_agree_on_what_is_a_sample():
    x, grad = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 5)
    described = op.whole_samples(grad, None)
    assert (len(described.spans), described.rows) == (6, 24)
    if dispatch.has_native():
        isobit.linear(x, x[0, 0])
        spans = torch.tensor(described.spans)
        explicit = torch.ops.isobit.linear_weight_grad(grad, x, spans)
        assert bits.equal(torch.ops.isobit.linear_weight_grad(grad, x, None), explicit)
