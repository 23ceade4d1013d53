"""Mixture of experts: a token's route and output, and every gradient, have one value in every layout of a batch."""

import pytest
import torch

import isobit
from isobit import Samples, bits
from isobit.ops import dispatch
from isobit.ops.attesting import call_native
from isobit.ops.experts import portable
from isobit.ops.experts.op import SCORES
from isobit.ops.experts.portable import segments_of
from isobit.parallel import GlobalBatch, Gradients
from tests.attacks.operators import force_portable

LENGTHS, EXPERTS, K, HIDDEN, INNER = (5, 9, 1, 7), 8, 3, 24, 20


class Mixture(torch.nn.Module):
    """A router and experts over isobit's operators."""

    def __init__(self, dtype=torch.float32, score="softmax"):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)

        def parameter(*shape):
            made = torch.randn(*shape, generator=drawn) * shape[-1] ** -0.5
            return torch.nn.Parameter(made.to(dtype))

        self.router = parameter(EXPERTS, HIDDEN)
        self.up, self.up_bias = parameter(EXPERTS, 2 * INNER, HIDDEN), parameter(EXPERTS, 2 * INNER)
        self.down = parameter(EXPERTS, INNER, HIDDEN)
        self.score = score

    def forward(self, x, samples):
        logits = isobit.linear(x, self.router, samples=samples)
        routes = isobit.route(logits, K, score=self.score, samples=samples)
        rows = isobit.dispatch_rows(x, routes)
        gate, up = isobit.grouped_linear(rows, self.up, self.up_bias, routes=routes).chunk(2, -1)
        made = isobit.grouped_linear(
            isobit.swiglu(gate, up), self.down, routes=routes, transposed=True
        )
        return isobit.combine(made, routes), routes


def tokens(dtype=torch.float32):
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(n, HIDDEN, generator=drawn).to(dtype) for n in LENGTHS]


def laid(samples, side=None, width=11):
    """The samples packed, or padded on a side with rows of other values."""
    if side is None:
        return torch.cat(samples), Samples.packed([len(s) for s in samples])
    described = Samples.padded([len(s) for s in samples], width=width, side=side)
    x = torch.randn(described.rows, HIDDEN, dtype=torch.float32).to(samples[0].dtype)
    for (start, length), sample in zip(described.spans, samples, strict=True):
        x[start : start + length] = sample
    return x, described


def rows_of(y, described):
    return torch.cat([y[a : a + n] for a, n in described.spans])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_one_value_in_every_layout(score, dtype):
    model, samples = Mixture(dtype, score), tokens(dtype)
    found = {}
    for name, side in {"packed": None, "left": "left", "right": "right"}.items():
        x, described = laid(samples, side)
        x.requires_grad_()
        y, routes = model(x, described)
        real = rows_of(y, described)
        weights = torch.linspace(-1, 1, real.numel()).view(real.shape).to(dtype)
        upstream = torch.zeros_like(y)
        for (start, n), part in zip(described.spans, weights.split(LENGTHS), strict=True):
            upstream[start : start + n] = part
        model.zero_grad()
        y.backward(upstream)
        grads = [p.grad.clone() for p in model.parameters()]
        experts = rows_of(routes.experts, described)
        found[name] = [real.detach(), rows_of(x.grad, described), experts, *grads]
        assert int(experts.max()) < EXPERTS  # every token of a sample is routed
    alone = torch.cat([model(s, Samples.packed([len(s)]))[0] for s in samples]).detach()
    assert bits.equal(alone, found["packed"][0])
    for side in ("left", "right"):
        for one, other in zip(found["packed"], found[side], strict=True):
            assert bits.equal(one, other)


def test_micro_batches_have_the_gradients_of_the_whole():
    samples, found = tokens(), []
    for count in (1, 2, 4):
        model = Mixture()
        batch = GlobalBatch(total=4, micro_batches=count)
        gradients = Gradients(model, batch)
        for micro in range(count):
            mine = [samples[i] for i in batch.samples(0, micro)]
            with gradients.micro_batch(micro) as share:
                described = Samples.packed(
                    [len(s) for s in mine], first=share.first, total=share.total
                )
                y, _ = model(torch.cat(mine), described)
                y.backward(torch.ones_like(y))
        found.append([p.grad for p in model.parameters()])
    assert all(p is not None and p.abs().sum() > 0 for p in found[0])
    for other in found[1:]:
        assert all(bits.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("score", SCORES)
def test_the_portable_executor_has_the_same_bits(score, monkeypatch):
    if not dispatch.is_native(torch.float32):
        pytest.skip("no native kernels")
    found = []
    for _ in range(2):
        model, (x, described) = Mixture(score=score), laid(tokens())
        x.requires_grad_()
        y, _ = model(x, described)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        force_portable(monkeypatch)
    assert all(bits.equal(a, b) for a, b in zip(*found, strict=True))


def test_equal_scores_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 3.0, 1.0]])
    for score in SCORES:
        assert isobit.route(logits, 2, score=score).experts.tolist() == [[1, 2], [0, 1], [0, 2]]


