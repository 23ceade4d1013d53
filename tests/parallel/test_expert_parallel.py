"""Experts split over 1, 2, 4 and 8 ranks have the bits of one rank: outputs, and every gradient."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isobit
from isobit import CutError, Samples, bits
from isobit.ops.experts import portable
from isobit.parallel import ExpertParallel, GlobalBatch, Gradients
from isobit.parallel.tensor.shard import tp_group_of
from isobit.simulator import World

EXPERTS, K, HIDDEN, INNER, LENGTHS = 16, 4, 12, 6, (7, 3, 5, 6)


class Layer(torch.nn.Module):
    """A router, on every rank, and experts that are split."""

    def __init__(self, dtype, mesh):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.router, up, down = (
            torch.nn.Parameter(torch.randn(shape, generator=drawn).to(dtype))
            for shape in ((EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
        )
        self.experts = ExpertParallel(up, down, mesh)

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


def test_ranks_that_do_not_divide_the_segments():
    def program(_):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        with pytest.raises(CutError, match="4 segments of 12 experts"):
            ExpertParallel(torch.zeros(12, 4, 3), torch.zeros(12, 3, 2), mesh)
        return True

    assert World(3).run(program).values == [True] * 3
