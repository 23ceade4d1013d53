"""The gated delta rule has one bit pattern for every cut of a sample into calls, and every place in a batch.

delta-rule-v1 judges the bits against wrong subjects; here are the cuts, gradients, errors and the state.
"""

import pytest
import torch

import isobit
from isobit import ArgumentError, DeltaState, Samples, UnsupportedError, bits
from isobit.ops.delta_rule import gates, portable, reference

CUTS = ([1] * 200, [7] * 28 + [4], [100, 100], [63, 1, 1, 64, 71])
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 24


def rows(tokens, seed=0, dtype=torch.float32, batch=1):
    """q, k, v, g, beta of one layer: unit keys, decays from slow to fast."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(batch, tokens, *shape, generator=drawn)

    q, k = (torch.nn.functional.normalize(draw(KEY_HEADS, KEY), dim=-1) for _ in range(2))
    g, beta = -torch.rand(batch, tokens, HEADS, generator=drawn) * 0.2, torch.sigmoid(draw(HEADS))
    return [t.to(dtype) for t in (q * KEY**-0.5, k, draw(HEADS, VALUE), g, beta)]


def empty_state(samples=1, dtype=torch.float32):
    return DeltaState(samples, KEY_HEADS, HEADS, KEY, VALUE, dtype)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "+".join(map(str, cut[:5])))
def test_every_cut_of_a_sample_has_one_bit_pattern(cut):
    given = rows(200)
    whole, state, parts, at = isobit.delta_rule(*given), empty_state(), [], 0
    for count in cut:
        parts.append(isobit.delta_rule(*(t[:, at : at + count] for t in given), state=state))
        at += count
    assert at == 200 == state.counts[0]
    assert bits.equal(torch.cat(parts, 1), whole)


def test_stock_differs_between_its_cuts_and_has_a_similar_error():
    """The control: the same comparison finds differences, and the errors against fp64 are within a factor of 2."""
    from transformers.models.qwen3_next import modeling_qwen3_next as stock

    q, k, v, g, beta = given = rows(200)
    q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (q, k))

    def run(part, state=None):
        named = {"g": g[:, part], "beta": beta[:, part], "output_final_state": True}
        found = stock.torch_chunk_gated_delta_rule
        return found(q[:, part] * KEY**0.5, k[:, part], v[:, part], initial_state=state, **named)

    whole, half = run(slice(0, 200))[0], run(slice(0, 100))
    pieces = torch.cat((half[0], run(slice(100, 200), half[1])[0]), 1)
    assert not bits.equal(whole, pieces)
    exact = reference.delta_rule(*given)
    ours, theirs = (float((o - exact).abs().max()) for o in (isobit.delta_rule(*given), whole))
    assert ours <= 2 * theirs


def test_samples_are_apart_packed_padded_and_without_rows():
    one, two = rows(70, 1), rows(9, 2)
    alone = [isobit.delta_rule(*given) for given in (one, two)]
    packed = [torch.cat((a, b), 1) for a, b in zip(one, two, strict=True)]
    found = isobit.delta_rule(*packed, samples=Samples.packed([70, 9]))
    assert bits.equal(found, torch.cat(alone, 1))
    padded = [torch.zeros(2, 80, *t.shape[2:]) for t in one]
    for whole, a, b in zip(padded, one, two, strict=True):
        whole.fill_(torch.nan)
        whole[0, 10:], whole[1, :9] = a[0], b[0]
    spans = [(10, 70), (80, 9), (0, 0)]
    found = isobit.delta_rule(*padded, samples=Samples(tuple(spans), 160, 0, 3))
    assert bits.equal(found[0, 10:], alone[0][0])
    assert bits.equal(found[1, :9], alone[1][0])
    assert not found[0, :10].any()
    assert not found[1, 9:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_do_not_depend_on_the_batch(dtype):
    one, two = rows(70, 1, dtype), rows(9, 2, dtype)
    grad = torch.randn(1, 79, HEADS, VALUE).to(dtype)

    def gradients(given, upstream, **named):
        leaves = [t.clone().requires_grad_() for t in given]
        return torch.autograd.grad(isobit.delta_rule(*leaves, **named), leaves, upstream)

    packed = [torch.cat((a, b), 1) for a, b in zip(one, two, strict=True)]
    found = gradients(packed, grad, samples=Samples.packed([70, 9]))
    apart = zip(gradients(one, grad[:, :70]), gradients(two, grad[:, 70:]), strict=True)
    for whole, pair in zip(found, apart, strict=True):
        assert bits.equal(whole, torch.cat(pair, 1))


def test_gradients_are_those_of_the_definition():
    given = [t.requires_grad_() for t in rows(130, dtype=torch.float64)]
    grad = torch.randn(1, 130, HEADS, VALUE, dtype=torch.float64)
    ours = torch.autograd.grad(isobit.delta_rule(*given), given, grad)
    theirs = torch.autograd.grad(reference.delta_rule(*given), given, grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))


def test_a_cropped_state_goes_on_as_if_the_tokens_had_never_been():
    given, other = rows(90), rows(90, seed=3)
    whole = isobit.delta_rule(*given)
    state = empty_state()
    isobit.delta_rule(*(t[:, :70] for t in given), state=state)
    isobit.delta_rule(*(t[:, 70:75] for t in other), state=state)
    state.crop(5)
    rest = isobit.delta_rule(*(t[:, 70:] for t in given), state=state)
    assert bits.equal(rest, whole[:, 70:])
    with pytest.raises(UnsupportedError, match="at most the 26 tokens of the open chunk"):
        state.crop(27)
    state.crop(26)
    assert state.counts == [64]


def test_states_are_selected_and_samples_without_rows_stay():
    given = rows(20, batch=2)
    whole, state = isobit.delta_rule(*given), empty_state(2)
    isobit.delta_rule(*(t[:, :12] for t in given), state=state)
    swapped = state.select(torch.tensor([1, 0, 1]))
    later = [t[[1, 0, 1], 12:] for t in given]
    assert bits.equal(isobit.delta_rule(*later, state=swapped), whole[[1, 0, 1], 12:])
    assert swapped.counts == [20, 20, 20]
    assert state.counts == [12, 12]
    before = state.packed[1].clone()
    spans = Samples(((0, 8), (8, 0)), 8, 0, 2)
    found = isobit.delta_rule(*(t[0, 12:] for t in given), samples=spans, state=state)
    assert bits.equal(found, whole[0, 12:])
    assert bits.equal(state.packed[1], before)
    assert state.counts == [20, 12]


def test_wide_heads_have_the_portable_bits():
    """Blocks of 64 columns and a tail behind them, which the attestation is too small for."""
    drawn = torch.Generator().manual_seed(4)
    q, k = (torch.randn(66, 1, 33, generator=drawn) * 0.1 for _ in range(2))
    v = torch.randn(66, 2, 150, generator=drawn)
    g, beta = (-torch.rand(66, 2, generator=drawn) for _ in range(2))
    given, spans = (q, k, v, g, -beta), [(0, 66)]
    assert bits.equal(isobit.delta_rule(*given), portable.delta_rule(*given, spans, None, [])[0])
    leaves = [t.clone().requires_grad_() for t in given]
    found = torch.autograd.grad(isobit.delta_rule(*leaves), leaves, v)
    wanted = portable.delta_rule_backward(v, *given, spans)
    assert all(bits.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_call_without_rows_changes_no_state():
    state = empty_state()
    isobit.delta_rule(*rows(5), state=state)
    before = state.packed.clone()
    assert isobit.delta_rule(*rows(0), state=state).shape == (1, 0, HEADS, VALUE)
    assert bits.equal(state.packed, before)
    assert state.counts == [5]


def test_errors_name_what_does_not_fit():
    q, k, v, g, beta = rows(3)
    with pytest.raises(ArgumentError, match="g of at most 0"):
        isobit.delta_rule(q, k, v, -g, beta)
    with pytest.raises(ArgumentError, match="k of shape"):
        isobit.delta_rule(q, k[:, :2], v, g, beta)
    with pytest.raises(ArgumentError, match="a multiple of the 2 heads"):
        isobit.delta_rule(q, k, v[:, :, :3], g[..., :3], beta[..., :3])
    with pytest.raises(ArgumentError, match="beta of shape"):
        isobit.delta_rule(q, k, v, g, beta[..., :2])
    with pytest.raises(ArgumentError, match="one dtype"):
        isobit.delta_rule(q, k, v, g, beta.half())
    with pytest.raises(ArgumentError, match="2 samples"):
        isobit.delta_rule(q, k, v, g, beta, state=empty_state(2))
    with pytest.raises(UnsupportedError, match="whole samples where a gradient is needed"):
        isobit.delta_rule(q, k, v.requires_grad_(), g, beta, state=empty_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gates_are_the_functions_that_they_name(dtype):
    x = torch.cat((torch.linspace(-60, 60, 333), torch.tensor([0.0, -0.0]))).to(dtype)
    eps = torch.finfo(dtype).eps
    exact = torch.sigmoid(x.double())
    torch.testing.assert_close(gates.sigmoid_gate(x).double(), exact, rtol=8 * eps, atol=0)
    a, rate, bias = x[:, None], torch.tensor([1.5]).to(dtype), torch.tensor([0.25]).to(dtype)
    leaves = [t.clone().requires_grad_() for t in (a, rate, bias)]
    found = gates.decay_gate(*leaves)
    wide = [t.double().requires_grad_() for t in (a, rate, bias)]
    shifted = wide[0] + wide[2]
    positive = shifted.clamp(min=0) + torch.log1p(torch.exp(-shifted.abs()))
    wanted = -wide[1].exp() * positive
    # Rounding a + bias to fp32 moves e^(a + bias) by up to |a + bias| · eps of it.
    wide_eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=80 * wide_eps, atol=0)
    ours = torch.autograd.grad(found.sum(), leaves)
    theirs = torch.autograd.grad(wanted.sum(), wide)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=80 * eps, atol=1e-25)


def test_gates_do_not_depend_on_the_batch():
    a, rate, bias = torch.randn(2, 9, 4), torch.randn(4), torch.randn(4)
    assert bits.equal(gates.decay_gate(a, rate, bias)[1:], gates.decay_gate(a[1:], rate, bias))
    x = torch.randn(1001)
    assert bits.equal(gates.sigmoid_gate(x)[1000:], gates.sigmoid_gate(x[1000:]))
