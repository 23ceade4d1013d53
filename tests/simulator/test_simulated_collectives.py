"""Every collective gives each rank what a plain computation gives, for several world sizes, dtypes and seeds."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from isobit import bits
from isobit.simulator import World

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
FOLDS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def drawn(rank, dtype=torch.float32, shape=(5, 3)):
    """Full mantissas and wide exponents: sums in another order have other bits."""
    g = torch.Generator().manual_seed(rank)
    if dtype in WHOLE:
        return torch.randint(0, 100, shape, generator=g).to(dtype)
    wide = torch.randn(shape, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(
        -8, 8, shape, generator=g
    )
    return torch.complex(wide, wide.flip(0)).to(dtype) if dtype.is_complex else wide.to(dtype)


def fold(op, tensors):
    return functools.reduce(FOLDS[op], tensors)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=str)
def test_reductions_fold_left_in_rank_order(ranks, dtype):
    ops = [ReduceOp.SUM]
    ops += [] if dtype.is_complex else [ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR] if dtype in WHOLE else []

    def body(rank):
        out = []
        for op in ops:
            x, y = drawn(rank, dtype), drawn(rank, dtype)
            dist.all_reduce(x, op)
            dist.reduce(y, ranks - 1, op)
            out.append((x, y))
        return out

    values = World(ranks, seed=ranks).run(body).values
    for i, op in enumerate(ops):
        wanted = fold(op, [drawn(r, dtype) for r in range(ranks)])
        for rank in range(ranks):
            assert bits.equal(values[rank][i][0], wanted), (op, rank)
            assert bits.equal(
                values[rank][i][1], wanted if rank == ranks - 1 else drawn(rank, dtype)
            )


def test_another_order_of_addition_has_other_bits():
    """The control: these inputs tell a left fold from its reverse."""
    terms = [drawn(r) for r in range(8)]
    assert not bits.equal(fold(ReduceOp.SUM, terms), fold(ReduceOp.SUM, terms[::-1]))


def test_average_and_premultiplied_sum():
    def body(rank):
        mean, whole, scaled = drawn(rank), torch.tensor([rank, 7]), drawn(rank)
        dist.all_reduce(mean, ReduceOp.AVG)
        dist.all_reduce(whole, ReduceOp.AVG)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        return mean, whole, scaled

    for mean, whole, scaled in World(4).run(body).values:
        assert bits.equal(mean, fold(ReduceOp.SUM, [drawn(r) for r in range(4)]) / 4)
        assert whole.tolist() == [1, 7]
        assert bits.equal(scaled, fold(ReduceOp.SUM, [drawn(r) * 0.5 for r in range(4)]))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("waits", [False, True], ids=["sync", "async"])
def test_moves_bring_the_senders_bits(ranks, dtype, waits):
    def call(collective, *args, **options):
        work = collective(*args, async_op=waits, **options)
        if waits:
            work.wait()

    def body(rank):
        mine, root = drawn(rank, dtype), ranks - 1
        every = [torch.empty_like(mine) for _ in range(ranks)]
        call(dist.all_gather, every, mine)
        flat = mine.new_empty((ranks * 5, 3))
        call(dist.all_gather_into_tensor, flat, mine)
        copied = mine.clone()
        call(dist.broadcast, copied, root)
        rows = [torch.empty_like(mine) for _ in range(ranks)] if rank == root else None
        call(dist.gather, mine, rows, root)
        dealt = torch.empty_like(mine)
        call(
            dist.scatter,
            dealt,
            [drawn(10 + r, dtype) for r in range(ranks)] if rank == root else None,
            root,
        )
        swapped = [torch.empty_like(mine) for _ in range(ranks)]
        call(dist.all_to_all, swapped, [drawn(100 * rank + r, dtype) for r in range(ranks)])
        return every, flat, copied, rows, dealt, swapped

    all_inputs = [drawn(r, dtype) for r in range(ranks)]
    for rank, (every, flat, copied, rows, dealt, swapped) in enumerate(
        World(ranks, seed=3).run(body).values
    ):
        assert all(map(bits.equal, every, all_inputs))
        assert bits.equal(flat, torch.cat(all_inputs))
        assert bits.equal(copied, all_inputs[-1])
        assert rows is None or all(map(bits.equal, rows, all_inputs))
        assert bits.equal(dealt, drawn(10 + rank, dtype))
        assert all(bits.equal(got, drawn(100 * r + rank, dtype)) for r, got in enumerate(swapped))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_reduce_scatter_in_all_its_forms(ranks):
    def body(rank):
        parts = [drawn(10 * rank + r) for r in range(ranks)]
        one, two, three = (torch.empty(5, 3) for _ in range(3))
        dist.reduce_scatter(one, [p.clone() for p in parts])
        dist.reduce_scatter_tensor(two, torch.cat(parts))
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(three, torch.cat(parts))
            other = torch.empty(2)
            dist.reduce_scatter_tensor(other, torch.full((2 * ranks,), float(rank)))
        return one, two, three, other

    for rank, (one, two, three, other) in enumerate(World(ranks).run(body).values):
        wanted = fold(ReduceOp.SUM, [drawn(10 * r + rank) for r in range(ranks)])
        assert all(bits.equal(got, wanted) for got in (one, two, three))
        assert other.tolist() == [sum(range(ranks))] * 2


def test_coalesced_gathers_and_reductions():
    def body(rank):
        with dist._coalescing_manager(async_ops=True) as manager:
            outs = [torch.empty(8), torch.empty(4, 2)]
            dist.all_gather_into_tensor(outs[0], torch.full((2,), float(rank)))
            dist.all_gather_into_tensor(outs[1], torch.full((1, 2), float(-rank)))
        manager.wait()
        with dist._coalescing_manager():
            sums = [torch.ones(2) * rank, torch.ones(3)]
            for x in sums:
                dist.all_reduce(x)
        return outs, sums

    for outs, sums in World(4).run(body).values:
        assert outs[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert outs[1][:, 0].tolist() == [0, -1, -2, -3]
        assert [x.tolist() for x in sums] == [[6, 6], [4, 4, 4]]


def test_uneven_all_to_all():
    """Rank r sends s + 1 rows to rank s."""

    def body(rank):
        source = torch.arange(6.0)[:, None] + 10 * rank
        out = torch.empty(3 * (rank + 1), 1)
        dist.all_to_all_single(out, source, [rank + 1] * 3, [1, 2, 3])
        return out.flatten().tolist()

    assert World(3).run(body).values == [
        [0, 10, 20],
        [1, 2, 11, 12, 21, 22],
        [3, 4, 5, 13, 14, 15, 23, 24, 25],
    ]


def test_messages_in_order_from_anyone_and_batched():
    def body(rank):
        got = torch.zeros(2)
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), 1)
            dist.send(torch.tensor([3.0, 4.0]), 1)
            dist.send(torch.tensor([5.0, 6.0]), 1, tag=9)
            seen = sorted((dist.recv(got), got[0].item()) for _ in range(2))
        elif rank == 1:
            seen = []
            for tag in (9, 0, 0):
                dist.recv(got, 0, tag=tag)
                seen.append(got.tolist())
        if rank:
            dist.send(torch.full((2,), float(rank)), 0)
        dist.barrier()  # or rank 0 may take a message of the ring for one to anyone
        nxt, last = (rank + 1) % 3, (rank - 1) % 3
        ring = torch.zeros(1)
        ops = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), nxt),
            dist.P2POp(dist.irecv, ring, last),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return ring.item(), seen if rank < 2 else None

    for seed in range(4):
        first, second, third = World(3, seed).run(body).values
        assert first == (2, [(1, 1), (2, 2)])
        assert second == (0, [[5, 6], [1, 2], [3, 4]])
        assert third == (1, None)


def test_subgroups_objects_and_barriers():
    def body(rank):
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=odd if rank % 2 else even)
        heard, told, mine = [None] * 4, [{"from": rank}], [None]
        dist.all_gather_object(heard, {"rank": rank})
        dist.broadcast_object_list(told, 2)
        dist.scatter_object_list(mine, [f"for {r}" for r in range(4)] if rank == 1 else None, 1)
        dist.monitored_barrier()
        outside = dist.get_rank(odd), dist.get_rank(even)
        local = dist.new_subgroups(2)[0]
        y = torch.tensor([float(rank)])
        dist.all_reduce(y, group=local)
        return x.item(), heard[3], told, mine, outside, y.item()

    values = World(4).run(body).values
    assert [value[0] for value in values] == [2, 4, 2, 4]
    assert all(value[1] == {"rank": 3} and value[2] == [{"from": 2}] for value in values)
    assert [value[3][0] for value in values] == [f"for {r}" for r in range(4)]
    assert [value[4] for value in values] == [(-1, 0), (0, -1), (-1, 1), (1, -1)]
    assert [value[5] for value in values] == [1, 1, 5, 5]


def test_functional_collectives_and_device_mesh():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        x = torch.full((4,), float(rank))
        return (
            functional.all_reduce(x, "sum", mesh["inner"].get_group()) + 0,
            functional.all_gather_tensor(x, 0, mesh["outer"].get_group()) + 0,
            functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
            functional.all_to_all_single(
                torch.arange(4.0) + 10 * rank, None, None, dist.group.WORLD
            )
            + 0,
            functional.broadcast(x, 1, dist.group.WORLD) + 0,
        )

    for rank, values in enumerate(World(4).run(body).values):
        total, rows, share, swapped, copied = (v.tolist() for v in values)
        assert total == [1.0 if rank < 2 else 5.0] * 4
        assert rows == [float(rank % 2)] * 4 + [float(rank % 2 + 2)] * 4
        assert share == [6.0]
        assert swapped == [rank, 10 + rank, 20 + rank, 30 + rank]
        assert copied == [1.0] * 4


def test_inputs_may_change_after_wait_and_gathers_may_run_in_place():
    """A rank that has waited reuses its input; slower ranks still read what was sent."""

    def body(rank):
        whole = torch.full((4,), -1.0)
        mine = whole.narrow(0, rank, 1).fill_(rank)
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        work.wait()
        kept = whole.clone()
        source, out = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(4)]
        dist.all_gather(out, source, async_op=True).wait()
        source.fill_(99)
        dist.barrier()
        return kept.tolist(), torch.cat(out).tolist()

    for seed in range(6):
        assert World(4, seed).run(body).values == [([0, 1, 2, 3], [0, 1, 2, 3])] * 4
