"""Experts split over 1, 2, 4 and 8 ranks have the bits of one rank: outputs, and every gradient."""

import ast
import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit import ArgumentError, CutError, Samples, UnsupportedError, bits
from isobit.ops.experts import portable
from isobit.parallel import ExpertParallel, GlobalBatch, Gradients, Levels
from isobit.parallel.tensor import expert_exchange
from isobit.parallel.tensor.shard import tp_group_of
from isobit.simulator import World

EXPERTS, K, HIDDEN, INNER, LENGTHS = 16, 4, 12, 6, (7, 3, 5, 6)


class Layer(torch.nn.Module):
    """A router, on every rank, and experts that are split."""

    def __init__(self, dtype, mesh, tokens="replicated"):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.router, up, down = (
            torch.nn.Parameter(torch.randn(shape, generator=drawn).to(dtype))
            for shape in ((EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
        )
        self.experts = ExpertParallel(up, down, mesh, tokens=tokens)

    def forward(self, x, samples):
        logits = isobit.linear(x, self.router, samples=samples)
        return self.experts(x, isobit.route(logits, K, samples=samples))


def tokens(dtype):
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(n, HIDDEN, generator=drawn).to(dtype) for n in LENGTHS]


def whole(module, name):
    """The gradients of all ranks' experts."""
    return tp_group_of(module).all_gather(getattr(module, name).grad).flatten(0, 1)


def run(dtype, micro_batches=1, mesh=None):
    """Digests of the gradients of a step, experts of all ranks together; also of outputs, if there is one call."""
    ranks, rank = (1, 0) if mesh is None else (mesh["dp"].size(), mesh["dp"].get_local_rank())
    layer = Layer(dtype, None if mesh is None else mesh["ep"])
    samples = tokens(dtype)
    batch = GlobalBatch(total=4, ranks=ranks, micro_batches=micro_batches)
    group = None if mesh is None else mesh["dp"].get_group()
    gradients, made = Gradients(layer, batch, group=group), []
    for micro in range(micro_batches):
        rows = batch.samples(rank, micro)
        x = torch.cat([samples[i] for i in rows]).requires_grad_()
        with gradients.micro_batch(micro) as share:
            lengths = [LENGTHS[i] for i in rows]
            y = layer(x, Samples.packed(lengths, first=share.first, total=share.total))
            y.backward(upstream(dtype, rows))
        made += [y.detach(), x.grad]
    grads = [layer.router.grad, *(whole(layer.experts, name) for name in ("gate_up", "down"))]
    if ranks * micro_batches == 1:
        grads += made
    return [bits.digest(tensor) for tensor in grads]


def upstream(dtype, rows):
    drawn = torch.Generator().manual_seed(2)
    return torch.cat(
        [
            grad
            for i, n in enumerate(LENGTHS)
            for grad in [torch.randn(n, HIDDEN, generator=drawn).to(dtype)]
            if i in rows
        ]
    )


def on_ranks(data, experts, dtype, micro_batches=1):
    def program(_):
        mesh = init_device_mesh("cpu", (data, experts), mesh_dim_names=("dp", "ep"))
        return run(dtype, micro_batches, mesh)

    return World(data * experts).run(program).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_digest_for_every_number_of_ranks(dtype):
    expected = run(dtype)
    assert len(set(expected)) == 5
    for count in (1, 2, 4, 8):
        assert on_ranks(1, count, dtype) == [expected] * count


def test_the_unsplit_operators_have_the_same_bits():
    x, samples = torch.cat(tokens(torch.float32)), Samples.packed(LENGTHS)
    layer = Layer(torch.float32, None)
    routes = isobit.route(isobit.linear(x, layer.router, samples=samples), K, samples=samples)
    rows = isobit.dispatch_rows(x, routes)
    gate, up = isobit.grouped_linear(rows, layer.experts.gate_up, routes=routes).chunk(2, -1)
    made = isobit.grouped_linear(isobit.swiglu(gate, up), layer.experts.down, routes=routes)
    assert bits.equal(isobit.combine(made, routes), layer(x, samples))


@pytest.mark.parametrize(
    ("data", "experts", "micro_batches"), [(2, 2, 1), (4, 2, 1), (2, 4, 2), (1, 2, 4)]
)
def test_one_digest_with_data_parallel_ranks_and_micro_batches(data, experts, micro_batches):
    found = on_ranks(data, experts, torch.float32, micro_batches)
    assert found == [run(torch.float32)[:3]] * (data * experts)


def test_a_sum_by_slot_differs_between_numbers_of_ranks(monkeypatch):
    """Planted: rank sums that are not over whole segments of experts."""

    def chained(rows, weights, experts, places, count, segments):
        return right(rows, weights, experts, places, count, 1)

    expected = run(torch.float32)
    right = portable.sum_experts
    monkeypatch.setattr(portable, "sum_experts", chained)
    assert on_ranks(1, 2, torch.float32)[0] != run(torch.float32)
    monkeypatch.undo()
    assert run(torch.float32) == expected


# Tokens that are split over the ranks, whose rows are exchanged by all-to-all.


def run_split(dtype, mesh=None, micro_batches=1, frozen=False):
    """Digests of the gradients of a step; and of each sample's outputs and dx, on the rank that has it."""
    ranks = 1 if mesh is None else mesh.size()
    group = None if mesh is None else Levels(mesh)
    rank = 0 if mesh is None else group.rank
    layer = Layer(dtype, None if mesh is None else mesh["ep"], "split")
    layer.experts.requires_grad_(not frozen)
    samples, by_sample = tokens(dtype), {}
    batch = GlobalBatch(4, ranks, micro_batches, order="micro")
    gradients = Gradients(layer, batch, group=group)
    for micro in range(micro_batches):
        rows = batch.samples(rank, micro)
        lengths = [LENGTHS[i] for i in rows]
        x = torch.cat([samples[i] for i in rows]).requires_grad_()
        with gradients.micro_batch(micro) as share:
            y = layer(x, Samples.packed(lengths, first=share.first, total=share.total))
            y.backward(upstream(dtype, rows))
        for i, *found in zip(rows, y.detach().split(lengths), x.grad.split(lengths), strict=True):
            by_sample[i] = [bits.digest(t) for t in found]
    grads = [layer.router.grad]
    if not frozen:
        grads += [whole(layer.experts, name) for name in ("gate_up", "down")]
    return [bits.digest(t) for t in grads], by_sample


def on_split_ranks(shape, dtype, micro_batches=1, **options):
    def program(_):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        return run_split(dtype, mesh, micro_batches, **options)

    return World(shape[0] * shape[1]).run(program).values


def differing(found, expected):
    """How many digests of ranks differ from those of one rank."""
    grads, by_sample = expected
    seen = {i for _, held in found for i in held}
    assert seen == set(by_sample)
    assert len(found) > 1
    return sum(a != b for got, _ in found for a, b in zip(got, grads, strict=True)) + sum(
        held[i] != by_sample[i] for _, held in found for i in held
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_digest_if_tokens_are_split(dtype):
    expected = run_split(dtype)
    assert expected[0] == run(dtype)[:3]
    for shape, micro_batches in (
        ((1, 2), 1),
        ((1, 4), 1),
        ((2, 2), 1),
        ((1, 2), 2),
        ((2, 1), 2),
    ):
        assert differing(on_split_ranks(shape, dtype, micro_batches), expected) == 0, shape


def test_a_copy_of_a_split_layer_trains():
    def program(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
        layer = copy.deepcopy(Layer(torch.float32, mesh, "split"))
        batch, x = GlobalBatch(2, 2), tokens(torch.float32)[rank]
        with Gradients(layer, batch, group=mesh.get_group()).micro_batch(0) as share:
            layer(x, Samples.packed([len(x)], first=share.first, total=2)).sum().backward()
        return bits.digest(whole(layer.experts, "down"))

    assert len(set(World(2).run(program).values)) == 1


def test_experts_that_are_not_trained():
    assert (
        differing(
            on_split_ranks((1, 2), torch.float32, frozen=True),
            run_split(torch.float32, frozen=True),
        )
        == 0
    )


def by_arrival(right):
    def plan(*given):
        made = right(*given)
        mine = made.ranks.rank * len(made.order) // made.ranks.size
        return replace(made, order=made.order.sort().values.roll(mine))

    return plan


def one_rank_dropped(right):
    def plan(*given):
        made = right(*given)
        counts = made.routes.samples.spans
        spans = tuple((at, 0 if i == 0 else n) for i, (at, n) in enumerate(counts))
        samples = replace(made.routes.samples, spans=spans)
        return replace(made, routes=made.routes._replace(samples=samples))

    return plan


def by_rank(right):
    """Sum the rows of each rank by themselves: the samples of a rank are one."""

    def plan(*given):
        made = right(*given)
        counts, known = made.routes.samples.spans, made.routes.samples
        half = len(counts) // made.ranks.size
        joined = []
        for at in range(0, len(counts), half):
            joined += [(counts[at][0], sum(n for _, n in counts[at : at + half]))]
            joined += [(counts[at][0], 0)] * (half - 1)
        samples = replace(known, spans=tuple(joined))
        return replace(made, routes=made.routes._replace(samples=samples))

    return plan


@pytest.mark.parametrize("wrong", [by_arrival, one_rank_dropped, by_rank])
def test_planted_exchanges_are_detected(wrong, monkeypatch):
    expected = run_split(torch.float32)
    monkeypatch.setattr(expert_exchange, "plan_move", wrong(expert_exchange.plan_move))
    assert differing(on_split_ranks((1, 2), torch.float32), expected) > 0


def test_what_an_exchange_does_not_support():
    def program(rank):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        layer, x = Layer(torch.float32, mesh["ep"], "split"), tokens(torch.float32)[rank]
        with pytest.raises(UnsupportedError, match="order='micro'"):
            Gradients(layer, GlobalBatch(4, 2, 2), group=mesh["ep"].get_group())
        with pytest.raises(UnsupportedError, match="different experts"):
            Gradients(DistributedDataParallel(layer), GlobalBatch(4, 2))
        with torch.no_grad():  # as many samples as a rank likes
            assert len(layer(x, Samples.packed([len(x)]))) == len(x)
        y = layer(x, Samples.packed([len(x)]))
        with pytest.raises(UnsupportedError, match=r"isobit.parallel.Gradients"):
            y.sum().backward()
        with pytest.raises(CutError, match="divides 5 experts"):
            ExpertParallel(torch.zeros(5, 4, 3), torch.zeros(5, 3, 2), mesh["ep"], tokens="split")
        with pytest.raises(ArgumentError, match="'split'"):
            ExpertParallel(torch.zeros(4, 4, 3), torch.zeros(4, 3, 2), None, tokens="some")
        flat = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"]
        one = Layer(torch.float32, dist.new_subgroups(1)[0], "split")
        Gradients(one, GlobalBatch(4, 2), group=flat.get_group())  # one rank exchanges nothing
        return True

    assert World(2).run(program).values == [True] * 2


def run_on_gloo(rank, folder, ranks):
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    for dtype in (torch.float32, torch.bfloat16):
        (folder / f"{rank} {dtype}").write_text(repr(run_split(dtype, mesh)))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_split_tokens_on_gloo(ranks, tmp_path):
    mp.spawn(run_on_gloo, args=(tmp_path, ranks), nprocs=ranks)
    for dtype in (torch.float32, torch.bfloat16):
        found = [
            ast.literal_eval((tmp_path / f"{rank} {dtype}").read_text()) for rank in range(ranks)
        ]
        assert differing(found, run_split(dtype)) == 0


def test_ranks_that_do_not_divide_the_segments():
    def program(_):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        with pytest.raises(CutError, match="4 segments of 12 experts"):
            ExpertParallel(torch.zeros(12, 4, 3), torch.zeros(12, 3, 2), mesh)
        return True

    assert World(3).run(program).values == [True] * 3