def test_padding_goes_nowhere_and_an_expert_without_tokens_has_a_zero_gradient():
    logits = torch.tensor([[9.0, 1.0, 0.0], [0.0, 9.0, 1.0], [9.0, 1.0, 0.0]]).requires_grad_()
    described = Samples(((0, 1), (2, 1)), 3, 0, 2)
    routes = isobit.route(logits, 2, samples=described)
    assert routes.experts.tolist() == [[0, 1], [3, 3], [0, 1]]
    assert routes.rows == (2, 2, 0)
    assert routes.tokens.tolist() == [0, 2, 0, 2]
    weight = torch.randn(3, 4, 5, requires_grad=True)
    x = torch.randn(3, 5)
    x[1] = torch.nan
    y = isobit.combine(
        isobit.grouped_linear(isobit.dispatch_rows(x, routes), weight, routes=routes), routes
    )
    y.sum().backward()
    assert bits.equal(weight.grad[2], torch.zeros(4, 5))
    assert bits.equal(y[1].detach(), torch.zeros(4))
    assert not y.isnan().any()
    assert bits.equal(logits.grad[1], torch.zeros(3))


def test_groups_and_bias_decide_the_choice_only():
    logits = torch.tensor([[2.0, -1.0, 1.5, 1.4, 0.0, 0.1, -3.0, -3.0]])
    one = isobit.route(logits, 2, score="sigmoid", groups=4, top_groups=1, normalize=False)
    assert one.experts.tolist() == [[2, 3]]  # the best two of a group, and not the best one
    assert bits.equal(
        one.weights, isobit.route(logits[:, 2:4], 2, score="sigmoid", normalize=False).weights
    )
    bias = torch.zeros(8)
    bias[6] = 2.0
    other = isobit.route(logits, 2, score="sigmoid", bias=bias, scale=2.5)
    assert other.experts.tolist() == [[6, 0]]
    s = logits.sigmoid()[0, [6, 0]]
    torch.testing.assert_close(other.weights[0], s / s.sum() * 2.5)


@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_those_of_autograd(score):
    drawn = torch.Generator().manual_seed(4)
    logits = torch.randn(7, 6, generator=drawn, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 3, generator=drawn, dtype=torch.float64)
    routes = isobit.route(logits, 3, score=score, scale=1.5)
    (found,) = torch.autograd.grad(routes.weights, logits, grad)
    chosen = {
        "softmax": lambda: logits.softmax(-1),
        "sigmoid": logits.sigmoid,
        "softmax_of_chosen": lambda: logits,
        "sigmoid_of_chosen": lambda: logits,
    }[score]().gather(1, routes.experts)
    last = {
        "softmax_of_chosen": lambda: chosen.softmax(-1),
        "sigmoid_of_chosen": chosen.sigmoid,
    }.get(score, lambda: chosen / chosen.sum(-1, keepdim=True))()
    (wanted,) = torch.autograd.grad(last * 1.5, logits, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_weights_and_rows():
    drawn = torch.Generator().manual_seed(5)
    ids = torch.tensor([[2, 0], [1, 3], [0, 3]])
    weights = torch.randn(3, 2, generator=drawn, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 5, generator=drawn, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 6, 5, generator=drawn, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 6, generator=drawn, dtype=torch.float64)
    routes = isobit.Routes.chosen(ids, weights, total=4)
    made = isobit.grouped_linear(isobit.dispatch_rows(x, routes), w, routes=routes)
    found = torch.autograd.grad(isobit.combine(made, routes), (x, w, weights), grad)
    y = torch.einsum("tk,tknh,th->tn", weights, w[ids], x)
    for a, b in zip(found, torch.autograd.grad(y, (x, w, weights), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [2, 8, 12, 128])
def test_the_sum_of_a_token_is_the_tree_over_segments_of_experts(count):
    """Against the definition: a row of E numbers, absent ones +0, segments from left to right, then the tree."""
    drawn = torch.Generator().manual_seed(count)
    k = min(count, 6)
    ids = torch.stack([torch.randperm(count, generator=drawn)[:k] for _ in range(20)])
    weights = torch.randn(20, k, generator=drawn)
    routes = isobit.Routes.chosen(ids, weights, total=count)
    rows = torch.randn(20 * k, 3, generator=drawn)
    found = isobit.combine(rows, routes)
    dense = torch.zeros(20, count, 3)
    for token in range(20):
        for slot in range(k):
            dense[token, ids[token, slot]] = weights[token, slot] * rows[routes.places[token, slot]]
    size = count // segments_of(count)
    sums = []
    for first in range(0, count, size):
        total = torch.zeros(20, 3)
        for expert in range(first, first + size):
            total = total + dense[:, expert]
        sums.append(total)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert bits.equal(found, sums[0])


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: isobit.route(torch.zeros(2, 4), 5), "k from 1 to 4"),
        (lambda: isobit.route(torch.zeros(2, 4), 2, score="tanh"), "softmax_of_chosen"),
        (lambda: isobit.route(torch.zeros(2, 4), 2, groups=3), "groups that divide"),
        (lambda: isobit.route(torch.zeros(2, 4), 2, groups=4, top_groups=1), "k from 1 to 1"),
        (
            lambda: isobit.Routes.chosen(torch.tensor([[1, 1]]), torch.zeros(1, 2), total=3),
            "different experts",
        ),
        (
            lambda: isobit.Routes.chosen(torch.tensor([[1, 4]]), torch.zeros(1, 2), total=3),
            "experts from 0 to 2",
        ),
        (
            lambda: isobit.Routes.chosen(
                torch.tensor([[1], [0]]),
                torch.zeros(2, 1),
                total=3,
                samples=Samples(((0, 1),), 2, 0, 1),
            ),
            "padding that goes to no expert",
        ),
    ],
)
def test_refusals_name_what_is_wrong(call, word):
    with pytest.raises(isobit.ArgumentError, match=word):
        call()


