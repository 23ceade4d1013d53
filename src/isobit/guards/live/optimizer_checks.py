"""Checks of an optimizer that need no step: which parameters it has, and what its state is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from isobit import bits
from isobit.errors import ArgumentError
from isobit.guards.live.comparison import is_finite
from isobit.parallel.tensor.shard import is_dtensor, local_shard_of

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


# Norms of many tensors in one pass, and which of them are not finite.

SAMPLED = 4  # gradients that are looked at in a step that does not read all
SAMPLED_ELEMENTS = 2**12  # of each
NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a gradient or parameter: the local shard, the values of a sparse tensor."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the 2-norm of each tensor's local part, read from the device at once.

    Args:
        tensors: Of any devices and dtypes. Norms of 16-bit tensors are computed in fp32.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    parts = [local_part(tensor) for tensor in tensors]
    for at, part in enumerate(parts):
        groups.setdefault((part.device, part.dtype), []).append(at)
    found = [0.0] * len(parts)
    for (_, dtype), places in groups.items():
        if dtype not in NORM_DTYPES:  # complex and 8 bits
            plain = [parts[at].abs() if dtype.is_complex else parts[at].float() for at in places]
            norms = [torch.linalg.vector_norm(part) for part in plain]
        else:
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            norms = list(torch._foreach_norm([parts[at] for at in places], 2, dtype=wide))
        for at, norm in zip(places, torch.stack(norms).tolist(), strict=True):
            found[at] = norm
    return found


def spread_sample(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a few parameters, evenly spread over the model. Their gradients are dense."""
    dense = [p for p in parameters if p.grad is not None and p.grad.layout == torch.strided]
    stride = max(1, -(-len(dense) // SAMPLED))
    return dense[::stride]


def is_sample_finite(parameters: Sequence[Tensor]) -> bool:
    """Return whether the first elements of these parameters' gradients are finite.

    Args:
        parameters: At most SAMPLED; those without a gradient are passed over.
    """
    parts = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        part = grad if type(grad) is Tensor else local_part(grad)
        parts.append(
            part if part.numel() <= SAMPLED_ELEMENTS else part.reshape(-1)[:SAMPLED_ELEMENTS]
        )
    # A sum that is not finite may be an overflow: the caller then reads everything.
    return all(map(math.isfinite, norms_of(parts)))


def nonfinite_places(tensors: Sequence[Tensor], norms: Sequence[float]) -> list[int]:
    """Return which tensors are not finite. A norm can overflow while its tensor is finite, so those are read again."""
    return [
        at
        for at, norm in enumerate(norms)
        if not math.isfinite(norm) and not is_finite(local_part(tensors[at]))
    ]


def wide_norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the same norms in fp64, for finite tensors whose squares overflow fp32: a gradient of 1e35 has a norm."""
    return [float(torch.linalg.vector_norm(local_part(t), dtype=torch.float64)) for t in tensors]


def total_of(norms: Sequence[float]) -> float:
    """Return the norm of all tensors together."""
    return math.hypot(*norms) if norms else 0.0


def describe_nonfinite(tensor: Tensor) -> str:
    """Return how many elements are not finite, and the first of them."""
    part = local_part(tensor)
    wrong = ~part.isfinite()
    first = wrong.reshape(-1).nonzero()[0, 0]
    index = [int(i) for i in torch.unravel_index(first, part.shape)] if part.ndim else []
    value = part.reshape(-1)[first].item()
    return (
        f"{int(wrong.sum())} of {part.numel()} elements are not finite, first at {index}: {value}"
    )


# How far a step moves the weights, measured on a sample of them.

MOST = (
    2**22
)  # elements that are copied before a sampled step: 16 MB in fp32, whatever the size of the model


@dataclass(frozen=True)
class Part:
    """The first elements of a parameter, before a step."""

    name: str
    parameter: Tensor
    before: Tensor
    has_gradient: bool


class UpdateSample:
    """Copies parameters before a step, up to MOST elements, and compares them after it.

    Args:
        named: Names, parameters, and whether the learning rate of their group is above zero.
        start: The parameter to start with; a later sample starts where this one ended, at `self.end`.
        least: The norm up to which a gradient is taken for rounding errors, which move nothing.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor, bool]], start: int = 0, least: float = 0.0
    ) -> None:
        self.parts: list[Part] = []
        left, self.end = MOST, start
        for offset in range(len(named)):
            at = (start + offset) % len(named)
            name, parameter, moves = named[at]
            if left <= 0:
                break
            whole = local_part(parameter).reshape(-1)
            flat = whole[:left]
            grad = parameter.grad
            given = False
            if grad is not None and moves and not grad.is_sparse:
                given = float(local_part(grad).reshape(-1)[:left].float().norm()) > least
            self.parts.append(Part(name, parameter, flat.clone(), given))
            left -= flat.numel()
            self.end = (at + 1) % len(named)

    @torch.no_grad()
    def compare(self) -> tuple[float, list[str]]:
        """Return ‖change‖ / ‖weights‖, and the parameters that have a gradient and did not change."""
        moved = weight = 0.0
        still = []
        for part in self.parts:
            now = local_part(part.parameter).reshape(-1)[: part.before.numel()]
            moved += float((now.double() - part.before.double()).square().sum())
            weight += float(part.before.double().square().sum())
            if part.has_gradient and bits.equal(now, part.before):
                still.append(part.name)
        return (math.sqrt(moved / weight) if weight else 0.0), still
