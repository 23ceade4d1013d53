"""Divergence: tensors that must have the same bits on all ranks and differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit import bits
from isobit.errors import DivergenceError
from isobit.foundation.majority import count_votes, name_ranks
from isobit.simulator.call_sites import user_line


def same_on_all_ranks(named: Mapping[str, Tensor] | torch.nn.Module, group: Any = None) -> None:
    """Check that tensors have the same bits on all ranks. Every rank of the group must call this.

    Args:
        named: Tensors by name, or a module, whose state_dict is checked.
        group: The process group; None is the whole world.

    Returns:
        Nothing.

    Raises:
        DivergenceError: If a tensor differs. It names the first such tensor, the ranks outside the largest group
            of equal ranks, and the first index that differs.

    Example:
        >>> import torch
        >>> from isobit.errors import DivergenceError
        >>> from isobit.simulator import World, same_on_all_ranks
        >>> def program(rank):
        ...     same_on_all_ranks({"weight": torch.tensor([1.0, float(rank == 2)])})
        >>> try:
        ...     World(4).run(program)
        ... except DivergenceError as error:
        ...     print(error.ranks, error.received)
        (2,) rank 2 differs from the others, first at index [1]: 0x00000000 against 0x3f800000
    """
    if isinstance(named, torch.nn.Module):
        named = dict(named.state_dict())
    site = user_line(sys._getframe(1))
    mine, here = {name: bits.digest(tensor) for name, tensor in named.items()}, dist.get_rank(group)
    digests: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(digests, mine, group=group)
    for name in sorted({name for theirs in digests for name in theirs}):
        vote = count_votes([theirs.get(name) for theirs in digests])
        if vote.is_unanimous:
            continue
        odd = vote.others
        held: list[Tensor | None] = [None] * len(digests)
        shows = here in (vote.reference, odd[0]) and name in named
        dist.all_gather_object(held, named[name].detach() if shows else None, group=group)
        raise diverged(
            name,
            [_global(group, member) for member in odd],
            held[vote.reference],
            held[odd[0]],
            site if here in odd else "",
        )


def _global(group: Any, member: int) -> int:
    return member if group is None else dist.get_global_rank(group, member)


def diverged(
    name: str, ranks: list[int], common: Tensor | None, odd: Tensor | None, site: str
) -> DivergenceError:
    """Report a tensor that differs; None means that a rank has no tensor of the name."""
    differ = "differs" if len(ranks) == 1 else "differ"
    if common is None or odd is None:
        received = f"no such tensor on {name_ranks(ranks) if odd is None else 'the others'}"
    else:
        found = bits.first_difference(common, odd)
        where = "" if found is None or found.index is None else f" at index {list(found.index)}"
        values = f"{found and found.left} against {found and found.right}"
        received = f"{name_ranks(ranks)} {differ} from the others, first{where}: {values}"
    return DivergenceError(
        expected=f"{name} with the same bits on all ranks",
        received=received,
        remedy=f"look for a step or buffer that {name_ranks(ranks)} did not synchronise, or for flipped bits",
        ranks=ranks,
        stacks={ranks[0]: [site]} if site else None,
    )
