"""Attention over 1, 2 and 4 ranks has the bits of one rank: outputs, dq, dk and dv, of sequences of several chunks."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import isobit
from isobit import CutError, bits
from isobit.ops.attention.portable import State
from isobit.order.plan import ATTENTION_CHUNK
from isobit.parallel import context_attention
from isobit.parallel.tensor import context_attention as home
from isobit.simulator import World

NAMES = ("y", "dq", "dk", "dv")


@functools.lru_cache(maxsize=4)
def drawn(tokens, heads, key_heads, dtype):
    """Queries, keys, values and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(tokens)
    counts = (heads, key_heads, key_heads, heads)
    made = (torch.randn(1, tokens, n, 16, generator=generator) for n in counts)
    return tuple(t.mul(3).to(dtype) for t in made)


def attended(ranks, tensors, function, **options):
    """The outputs and gradients of a rank's tokens."""
    *given, grad = (home.own_tokens(t, ranks) for t in tensors)
    given = [t.requires_grad_() for t in given]
    y = function(*given, ranks, is_causal=True, **options)
    return y.detach(), *torch.autograd.grad(y, given, grad)


def alone(tensors, **options):
    ranks = home.TensorParallelGroup.of(None)
    return attended(
        ranks, tensors, lambda q, k, v, _, **how: isobit.attention(q, k, v, **how), **options
    )


def on_ranks(count, tensors, function=context_attention, **options):
    """The tensors of all ranks, joined."""

    def program(_):
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("cp",))
        return attended(home.TensorParallelGroup.of(mesh), tensors, function, **options)

    return [torch.cat(parts, 1) for parts in zip(*World(count).run(program).values, strict=True)]


def differing(found, expected):
    """The names of what differs, of outputs and gradients."""
    assert all(t.numel() and t.isfinite().all() and t.any() for t in expected)
    return [n for n, a, b in zip(NAMES, found, expected, strict=True) if not bits.equal(a, b)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (4, 2)])
def test_one_result_for_every_number_of_ranks(heads, key_heads, dtype):
    tensors = drawn(360, heads, key_heads, dtype)
    for options in ({}, {"window": 100}):
        expected = alone(tensors, **options)
        for count in (1, 2, 4):
            assert differing(on_ranks(count, tensors, **options), expected) == []


def test_checkpointed_attention():
    """What a checkpoint saves can be read once."""

    def computed_twice(*given, **options):
        function = functools.partial(context_attention, **options)
        return checkpoint(function, *given, use_reentrant=False)

    tensors = drawn(40, 4, 2, torch.float32)
    assert differing(on_ranks(2, tensors, computed_twice), alone(tensors)) == []


def test_sequences_of_four_chunks():
    tensors = drawn(4 * ATTENTION_CHUNK, 1, 1, torch.float32)
    expected = alone(tensors)
    for count in (2, 4):
        assert differing(on_ranks(count, tensors), expected) == []


def by_partial_sums(q, k, v, ranks, *, is_causal):
    """Planted: each rank sums dk and dv over its own queries, and the ranks are added."""

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, local):
            return home.gather_tokens(local, ranks)

        @staticmethod
        def backward(ctx, grad):
            total = grad.contiguous()
            isobit.parallel.all_reduce(total, ranks.group)
            return home.own_tokens(total, ranks)

    keys, values = Added.apply(k), Added.apply(v)
    rows, end = q.shape[1], q.shape[1] * (ranks.rank + 1)
    # Queries of the other ranks are there, so that the operator has a backward; their outputs are dropped.
    whole = torch.cat([q.new_zeros(1, end - rows, *q.shape[2:]), q], 1)
    return isobit.attention(whole, keys[:, :end], values[:, :end], is_causal=True)[:, -rows:]


def by_own_chunk_first(q, k, v, ranks, *, is_causal):
    """Planted: states of the ranks' keys are merged from this rank's on, as they arrive in a ring."""
    keys, values = home.gather_tokens(k, ranks), home.gather_tokens(v, ranks)
    rows, merged = q.shape[1], None
    for step in range(ranks.rank + 1):
        at = slice((ranks.rank - step) * rows, (ranks.rank - step + 1) * rows)
        scores = q[0, :, 0] @ keys[0, at, 0].T / 4
        if not step:
            scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
        most = scores.amax(1, keepdim=True)
        weights = (scores - most).exp()
        state = State(most, weights.sum(1, keepdim=True), weights @ values[0, at, 0])
        merged = state if merged is None else merged.merged(state)
    return merged.finish()[0].view(q.shape)


def test_planted_orders_are_detected():
    tensors = drawn(360, 1, 1, torch.float32)
    expected = alone(tensors)
    found = on_ranks(2, tensors, by_partial_sums)
    assert "dk" in differing(found, expected)
    assert "dv" in differing(found, expected)
    assert bits.equal(found[0], expected[0])

    def forward_only(_):
        ranks = home.TensorParallelGroup.of(init_device_mesh("cpu", (2,)))
        q, k, v = (home.own_tokens(t, ranks) for t in tensors[:3])
        return by_own_chunk_first(q, k, v, ranks, is_causal=True)

    assert not bits.equal(torch.cat(World(2).run(forward_only).values, 1), expected[0])


def test_stock_attention_over_ranks_differs():
    """The control: ranks that have some of the queries by stock attention, whose dk and dv are added."""
    q, k, v, grad = (t.transpose(1, 2) for t in drawn(360, 4, 4, torch.float32))
    mask = torch.ones(360, 360).tril().bool()

    def gradients(rows):
        held = [t.detach().requires_grad_() for t in (q[:, :, rows], k, v)]
        y = scaled_dot_product_attention(*held, attn_mask=mask[rows])
        return torch.autograd.grad(y, held, grad[:, :, rows])

    whole, parts = gradients(slice(360)), [gradients(slice(0, 180)), gradients(slice(180, 360))]
    for at in (1, 2):
        assert not bits.equal(parts[0][at] + parts[1][at], whole[at])


def test_ranks_with_different_shapes():
    def program(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        q = torch.zeros(1, 4 + rank, 1, 16)
        with pytest.raises(CutError, match="same shapes on all ranks"):
            context_attention(q, q, q, mesh, is_causal=True)
        return True

    assert World(2).run(program).values == [True, True]


def run_on_gloo(rank, folder):
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    ranks = home.TensorParallelGroup.of(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = drawn(360, 4, 2, dtype)
        found = attended(ranks, tensors, context_attention)
        expected = [home.own_tokens(t, ranks) for t in alone(tensors)]
        assert differing(found, expected) == []
    dist.destroy_process_group()
    (folder / f"kept by {rank}").touch()


def test_two_ranks_on_gloo(tmp_path):
    mp.spawn(run_on_gloo, args=(tmp_path,), nprocs=2)
    assert len(list(tmp_path.glob("kept by *"))) == 2
