"""The Triton executor of attention: the CPU's bits in fp32, the plan's over the target's tensor core in 16 bits."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.foundation.launches import record_launches
from isobit.ops.attention import portable

pytest.importorskip("triton")
from isobit.certifying import executing
from isobit.ops.attention import triton as executor
from tests.gpu.attention_plans import SamplePlan, draw, problem, same, with_grads
from tests.sweeps import mostly_full

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 keys, in the kernels and in the portable executor."""
    monkeypatch.setattr(executor, "CHUNK", 128)
    monkeypatch.setattr(portable, "ATTENTION_CHUNK", 128)


def by_portable(q, k, v, *, window=0, **how):
    """y of one sample, without native kernels."""
    starts = torch.arange(0, len(k), 64)[None]
    spans, lengths = torch.tensor([[0, len(q)]]), torch.tensor([len(k)])
    mask = portable.Mask(q.shape[-1] ** -0.5, True, window, **how)
    return portable.attention(q, k, v, spans, starts, lengths, mask)[0]


# ---- forward, interpreted -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"queries": 70, "keys": 70}, {"is_causal": True}),
        ({"queries": 3, "keys": 70, "depth": 48}, {"is_causal": False, "scale": 0.3}),
        ({"queries": 20, "keys": 150, "heads": 6, "key_heads": 2}, {"is_causal": True}),
        ({"queries": 90, "keys": 150}, {"is_causal": True, "window": 30}),
        ({"queries": 2, "keys": 150, "depth": 80}, {"is_causal": True, "window": 100}),
    ],
)
def test_fp32_is_the_cpu(sizes, how):
    q, k, v = problem(**sizes)
    with executing("interpreter"), record_launches() as launches:
        found = isobit.attention(q, k, v, **how)
    assert {launch.executor for launch in launches} == {"triton"}
    assert bits.equal(found, isobit.attention(q, k, v, **how))


@pytest.mark.parametrize("dtype", mostly_full(HALVES, HALVES[:1]))
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_halves_are_the_plan(dtype, target):
    q, k, v = problem(20, 84, heads=4, key_heads=2, depth=48, dtype=dtype)
    with executing("interpreter", target=target):
        found = isobit.attention(q, k, v, is_causal=True, window=40)
    assert bits.equal(found, SamplePlan(q, k, v, target=target, window=40).forward())


def test_packed_samples_and_a_batch_are_each_sample_alone():
    lengths = (5, 0, 70)
    q, k, v = problem(sum(lengths) + 3, sum(lengths) + 3)
    samples = isobit.Samples(((0, 5), (5, 0), (8, 70)), len(q), 0, 3)
    batch = [draw(3, 9, 2, 16, seed=seed) for seed in (4, 5, 6)]
    with executing("interpreter"):
        packed = isobit.attention(q, k, v, is_causal=True, q_samples=samples, k_samples=samples)
        together = isobit.attention(*batch, is_causal=True)
        for start, count in samples.spans:
            rows = slice(start, start + count)
            alone = isobit.attention(q[rows], k[rows], v[rows], is_causal=True)
            assert bits.equal(packed[rows], alone)
        for i in range(3):
            alone = isobit.attention(*(t[i : i + 1] for t in batch), is_causal=True)
            assert bits.equal(together[i : i + 1], alone)
    assert not packed[5:8].any()  # padding
    known = isobit.attention(q, k, v, is_causal=True, q_samples=samples, k_samples=samples)
    assert bits.equal(packed, known)


MASKS = (
    {"is_causal": True, "softcap": 1.5},
    {"is_causal": False, "window": 30},
    {"is_causal": True, "chunk_size": 24},
    {"is_causal": True, "softcap": 20.0, "window": 70, "chunk_size": 100},
    {"is_causal": False, "softcap": 0.7, "window": 2**31 - 1},  # positions and it have 33 bits
    {"is_causal": True, "window": 2**40, "chunk_size": 2**40},
)


@pytest.mark.parametrize("how", mostly_full(MASKS, MASKS[:4]), ids=str)
def test_masks_and_caps_are_the_cpu(how):
    q, k, v = problem(140, 140, heads=1)
    grad = draw(*q.shape, seed=9)
    with executing("interpreter"), record_launches() as launches:
        found = with_grads(q, k, v, grad, **how)
        piece = isobit.attention(q[-20:], k, v, **how)
    assert {launch.executor for launch in launches} == {"triton"}
    assert same(found, with_grads(q, k, v, grad, **how))
    assert bits.equal(piece, found[0][-20:])


