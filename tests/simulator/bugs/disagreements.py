"""Planted bugs of collectives: ranks that call another one, another way, or not at all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.simulator.bugs.bug import all_four, one, planted
from tests.simulator.bugs.toy import average, build_model, train


@planted("a collective under `if rank == 0`", "mismatch", lambda seed: (0,))
def collective_under_if(rank: int, seed: int, wrong: bool) -> float:
    loss = torch.tensor(float(seed + rank))
    if rank == 0 or not wrong:
        dist.all_reduce(loss)  # "only the first rank prints it"
    dist.barrier()
    return float(loss)


@planted(
    "a collective under `if rank == 0`, the last of the program", "deadlock", lambda seed: (0,)
)
def last_collective_under_if(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed), steps=1)
    if rank == 0 or not wrong:
        dist.all_reduce(torch.ones(2))


@planted("collectives on two groups in another order on one rank", "deadlock")
def reordered_on_two_groups(rank: int, seed: int, wrong: bool) -> None:
    first, second = dist.new_group(range(4)), dist.new_group(range(4))
    order = (second, first) if wrong and (rank,) == one(seed) else (first, second)
    for group in order:
        dist.all_reduce(torch.randn(3), group=group)


@planted("a group that one rank does not make, since it is no member", "mismatch")
def skipped_new_group(rank: int, seed: int, wrong: bool) -> None:
    members = [other for other in range(4) if (other,) != one(seed)]
    if rank in members or not wrong:
        dist.new_group(members)
    dist.all_reduce(torch.randn(3), group=dist.new_group(range(4)))


@planted("a tensor of another shape on one rank", "mismatch")
def mismatched_shape(rank: int, seed: int, wrong: bool) -> None:
    dist.all_reduce(torch.randn(5 if wrong and (rank,) == one(seed) else 4))


@planted("a tensor of another dtype on one rank", "mismatch")
def mismatched_dtype(rank: int, seed: int, wrong: bool) -> None:
    odd = wrong and (rank,) == one(seed)
    dist.all_reduce(torch.randn(4).to(torch.float64 if odd else torch.float32))


@planted("another root on one rank", "mismatch")
def wrong_root(rank: int, seed: int, wrong: bool) -> None:
    dist.broadcast(torch.randn(4), src=1 if wrong and (rank,) == one(seed) else 0)


@planted("SUM on one rank, AVG on the others", "mismatch")
def mixed_operation(rank: int, seed: int, wrong: bool) -> None:
    odd = wrong and (rank,) == one(seed)
    dist.all_reduce(torch.randn(4), op=dist.ReduceOp.SUM if odd else dist.ReduceOp.AVG)


@planted("one rank skips the last step", "deadlock")
def uneven_loop(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed), steps=1 if wrong and (rank,) == one(seed) else 2)


@planted("an asynchronous all-reduce that nobody waits for", "pending", all_four)
def forgotten_wait(rank: int, seed: int, wrong: bool) -> None:
    def reduce(model: torch.nn.Module) -> None:
        works = [
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True) for p in model.parameters()
        ]
        for work in works[: 3 if wrong else None]:
            work.wait()

    train(rank, seed, build_model(seed), reduce=reduce)


@planted("a result read by the host before its wait", "pending")
def read_before_wait(rank: int, seed: int, wrong: bool) -> float:
    total = torch.full((2,), float(rank))
    work = dist.all_reduce(total, async_op=True)
    if wrong and (rank,) == one(seed):
        early = total.sum().item()
        work.wait()
        return early
    work.wait()
    return total.sum().item()


@planted("averaged over half of the ranks", "gradients differ", all_four)
def wrong_group(rank: int, seed: int, wrong: bool) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[rank // 2] if wrong else None
    train(rank, seed, build_model(seed), reduce=lambda model: average(model, group))
