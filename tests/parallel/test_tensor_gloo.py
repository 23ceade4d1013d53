"""The cases of tensor parallelism on real processes over gloo."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from tests.parallel import tensor_cases as cases

RANKS = 2


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    ranks = TensorParallelGroup.of(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    found = cases.differences(ranks, (torch.bfloat16,))
    dist.destroy_process_group()
    assert found == {}, found
    (folder / f"kept by {rank}").touch()


def test_split_operators_on_gloo(tmp_path):
    mp.spawn(run, args=(tmp_path,), nprocs=RANKS)
    assert len(list(tmp_path.glob("kept by *"))) == RANKS
