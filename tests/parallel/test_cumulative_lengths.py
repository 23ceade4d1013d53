"""Split operators and layers take samples as cumulative lengths (cu_seqlens), as the unsplit ones do."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from isobit import ArgumentError
from isobit.parallel.tensor import tensor_parallel_group
from isobit.parallel.tensor.linear import ColumnParallelLinear, column_linear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World
from tests.parallel import tensor_cases as cases


def differing_on_ranks(count):
    """What differs from the unsplit operator, by case, on each rank."""

    def check(_):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        ranks = TensorParallelGroup.of(mesh)
        return {
            name: case(ranks, torch.float32, cases.CUMULATIVE) for name, case in cases.CASES.items()
        }

    return World(count).run(check).values


@pytest.mark.parametrize("count", [1, 2])
def test_split_operators_have_the_unsplit_bits(count):
    assert differing_on_ranks(count) == [{name: [] for name in cases.CASES}] * count


def test_lengths_that_are_not_used_are_seen(monkeypatch):
    monkeypatch.setattr(tensor_parallel_group, "as_samples", lambda _: None)
    for found in differing_on_ranks(2):
        assert found.keys() == cases.CASES.keys()
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (torch.tensor([0, 10, 27]), "with 27 rows"),
        (torch.tensor([0.0, 28.0]), r"received: torch\.float32"),
        (torch.tensor([[0, 28]]), r"of shape \[1, 2\]"),
        ([0, 28], "received: list"),
    ],
)
def test_other_lengths_are_refused(given, why):
    x, one_rank = torch.randn(4, 7, 96), TensorParallelGroup("tp", None, 0, 1)
    with pytest.raises(ArgumentError, match=why):
        column_linear(x, torch.randn(256, 96), tp_group=one_rank, samples=given)
    with pytest.raises(ArgumentError, match=why):
        ColumnParallelLinear(96, 256, mesh=None)(x, samples=given)
