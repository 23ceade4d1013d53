"""Checks of an optimizer that need no step: which parameters it has, and what its state is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from isobit import bits
from isobit.errors import ArgumentError
from isobit.parallel.tensor.shard import local_shard_of

SHOWN = 4
# Means or sums of squares in the states of torch's optimizers, which are never negative.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's wrapper.

    Raises:
        ArgumentError: If it is no optimizer.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            expected="a torch.optim.Optimizer",
            received=type(optimizer).__name__,
            remedy="pass the optimizer whose step updates the model",
        )
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of every group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def name_some(names: list[str]) -> str:
    """Return the first names of a list, and how many there are more."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_identity(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[torch.optim.Optimizer] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield a rule, severity and sentence where the optimizer's parameters are not the model's.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer.
        others: Optimizers that train the rest of the model.
    """
    named = {id(p): name for name, p in model.named_parameters()}
    held = {id(p) for p in parameters_of(optimizer)}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained = held | {id(p) for other in others for p in parameters_of(other)}
    missing = [name for name, p in trainable if id(p) not in trained]
    if not trainable:
        yield "nothing-trainable", "error", f"none of {len(named)} parameters requires a gradient"
    elif not any(id(p) in held for _, p in trainable):
        yield (
            "not-in-optimizer",
            "error",
            f"the optimizer has none of the model's {len(trainable)} trainable parameters: it was created with "
            "other tensors, or parameters were replaced since",
        )
    elif missing:
        yield (
            "not-in-optimizer",
            "warning",
            f"{len(missing)} of {len(trainable)} trainable parameters are "
            f"{'in no optimizer' if others else 'not in the optimizer'}: {name_some(missing)}",
        )
    strangers = len(held - set(named))
    if strangers and any(id(p) in held for _, p in trainable):
        yield (
            "not-in-model",
            "warning",
            f"{strangers} of {len(held)} tensors in the optimizer are not parameters of the model",
        )


def check_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, str]]:
    """Yield a parameter and a sentence for each state that is not zero before the first step.

    A state whose `step` is above zero is that of a resumed run; `state_digest` compares such a one with its checkpoint.

    Args:
        optimizer: The optimizer, before its first step.
        names: Parameters by id.
    """
    for parameter, state in optimizer.state.items():
        if float(state.get("step", 0)) > 0:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and bool(local_shard_of(value).local.count_nonzero()):
                name = names.get(id(parameter), "a parameter outside the model")
                yield name, f"{key} is not zero before the first step"
                break


def check_running_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield a rule, a parameter and a sentence for state that no right step leaves.

    A state that is not finite makes every later step so; a negative mean of squares has no square root, and shows that
    something else wrote into it.

    Args:
        optimizer: The optimizer, after a step. Of sharded state, this rank's shards are read.
        names: Parameters by id.
    """
    held = [
        (
            names.get(id(parameter), "a parameter outside the model"),
            key,
            local_shard_of(value).local,
        )
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
    ]
    held = [(name, key, part) for name, key, part in held if part.numel()]
    ends = [torch.aminmax(part.detach()) for _, _, part in held]
    lowest, highest = (read_together([pair[at] for pair in ends]) for at in (0, 1))
    for (name, key, _), low, high in zip(held, lowest, highest, strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            yield (
                "state-nonfinite",
                name,
                f"{key} of the optimizer is not finite: from {low} to {high}",
            )
        elif key in SQUARES and low < 0:
            yield (
                "state-negative",
                name,
                f"{key} of the optimizer, a mean of squares, is {low:.6g} somewhere",
            )


def read_together(numbers: Sequence[Tensor]) -> list[float]:
    """Return tensors of one number each as numbers; those of one device are read at once."""
    if len({number.device for number in numbers}) == 1:
        return [float(each) for each in torch.stack([n.double() for n in numbers]).tolist()]
    return [float(number) for number in numbers]


def weights_that_differ(model: nn.Module, saved: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence if tensors of a checkpoint are not in the model bit for bit.

    Tensors that only one of the two has are not compared: a new head is drawn, an old one is left out.

    Args:
        model: The model, before its first step.
        saved: Tensors by name, such as a state dict.
    """
    held = model.state_dict()
    common = [name for name in saved if name in held]
    if not common:
        yield f"none of the {len(saved)} tensors of the checkpoint has a name of the model"
    wrong = [
        name
        for name in common
        if not bits.equal(
            local_shard_of(held[name]).local.cpu(), local_shard_of(saved[name]).local.cpu()
        )
    ]
    if wrong:
        yield (
            f"{len(wrong)} of {len(common)} tensors of the checkpoint have other bits in the model, so that they were "
            f"not loaded or were written since: {name_some(wrong)}"
        )


def state_digest(optimizer: Any) -> str:
    """Return a digest of an optimizer's state and hyperparameters, to compare a resumed run with its checkpoint.

    Args:
        optimizer: An optimizer. Of sharded state, this rank's shards are read.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> from isobit.guards import state_digest
        >>> def make():
        ...     return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        >>> a, b = make(), make()
        >>> a.param_groups[0]["params"][0].sum().backward()
        >>> a.step()
        >>> state_digest(a) == state_digest(b)
        False
        >>> b.load_state_dict(a.state_dict())
        >>> state_digest(a) == state_digest(b)
        True
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            local = local_shard_of(value)
            return [
                str(value.dtype),
                list(value.shape),
                local.where,
                bits.digest(local.local.cpu()),
            ]
        return repr(value)

    held = unwrapped_optimizer(optimizer).state_dict()
    states = {
        str(at): {name: plain(value) for name, value in sorted(state.items())}
        for at, state in held["state"].items()
    }
    groups = [
        {name: plain(value) for name, value in sorted(group.items())}
        for group in held["param_groups"]
    ]
    text = json.dumps([states, groups], sort_keys=True)
    return blake3(text.encode()).hexdigest()