def require_native(dtype=torch.float32):
    if not dispatch.is_native(dtype):
        pytest.skip("no native kernels")


HARD = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 41])
@pytest.mark.parametrize("count", [6, 64])
def test_native_routes_and_sums_are_the_portable_ones(dtype, tokens, count):
    require_native(dtype)
    drawn, k = torch.Generator().manual_seed(count), 3
    logits = torch.randn(tokens, count, generator=drawn) * 4
    logits[::5] = logits[::5].round()  # ties
    for at, value in enumerate(HARD):
        logits[at + 1 :: 7, at] = value
    logits, bias = logits.to(dtype), torch.randn(count, generator=drawn)
    spans = torch.tensor([[0, tokens // 3], [tokens // 2, tokens - tokens // 2]])  # and padding
    compared = 0
    for score in SCORES:
        for how in ((True, 1.0, 1, 1), (False, 2.5, 1, 1), (True, 0.3, 2, 1)):
            given = logits, bias if how[2] > 1 else None, spans, k, score, *how
            for left, right in zip(
                torch.ops.isobit.route(*given), portable.route(*given), strict=True
            ):
                assert bits.equal(left, right)
                compared += 1
    assert compared == 24
    weights, experts = portable.route(*given)
    tokens_of, places, rows = torch.ops.isobit.plan_routes(experts, count)
    order = experts.reshape(-1).argsort(stable=True)[: int(rows.sum())]
    assert torch.equal(tokens_of, order // k)
    assert torch.equal(places.reshape(-1)[order], torch.arange(len(order)))
    assert int((places < 0).sum()) == experts.numel() - len(order)
    made = torch.randn(len(order), 35, generator=drawn) * torch.logspace(-6, 6, 35)
    for at, value in enumerate(HARD):
        made[at::11, at] = value
    made = made.to(dtype)
    for factors in (weights, weights.to(dtype)):
        found = torch.ops.isobit.combine(made, factors, experts, places, tokens_of, count)
        assert bits.equal(found, portable.combine(made, factors, experts, places, count))
    found = torch.ops.isobit.dispatch_rows_backward(made, experts, places, count)
    assert bits.equal(found, portable.combine(made, None, experts, places, count))


def test_a_wrong_kernel_is_not_attested():
    """The comparison at start finds sums by slot, and ties that go to the highest id."""
    require_native()

    def by_slot(name, *given):
        if name != "combine":
            return call_native(name, *given)
        rows, weights, experts, places, _, count = given
        slots = torch.arange(experts.shape[1]).expand(experts.shape)
        return portable.combine(rows, weights, slots, places, count)

    def highest_id(name, *given):
        if name != "route":
            return call_native(name, *given)
        logits, bias, *rest = given
        flipped = None if bias is None else bias.flip(0)
        weights, experts = call_native(name, logits.flip(1), flipped, *rest)
        last = logits.shape[1]
        return weights, torch.where(experts == last, last, last - 1 - experts)

    for dtype in (torch.float32, torch.bfloat16):
        assert portable.difference(dtype) is None
        assert portable.difference(dtype, highest_id).startswith("route by")
    assert portable.difference(torch.float32, by_slot) == "combine"  # 16 bits round it away


def test_native_tables_are_checked():
    require_native()
    rows, ids = torch.randn(4, 3), torch.tensor([[0, 1], [1, 0]])
    for experts, places in ((ids, ids + 9), (ids + 7, ids), (ids.int(), ids.int())):
        with pytest.raises(RuntimeError, match=r"isobit\.combine: expected"):
            torch.ops.isobit.combine(rows, torch.ones(2, 2), experts, places, ids[0], 2)
    with pytest.raises(RuntimeError, match=r"isobit\.route: expected experts from 0 to 2"):
        torch.ops.isobit.plan_routes(ids + 5, 2)
    with pytest.raises(RuntimeError, match=r"isobit\.grouped_linear: expected 4 rows"):
        torch.ops.isobit.grouped_linear_forward(rows, torch.randn(2, 5, 3), None, [1, 1], False)
