"""Theorem: a tensor that ranks saved in chunks, by rows or by columns, is read as the whole tensor."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from isobit.comparing.checkpoints.compare import compare_checkpoints
from isobit.simulator import World

WHOLE = {
    "rows": torch.arange(30.0).reshape(10, 3).sin(),
    "columns": torch.arange(24.0).reshape(3, 8).cos().bfloat16(),
    "all": torch.arange(5),
}
PLACES = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}


def save(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {n: distribute_tensor(t, mesh, [PLACES[n]]) for n, t in WHOLE.items()}
    dcp.save(tensors, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_of_ranks_are_put_together(ranks, tmp_path):
    World(ranks).run(save, tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["rows"].chunks) == ranks
    save_file(WHOLE, tmp_path / "whole.safetensors")
    found = compare_checkpoints(tmp_path / "dcp", tmp_path / "whole.safetensors")
    assert found.equal, (found.differing, found.only_left, found.only_right)
    save_file(WHOLE | {"rows": WHOLE["rows"].flip(0)}, tmp_path / "whole.safetensors")
    (one,) = compare_checkpoints(tmp_path / "dcp", tmp_path / "whole.safetensors").differing
    assert one.name == "rows"