@pytest.mark.parametrize("dtype", mostly_full(HALVES, HALVES[:1]))
@pytest.mark.parametrize("how", mostly_full(MASKS[:4], MASKS[3:4]), ids=str)
def test_masks_and_caps_in_16_bits_are_the_plan(dtype, how):
    q, k, v = problem(80, 80, heads=1, dtype=dtype)
    grad, how = draw(*q.shape, dtype=dtype, seed=9), {**how}
    for name in {"window", "chunk_size"} & {*how}:
        how[name] = how[name] // 2 + 1
    plan = SamplePlan(q, k, v, target="sm_80", **how)
    with executing("interpreter", target="sm_80"):
        found = with_grads(q, k, v, grad, **how)
    assert same(found, [plan.forward(), *plan.backward(grad)])


def test_a_large_window_has_its_gradient():
    """Limits are cut to the keys of the call: positions beyond 32 bits would leave keys without a gradient."""
    q, k, v = problem(5, 5, heads=1)
    with executing("interpreter"):
        found = with_grads(q, k, v, q, is_causal=True, window=2**31 - 1)
    assert same(found, with_grads(q, k, v, q, is_causal=True))


SPECIAL = (torch.nan, torch.inf, -torch.inf, 2.0**-149, -(2.0**-140), 0.0, -0.0, 2.0**127)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.sweep(1)
def test_special_values_stay_with_the_queries_that_see_them(where):
    """A value that is not finite reaches the queries that see its key, and no other."""
    q, k, v = problem(70, 70)
    rows = {"q": q, "k": k, "v": v}[where]
    for i, value in enumerate(SPECIAL):
        rows[30 + i, 0, i] = rows[30 + i, 0, 8] = value
    capped = {"is_causal": False, "window": 5, "softcap": 1.5}
    chunked = {"is_causal": True, "chunk_size": 7}
    whole = ({"is_causal": True}, {"is_causal": True, "window": 5}, {"is_causal": False})
    for how in (*whole, capped, chunked):
        with executing("interpreter"):
            found = isobit.attention(q, k, v, **how)
        assert bits.equal(found, isobit.attention(q, k, v, **how))
        assert found[:25].isfinite().all() == (where == "q" or how != {"is_causal": False})


def test_special_values_in_16_bits_stay_with_the_queries_that_see_them():
    q, k, v = problem(6, 40, dtype=torch.bfloat16)
    v[37, 0, 0] = v[38, 0, 1] = torch.inf
    with executing("interpreter"):
        found = isobit.attention(q, k, v, is_causal=True)
        alone = [
            isobit.attention(q[i : i + 1], k[: 35 + i], v[: 35 + i], is_causal=True)
            for i in range(6)
        ]
    assert bits.equal(found, torch.cat(alone))
    assert found[:3].isfinite().all()
    assert found[3:, :, 0].isinf().all()


def test_scores_that_are_all_minus_infinity_give_zero():
    q, k, v = problem(3, 70)
    q[:], k[:], v[5] = 1, -1e30, torch.inf
    k[:, :, 0] = -3e38
    q[:, :, 0] = 3e38
    with executing("interpreter"):
        found = isobit.attention(q, k, v, is_causal=True)
    assert bits.equal(found, isobit.attention(q, k, v, is_causal=True))
    assert not found.any()


# ---- decode -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "how",
    [{}, {"window": 100}, {"window": 200}, {"chunk_size": 150, "softcap": 1.5}],
    ids=str,
)
def test_split_keys_are_one_fold_and_a_prefill(small_chunks, monkeypatch, how):
    q, k, v = problem(6, 300)
    given = {"is_causal": True, **how}
    launched = []
    real = executor.start
    monkeypatch.setattr(executor, "start", lambda *a: (launched.append(a[0]), real(*a)))
    with executing("interpreter"):
        split = isobit.attention(q, k, v, **given)
        assert launched == [executor.attention_chunks, executor.merge_chunks]
        monkeypatch.setattr(executor, "FEW_ROWS", 0)
        whole = isobit.attention(q, k, v, **given)
    assert launched[2:] == [executor.attention]
    assert bits.equal(split, by_portable(q, k, v, **how))
    assert bits.equal(split, whole)


