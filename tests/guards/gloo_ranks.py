"""Four gloo processes, launched once: what each rank finds of agreements, losses and norms, as JSON by rank."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from isobit import bits
from isobit.errors import AgreementError
from isobit.guards import rank_agreement
from isobit.ops.exact_sum.op import exact_sum
from tests.guards.gloo_scalars import (
    Part,
    fully_sharded,
    losses,
    norms,
    norms_of_groups,
    outcome,
)

RANKS = 4
ROOT = Path(__file__).parents[2]
# parameter, rank, index, bit of the byte-wise little-endian element, value that all ranks have there before
FLIPS = [
    ("0.weight", 2, (3, 4), 0, None),
    ("0.weight", 1, (0, 0), 31, 0.0),  # the sign of a zero
    ("0.weight", 3, (16, 12), 3, float("nan")),  # a payload
    ("1.weight", 3, (12,), 15, None),
    ("steps", 1, (2,), 63, None),
    ("view", 2, (4, 1), 7, None),
    ("0.bias", 0, (5,), 3, None),  # the first rank is no better than others
]


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(13, 17), nn.LayerNorm(13, dtype=torch.bfloat16))
    made.register_buffer("steps", torch.arange(5))
    made.register_parameter("view", nn.Parameter(torch.randn(3, 7).T))
    return made


def named(made):
    return dict(made.named_parameters()) | dict(made.named_buffers())


def flip(tensor, index, bit):
    whole = bits.as_integers(tensor[index].reshape(1))
    width = 8 * tensor.element_size()
    whole = whole ^ (1 << bit if bit < width - 1 else -(1 << bit))
    tensor.data[index] = whole.view(tensor.dtype)[0]


def plain(found):
    return json.loads(json.dumps([asdict(d) for d in found.differences]))


def agreements(rank):
    made = model()
    first = rank_agreement(made)
    same = rank_agreement(made, since=first)
    with torch.no_grad():
        made[0].bias += 1
    moved = rank_agreement(named(made), since=same, step=20, every=10)
    with torch.no_grad():
        made[0].bias[0] = torch.inf if rank == 2 else made[0].bias[0]
    infinite = rank_agreement(made, on_difference="report")
    return {
        "agreed": [first.agreed, same.agreed, moved.agreed],
        "changed": [first.changed, same.changed, moved.changed],
        "kept": [first.kept, same.kept, moved.kept, infinite.kept],
        "unchanged": list(moved.unchanged),
        "counts": [list(first.ranks), first.parameters, first.elements, first.sent],
        "finite": [first.finite, infinite.finite],
        "nonfinite": list(infinite.nonfinite),
        "skipped": rank_agreement(made, step=21, every=10) is None,
    }


def flips(rank):
    found = []
    for name, where, index, bit, value in FLIPS:
        made = model()
        tensor = named(made)[name]
        if value is not None:
            tensor.data[index] = value
        if rank == where:
            flip(tensor, index, bit)
            if name == "0.weight":
                flip(tensor, (16, 12), 2)  # a later one: not the first
        found.append(plain(rank_agreement(made, on_difference="report")))
    return found


def many(rank):
    """Every parameter differs on two ranks, at other places; only two are searched."""
    made = model()
    if rank in (1, 3):
        for parameter in made.parameters():
            flip(parameter, (rank // 2,) * parameter.dim(), 0)
    report = rank_agreement(made, on_difference="report", most=2)
    try:
        rank_agreement(made)
    except AgreementError as error:
        return {
            "found": plain(report),
            "raised": str(error),
            "record": len(error.agreement.differences),
        }


def tied(rank):
    """Two ranks against two; and three ranks with a parameter each that differs, of which all others hold the same."""
    made = model()
    if rank > 1:
        flip(made[0].weight, (3, 4), 0)
    two = rank_agreement(made, on_difference="report")
    said = outcome(lambda: rank_agreement(made))
    made = model()
    if rank < 3:
        flip(list(made.parameters())[rank], (0,) * list(made.parameters())[rank].dim(), 0)
    each = rank_agreement(made, on_difference="report")
    return {
        "found": plain(two),
        "minority": list(two.minority),
        "said": said,
        "each": plain(each),
        "all": each.minority,
    }


def unlike(rank):
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 3), "c": torch.ones(4)}
    if rank == 1:
        tensors["a"] = torch.ones(3, dtype=torch.bfloat16)
        del tensors["c"]
    if rank == 2:
        tensors["b"] = torch.ones(3, 2)
        tensors["d"] = torch.ones(1)
    return plain(rank_agreement(tensors, on_difference="report"))


def refusals(rank):
    x = torch.ones(3)
    return [
        outcome(lambda: rank_agreement({"x": x.to_sparse() if rank == 1 else x})),
        outcome(lambda: rank_agreement({})),
        outcome(lambda: rank_agreement([("x", x), ("x", x)])),
        outcome(lambda: rank_agreement({"x": x}, every=10)),
        outcome(lambda: rank_agreement({"x": x}, on_difference="ignore")),
        outcome(lambda: rank_agreement({"x": x}).agreed),  # the group is still in step
    ]


def sharded(rank, mesh):
    """Rows over the second axis, copies over the first: ranks 0 and 2 hold one shard, 1 and 3 the other."""
    torch.manual_seed(1)
    weight = distribute_tensor(torch.randn(7, 3), mesh, [Replicate(), Shard(0)])
    replicas = mesh.get_group("replicate")
    right = rank_agreement({"w": weight}, replicas)
    if rank == 3:
        flip(weight.to_local(), (1, 2), 22)
    found = rank_agreement({"w": weight}, replicas, on_difference="report")
    part = torch.ones(2)
    part._isobit_shard = Part(rank % 2, 2)
    return {
        "agreed": [right.agreed, list(right.ranks)],
        "found": plain(found),
        "world": outcome(lambda: rank_agreement({"w": weight})),
        "tensor parallel": outcome(lambda: rank_agreement({"p": part})),
    }


def work(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        check.__name__: check(rank)
        for check in (agreements, flips, many, tied, unlike, refusals, losses)
    }
    found |= {
        check.__name__: check(rank, mesh)
        for check in (sharded, norms, fully_sharded, norms_of_groups)
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@cache
def found_by_ranks():
    """Each rank's findings. A process of its own forks the ranks, so that torch is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-W", "ignore", "-m", "tests.guards.gloo_ranks", folder]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]


if __name__ == "__main__":
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    exact_sum(torch.ones(1))  # loads and attests the kernels once
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=RANKS, start_method="fork")
