"""What each of four gloo ranks finds of losses and norms; see gloo_ranks.py, which runs this."""

from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from isobit import bits, optim
from isobit.errors import IsobitError
from isobit.guards import rank_agreement
from isobit.ops.exact_sum.op import exact_sum
from isobit.parallel.data.grad_norm import clip_grad_norm_, get_total_norm
from isobit.parallel.data.loss_meter import LossMeter

RANKS, TRIES = 4, 10


@dataclass(frozen=True)
class Part:
    """As a tensor-parallel parameter's record."""

    coordinate: int
    parts: int
    mesh_axis: str = "tp"


def outcome(call):
    try:
        return repr(call())
    except IsobitError as error:
        return f"{type(error).__name__}: {error}"


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.ldexp(
        torch.randn(shape, generator=generator), torch.randint(-9, 9, shape, generator=generator)
    )


def with_grad(grad, part=None):
    made = nn.Parameter(torch.zeros_like(grad))
    made.grad = grad.clone()
    if part is not None:
        made._isobit_shard = part
    return made


def norms(rank, mesh):
    """Of gradients cut by rows anywhere, by DTensor placements, and held whole: against one process's."""
    differ, stock_differs, clipped = [], 0, 0
    for seed in range(TRIES):
        cut, whole, spread = drawn(seed, 101), drawn(seed + 100, 33), drawn(seed + 200, 7, 5)
        wanted = optim.get_total_norm([cut, whole, spread])
        edges = [0, *sorted(Random(seed).choices(range(102), k=RANKS - 1)), 101]
        placements = [
            [Replicate(), Shard(0)],
            [Shard(1), Replicate()],
            [Shard(0), Shard(0)],
            [Shard(1), Shard(0)],
            [Replicate(), Replicate()],
        ][seed % 5]
        part = with_grad(cut[edges[rank] : edges[rank + 1]], Part(rank, RANKS))
        spread_grad = distribute_tensor(spread.clone(), mesh, placements)
        dtensor = nn.Parameter(distribute_tensor(torch.zeros_like(spread), mesh, placements))
        dtensor.grad = spread_grad
        parameters = [part, with_grad(whole.clone()), dtensor]
        norm = get_total_norm(parameters)
        differ.append(not bits.equal(norm, wanted))
        clip_grad_norm_(parameters, 1.0)
        alone = [with_grad(g) for g in (cut, whole, spread)]
        optim.clip_grad_norm_(alone, 1.0)
        ours = [part.grad, parameters[1].grad, dtensor.grad.full_tensor()]
        theirs = [alone[0].grad[edges[rank] : edges[rank + 1]], alone[1].grad, alone[2].grad]
        clipped += sum(not bits.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        rows = distribute_tensor(drawn(seed, 100, 7), mesh, [Shard(0), Shard(0)])
        found, exact = (
            torch.nn.utils.get_total_norm([rows]),
            torch.nn.utils.get_total_norm([drawn(seed, 100, 7)]),
        )
        stock_differs += not bits.equal(
            found.full_tensor() if isinstance(found, DTensor) else found, exact
        )
    return {"differ": sum(differ), "clipped": clipped, "stock": stock_differs}


def fully_sharded(rank, mesh):
    """FSDP2, extents that do not divide and a rank that holds nothing: each element once, padding never."""
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(made, mesh=init_device_mesh("cpu", (RANKS,)))
    made(drawn(3, 4, 5)).square().sum().backward()
    whole = [p.grad.full_tensor() for p in made.parameters()]
    empty = sum(p.grad.to_local().numel() == 0 for p in made.parameters())
    found, wanted = get_total_norm(made), optim.get_total_norm(whole)
    agreed = outcome(lambda: rank_agreement(made))
    clip_grad_norm_(made, 0.5)
    optim.scale_by_norm(whole, wanted, 0.5)
    clipped = all(
        bits.equal(p.grad.full_tensor(), w) for p, w in zip(made.parameters(), whole, strict=True)
    )
    return {"norm": bits.equal(found, wanted), "clipped": clipped, "empty": empty, "agreed": agreed}


def norms_of_groups(rank, mesh):
    """Groups that hold all pieces, and those that do not."""
    spread = drawn(5, 7, 5)
    dtensor = nn.Parameter(
        distribute_tensor(torch.zeros_like(spread), mesh, [Replicate(), Shard(0)])
    )
    dtensor.grad = distribute_tensor(spread, mesh, [Replicate(), Shard(0)])
    shards, replicas = mesh.get_group("shard"), mesh.get_group("replicate")
    part = with_grad(spread, Part(rank % 2, 2))
    wide = with_grad(spread.double() if rank == 0 else spread)
    return {
        "shards": bits.equal(get_total_norm([dtensor], group=shards), optim.get_total_norm(spread)),
        "replicas": outcome(lambda: get_total_norm([dtensor], group=replicas)),
        "parts": outcome(lambda: get_total_norm([part])),
        "one refuses": outcome(lambda: get_total_norm([wide])),
        "still in step": bits.equal(
            get_total_norm(with_grad(spread)), optim.get_total_norm(spread)
        ),
    }


def mean_loss(terms):
    meter = LossMeter()
    meter.add(terms)
    return meter.value()


def losses(rank):
    terms = drawn(7, 96).abs()
    meter, shares = LossMeter(), terms.tensor_split([5, 17, 30, 31, 60, 80, 90])
    for micro_batch in (1, 0):
        share = shares[2 * rank + micro_batch]
        meter.add(torch.cat([share, torch.zeros(3)]), share.numel())
    means = [mean_loss(share) for share in shares]
    empty = LossMeter()
    group = dist.new_group([0, 1])
    return {
        "value": meter.value().item().hex(),
        "fp32": meter.value(dtype=torch.float32).item().hex(),
        "cross entropy": bits.equal(meter.cross_entropy(), exact_sum(-terms) / -96),
        "mean": mean_loss(terms[24 * rank : 24 * rank + 24]).item().hex(),
        "of means": torch.stack(means).mean().item().hex(),
        "nothing": outcome(lambda: empty.value()),
        "outside": outcome(lambda: meter.value(group))
        if rank > 1
        else meter.value(group).isfinite().item(),
    }
