"""The global gradient norm, and clipping by it, of a model that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.ops.exact_sum.op import exact_state_anywhere
from isobit.ops.share import refuse_unfinished
from isobit.optim import norm_of, scale_by_norm
from isobit.parallel.collectives.levels import Group
from isobit.parallel.collectives.rank_group import RankGroup
from isobit.parallel.data.loss_meter import add_states
from isobit.parallel.tensor.local_shards import counted_here, find_shards, is_dtensor


@torch.no_grad()
def get_total_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor], *, group: Group = None
) -> Tensor:
    """Return the 2-norm of the gradients of a sharded model, with the bits of the unsharded one.

    Squares are summed exactly, and every element is counted once: DTensor gradients by their
    placements, tensor-parallel shards on each rank, replicated gradients on the first rank. All
    ranks of the group call this.

    Args:
        parameters: A model, a parameter or parameters, whose `grad` is used.
        group: All ranks that have a shard, or their `Levels`; None is the default group.

    Returns:
        The norm as an fp32 scalar: the bits of `isobit.optim.get_total_norm`.

    Raises:
        ArgumentError: The group does not have all shards.
        UnsupportedError: A gradient has a partial placement, or another rank raised an error.

    Example:
        >>> import torch
        >>> import isobit
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> isobit.parallel.get_total_norm([weight]).item()
        5.0
    """
    ranks = RankGroup.of(group)
    known = find_shards(parameters) if isinstance(parameters, nn.Module) else {}
    failure: Exception | None = None
    numbers = [*exact_state_anywhere([]).tolist(), 1]
    try:
        grads = counted_here(list_of(parameters), ranks, known)
        numbers = [*exact_state_anywhere(grads, squared=True).tolist(), 0]
    except Exception as error:  # the other ranks wait for this one: take part, then raise
        failure = error
    *state, failed = add_states(numbers, ranks)
    if failure is not None:
        raise failure
    if failed:
        raise UnsupportedError(
            expected="gradients that every rank can count",
            received=f"{failed} of {len(ranks.ranks)} ranks that could not",
            remedy="read the errors of those ranks",
        )
    norm = norm_of(torch.tensor(state, device="cpu"))
    return norm.to(grads[0].device) if grads else norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    group: Group = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of a sharded model in place, as `isobit.optim.clip_grad_norm_` does.

    Args:
        parameters: A model, a parameter or parameters, whose `grad` is scaled.
        max_norm: The largest norm after clipping.
        group: All ranks that have a shard, or their `Levels`; None is the default group.
        error_if_nonfinite: Whether to raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping, as an fp32 scalar.

    Raises:
        UnsupportedError: The step is not complete, or the norm is not finite and
            `error_if_nonfinite` is set.

    Example:
        >>> import torch
        >>> import isobit
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> isobit.parallel.clip_grad_norm_([weight], max_norm=10.0).item(), weight.grad.tolist()
        (5.0, [3.0, 4.0])
    """
    given = list_of(parameters)
    refuse_unfinished("clip_grad_norm_", given)
    norm = get_total_norm(parameters if isinstance(parameters, nn.Module) else given, group=group)
    if error_if_nonfinite and not norm.isfinite():
        raise UnsupportedError(
            expected="gradients of finite norm",
            received=f"a norm of {norm.item()}",
            remedy="find the gradient that is not finite, or pass error_if_nonfinite=False",
        )
    grads = [p.grad for p in given if p.grad is not None]
    local = [g.to_local() if is_dtensor(g) else g for g in grads]  # type: ignore[attr-defined]
    scale_by_norm(local, norm, max_norm)
    return norm


def list_of(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return a list of parameters from a model, one parameter or several."""
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
