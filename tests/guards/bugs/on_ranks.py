"""Bugs of several ranks: lost data, replicas that part, collectives that do not match."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from isobit.guards import check_links
from isobit.simulator import Flip, World
from tests.guards.bugs.bug import RANKS, Found, planted, quiet
from tests.guards.bugs.on_one_rank import replace_parameters, sgd
from tests.guards.watched_programs import batch, net


def steps(model, optimizer, called, rank, count=3, reduce=()):
    for step in range(count):
        optimizer.zero_grad()
        x, y = batch(100 * step + rank)
        F.mse_loss(called(x), y).backward()
        for parameter in reduce:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()


@planted(
    "baichuan2-86",
    "20",
    "a link between two devices changes data",
    "check",
    Found("link-changes-data", None, (1, 3)),
)
def faulty_link(wrong):
    """The third call of rank 1, after a send and a receive, sends to rank 3."""
    world = World(RANKS, faults=[Flip(rank=1, call=3, element=5)] if wrong else [])
    return world.run(lambda rank: check_links(elements=64)).values[0]


def replicas(rank):
    model = net()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = sgd(model)
    with quiet(model, optimizer, agree_every=1) as guard:
        steps(model, optimizer, model, rank, reduce=list(model.parameters()))
    return guard.findings


def events_of(call, to, wrong):
    """Run replicas; the result of one call of rank 0 arrives with a flipped bit at one rank."""
    faults = [Flip(rank=0, call=call, bit=20, to=to)] if wrong else []
    return World(RANKS, faults=faults).run(replicas).values[0]


@planted(
    "pytorch-84803",
    "20",
    "a broadcast gives one rank other weights",
    "check",
    Found("replicas-differ", 0, (2,)),
)
def faulty_broadcast(wrong):
    return events_of(1, 2, wrong)


@planted(
    "pytorch-96600",
    "20",
    "a reduction gives one rank other gradients",
    "check",
    Found("replicas-differ", 0, (3,)),
)
def faulty_reduction(wrong):
    return events_of(5, 3, wrong)


@planted(
    "deepspeed-1801",
    "20",
    "norms part between tensor-parallel ranks after clipping",
    "watch on 4 ranks",
    Found("replicas-differ", 0, (0,)),
)
def norms_part(rank, wrong):
    """BLOOM: only rank 0 clips what every rank replicates."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    torch.manual_seed(10 + rank)
    model = nn.ModuleDict({"norm": norm, "shard": nn.Linear(8, 4, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = {"tensor_group": dist.group.WORLD, "sharded": ["shard.*"]}
    with quiet(model, optimizer, agree_every=1, **ranks) as guard:
        for step in range(2):
            optimizer.zero_grad()
            model["shard"](norm(batch(step)[0])).square().sum().backward()
            for parameter in norm.parameters():
                dist.all_reduce(parameter.grad)
                if rank == 0 or not wrong:
                    parameter.grad.mul_(0.01)
            optimizer.step()
    return guard.findings


@planted(
    "deepspeed-5794",
    "20",
    "sizes of all_to_all differ between ranks",
    "simulator",
    Found("mismatch", None, (0, 1, 2, 3)),
)
def capacities_differ(rank, wrong):
    rows = 3 if wrong and rank == 0 else 4
    x = torch.ones(RANKS * rows, 2)
    dist.all_to_all_single(torch.empty_like(x), x)


@planted(
    "pytorch-104336",
    "20",
    "parameters are replaced after DistributedDataParallel",
    "watch on 4 ranks",
    Found("not-reduced", 0),
)
def replaced_after_wrapping(rank, wrong):
    model = net()
    wrapped = DistributedDataParallel(model)
    if wrong:
        replace_parameters(model)
    optimizer = sgd(model)
    with quiet(wrapped, optimizer) as guard:
        steps(model, optimizer, wrapped, rank)
    return guard.findings


@planted(
    "jxmnop",
    "20",
    "the module inside DistributedDataParallel is called",
    "watch on 4 ranks",
    Found("wrapper-bypassed", 0),
)
def wrapper_bypassed(rank, wrong):
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    with quiet(wrapped, optimizer) as guard:
        steps(model, optimizer, model if wrong else wrapped, rank)
    return guard.findings


@planted(
    "deepspeed-6714",
    "new",
    "ranks call different collectives",
    "simulator",
    Found("mismatch", None, (0,)),
)
def different_collectives(rank, wrong):
    x = torch.ones(4)
    if wrong and rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


@planted(
    "deepspeed-6089",
    "new",
    "one rank skips a collective",
    "simulator",
    Found("deadlock", None, (2,)),
)
def skipped_collective(rank, wrong):
    """A rank whose expert got no token does not take part."""
    x = torch.ones(4)
    if not (wrong and rank == 2):
        dist.all_reduce(x)