@pytest.mark.parametrize("dtype", mostly_full(HALVES, HALVES[:1]))
def test_split_keys_in_16_bits(small_chunks, dtype):
    q, k, v = problem(2, 280, dtype=dtype)
    with executing("interpreter", target="sm_80"):
        found = isobit.attention(q, k, v, is_causal=True)
    assert bits.equal(found, SamplePlan(q, k, v, target="sm_80", chunk=128).forward())


@pytest.mark.parametrize("dtype", mostly_full(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("how", [{}, {"softcap": 1.5, "chunk_size": 70}], ids=str)
@pytest.mark.sweep(2)
def test_a_cache_decodes_the_bits_of_a_prefill(small_chunks, dtype, how):
    q, k, v = problem(200, 200, dtype=dtype)
    cache = isobit.KVCache(1, 16, dtype, pages=1)
    other, sequence = cache.start(), cache.start()
    with executing("interpreter"), torch.no_grad():
        whole = isobit.attention(q, k, v, is_causal=True, **how)
        done = 0
        for keys in (64, 129, 200):
            cache.append(other, k[:40], v[:40])  # pages of the two sequences alternate
            cache.append(sequence, k[done:keys], v[done:keys])
            done = keys
            one = cache.attend(q[keys - 1 : keys], [sequence], **how)
            assert bits.equal(one, whole[keys - 1 : keys])
        both = torch.cat([q[118:120], q[195:]])
        paged = cache.attend(both, [other, sequence], [2, 5], **how)
        assert bits.equal(paged[2:], whole[195:])


# ---- backward -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ({"heads": 2, "key_heads": 1}, {"is_causal": True}),
        ({"heads": 1, "key_heads": 1, "depth": 48}, {"is_causal": False, "scale": 0.3}),
        ({"heads": 1, "key_heads": 1}, {"is_causal": True, "window": 30}),
    ],
)
@pytest.mark.sweep(2)
def test_fp32_gradients_are_the_cpu(sizes, how):
    q, k, v = problem(140, 140, **sizes)
    grad = draw(*q.shape, seed=9)
    with executing("interpreter"):
        found = with_grads(q, k, v, grad, **how)
    assert same(found, with_grads(q, k, v, grad, **how))


def test_gradients_of_packed_samples_and_special_values():
    q, k, v = problem(80, 80)
    grad = draw(*q.shape, seed=9)
    samples = isobit.Samples(((0, 5), (5, 0), (8, 66)), 80, 0, 3)
    v[3, 0, 2], k[20, 0, 1], grad[40, 0, 3], q[73, 0, 0] = (
        torch.inf,
        torch.nan,
        -torch.inf,
        2.0**-149,
    )
    how = {"is_causal": True, "q_samples": samples, "k_samples": samples}
    with executing("interpreter"):
        found = with_grads(q, k, v, grad, **how)
    assert same(found, with_grads(q, k, v, grad, **how))


@pytest.mark.parametrize("dtype", mostly_full(HALVES, HALVES[:1]))
def test_gradients_in_16_bits_are_the_plan(dtype):
    q, k, v = problem(70, 70, dtype=dtype)
    grad = draw(*q.shape, dtype=dtype, seed=9)
    plan = SamplePlan(q, k, v, target="sm_80")
    with executing("interpreter", target="sm_80"):
        found = with_grads(q, k, v, grad, is_causal=True)
    assert same(found, [plan.forward(), *plan.backward(grad)])


def test_gradients_through_a_cache_are_refused():
    q, k, v = problem(2, 5)
    with executing("interpreter"), pytest.raises(UnsupportedError, match="as many queries as keys"):
        with_grads(q, k, v, draw(*q.shape), is_causal=True)


def test_gradients_that_do_not_fit_into_shared_memory_are_refused():
    q, k, v = problem(2, 2, heads=1, depth=144)
    refused = pytest.raises(
        UnsupportedError, match="heads of at most 512 bytes in a gradient on sm_80"
    )
    with executing("interpreter", target="sm_80"), refused:
        with_grads(q, k, v, draw(*q.shape), is_causal=True)
    halves = (t.to(torch.bfloat16) for t in (q, k, v))
    with executing("interpreter", target="sm_80"):
        found = with_grads(*halves, draw(*q.shape, dtype=torch.bfloat16), is_causal=True)
    assert all(t.isfinite().all() for t in found)
