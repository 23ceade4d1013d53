"""Attention's kernels compiled and run in the PTX machine, and planted wrong ones: names, bits, tiles, races."""

import pytest
import torch

import isobit
from isobit import bits

pytest.importorskip("triton")
from isobit.certifying import executing
from isobit.ops.attention import portable, tiles
from isobit.ops.attention import triton as executor
from tests.gpu import planted_attention
from tests.gpu.attention_plans import SamplePlan, draw, problem, same, with_grads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TARGETS = ("sm_80", "sm_90", "sm_100")
CHUNK = 128


@pytest.fixture
def small(monkeypatch):
    """Chunks of 128 keys and tiles of 16 rows, so that the machine has less to do."""
    monkeypatch.setattr(executor, "CHUNK", CHUNK)
    monkeypatch.setattr(portable, "ATTENTION_CHUNK", CHUNK)
    monkeypatch.setitem(tiles.TILES, ("gradient", None, None), tiles.HeadTile(16, 4, 2))


def forward_of(q, k, v, target, **how):
    """y by the portable executor in fp32, else by the plan."""
    if q.dtype != torch.float32:
        return SamplePlan(q, k, v, target=target, chunk=CHUNK, **how).forward()
    starts, spans = torch.arange(0, len(k), 64)[None], torch.tensor([[0, len(q)]])
    mask = portable.Mask(q.shape[-1] ** -0.5, True, **{"window": 0, **how})
    return portable.attention(q, k, v, spans, starts, torch.tensor([len(k)]), mask)[0]


def check_grads(q, k, v, grad, target, **how):
    how = {"is_causal": True, **how}
    with executing("machine", target=target):
        found = with_grads(q, k, v, grad, **how)
    if q.dtype == torch.float32:
        known = with_grads(q, k, v, grad, **how)
    else:
        plan = SamplePlan(q, k, v, target=target, **how)
        known = [plan.forward(), *plan.backward(grad)]
    assert same(found, known)


CASES = [("sm_90", torch.bfloat16)]
ALL = [(target, dtype) for target in TARGETS for dtype in DTYPES]
EVERY = CASES + [pytest.param(*case, marks=pytest.mark.full) for case in ALL if case not in CASES]


@pytest.mark.parametrize(("target", "dtype"), EVERY)
def test_forward_and_backward(small, target, dtype):
    q, k, v = problem(9, 9, heads=1, dtype=dtype)
    check_grads(q, k, v, draw(*q.shape, dtype=dtype, seed=9), target)


@pytest.mark.parametrize(("target", "dtype"), EVERY)
def test_split_keys(small, target, dtype):
    q, k, v = problem(1, 150, dtype=dtype)
    with executing("machine", target=target):
        found = isobit.attention(q, k, v, is_causal=True)
    assert bits.equal(found, forward_of(q, k, v, target))


@pytest.mark.parametrize(("target", "dtype"), EVERY)
def test_masks_and_caps(small, target, dtype):
    """A soft cap with a window of both sides; and one with chunks that split keys are cut by."""
    q, k, v = problem(9, 9, heads=1, dtype=dtype)
    how = {"is_causal": False, "window": 4, "softcap": 1.7}
    check_grads(q, k, v, draw(*q.shape, dtype=dtype, seed=9), target, **how)
    q, k, v = problem(1, 150, dtype=dtype)
    with executing("machine", target=target):
        found = isobit.attention(q, k, v, is_causal=True, softcap=1.7, chunk_size=100)
    assert bits.equal(found, forward_of(q, k, v, target, softcap=1.7, chunk_size=100))


@pytest.mark.full
@pytest.mark.parametrize(("target", "dtype"), ALL)
def test_tiles_of_decode_and_prefill_over_two_samples_and_two_chunks(
    small, monkeypatch, target, dtype
):
    q, k, v = problem(70, 150, depth=48, dtype=dtype)
    with executing("machine", target=target):
        whole = isobit.attention(q, k, v, is_causal=True, window=140)
        last = isobit.attention(q[-1:], k, v, is_causal=True, window=140)
    assert bits.equal(whole, forward_of(q, k, v, target, window=140))
    assert bits.equal(last, whole[-1:])


@pytest.mark.full
@pytest.mark.parametrize(("target", "dtype"), ALL)
def test_gradients_over_two_blocks_in_whole_tiles(target, dtype):
    q, k, v = problem(70, 70, dtype=dtype)
    check_grads(q, k, v, draw(*q.shape, dtype=dtype, seed=9), target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_no_races_and_no_branch_on_data(small, target):
    """Decode and backward have none; the forward of many queries branches for values that are not finite."""
    q, k, v = problem(1, 150, dtype=torch.bfloat16)
    with executing("machine", target=target, check=True):
        found = isobit.attention(q, k, v, is_causal=True)
    assert bits.equal(found, forward_of(q, k, v, target))
    q, k, v = problem(9, 9, heads=1)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with executing("machine", target=target):
        y = isobit.attention(*leaves, is_causal=True)
    with executing("machine", target=target, check=True):
        y.backward(draw(*q.shape, seed=9))
    assert same(
        [t.grad for t in leaves], with_grads(q, k, v, draw(*q.shape, seed=9), is_causal=True)[1:]
    )


# ---- planted ------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", planted_attention.FORWARD)
def test_a_wrong_forward_is_seen(small, monkeypatch, part):
    q, k, v = problem(10, 200)
    known = forward_of(q, k, v, "sm_90")
    with executing("interpreter"):
        assert bits.equal(isobit.attention(q, k, v, is_causal=True), known)
        module, name, wrong = planted_attention.FORWARD[part]
        monkeypatch.setattr(module, name, wrong)
        found = isobit.attention(q, k, v, is_causal=True)
    assert not bits.equal(found, known)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)  # right, but for its bits


@pytest.mark.parametrize("part", planted_attention.BACKWARD)
def test_a_wrong_backward_is_seen(monkeypatch, part):
    q, k, v = problem(20, 20, heads=1)
    grad = draw(*q.shape, seed=9)
    known = with_grads(q, k, v, grad, is_causal=True, scale=0.3)
    module, name, wrong = planted_attention.BACKWARD[part]
    monkeypatch.setattr(module, name, wrong)
    with executing("interpreter"):
        found = with_grads(q, k, v, grad, is_causal=True, scale=0.3)
    assert bits.equal(found[0], known[0])
    assert not same(found, known)
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", planted_attention.MASKS)
@pytest.mark.sweep(3)
def test_a_wrong_mask_or_cap_is_seen(monkeypatch, part):
    how, module, name, wrong = planted_attention.MASKS[part]
    q, k, v = problem(70, 70, heads=1)
    q, grad = (q[-30:], None) if part == "chunks" else (q, draw(*q.shape, seed=9))

    def results():
        if grad is None:  # a chunk of a prompt, which has no gradient
            return [isobit.attention(q, k, v, **how)]
        return with_grads(q, k, v, grad, **how)

    known = results()
    with executing("interpreter"):
        assert same(results(), known)
        monkeypatch.setattr(module, name, wrong)
        assert not same(results(), known)


def test_another_chunk_is_seen(small, monkeypatch):
    q, k, v = problem(1, 300)
    monkeypatch.setattr(executor, "CHUNK", 192)
    with executing("interpreter"):
        found = isobit.attention(q, k, v, is_causal=True)
    assert not bits.equal(found, forward_of(q, k, v, "sm_90"))
