"""What a run leaves, unsplit whatever its layout: losses, norms, and digests of weights, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isobit import bits
from isobit.parallel.collectives.rank_group import is_first_rank
from isobit.parallel.tensor.shard import gather_shards, owner_of, shard_table


@dataclass(frozen=True)
class Curve:
    """A run's result, the same for every layout or the promise is broken."""

    losses: tuple[float, ...]  # of every step, fp32
    norms: tuple[float, ...]  # of the gradients before clipping, fp32
    weights: str
    gradients: str  # of the last step
    optimizer: str
    finite: bool  # every number of the three
    changed: bool  # the weights, against those it began with
    parameters: int

    @classmethod
    def read(cls, said: dict[str, Any]) -> Curve:
        """From a JSON record of its fields."""
        plain: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in said.items()
        }
        return cls(**plain)

    @property
    def digest(self) -> str:
        """All of it in one."""
        said = repr((self.losses, self.norms, self.weights, self.gradients, self.optimizer))
        return blake3(said.encode()).hexdigest()[:16]


def read_curve(run: Any, first: str) -> Curve | None:
    """The curve on rank 0, None elsewhere; every rank calls this. Unsplit tensors are held one at a time."""
    optimizer = run.optimizer
    sought: dict[str, Callable[[Tensor], Tensor | None]] = {
        "weights": lambda p: p,
        "gradients": lambda p: p.grad,
        "exp_avg": lambda p: optimizer.state[p].get("exp_avg"),
        "exp_avg_sq": lambda p: optimizer.state[p].get("exp_avg_sq"),
    }
    found = {kind: digest_of(run.model, read) for kind, read in sought.items()}
    if not is_first_rank():
        return None
    steps = {float(state["step"]) for state in optimizer.state.values()}
    moments = f"{found['exp_avg'].hex} {found['exp_avg_sq'].hex} {sorted(steps)}"
    numbers = torch.tensor([*run.losses, *run.norms])
    return Curve(
        tuple(run.losses),
        tuple(run.norms),
        found["weights"].hex,
        found["gradients"].hex,
        blake3(moments.encode()).hexdigest()[:32],
        all(each.finite for each in found.values()) and bool(numbers.isfinite().all()),
        found["weights"].hex != first,
        found["weights"].elements,
    )


@dataclass(frozen=True)
class Digest:
    """Of one tensor a parameter, by the parameters' full names."""

    hex: str
    finite: bool
    elements: int


@torch.no_grad()
def digest_of(model: nn.Module, read: Callable[[Tensor], Tensor | None] = lambda p: p) -> Digest:
    """On rank 0; the other ranks bring their shards."""
    hasher, finite, elements = blake3(), True, 0
    shards, hashes = shard_table(model), is_first_rank()
    for name, parameter in sorted(model.named_parameters()):
        whole: Any = read(parameter)
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        elif whole is not None and name in shards:
            whole = gather_shards(whole, shards[name], owner_of(model, name))
        if hashes and whole is not None:
            hasher.update(f"{name}: {bits.digest(whole)}".encode())
            finite = finite and bool(whole.isfinite().all())
            elements += whole.numel()
    return Digest(hasher.hexdigest()[:32], finite, elements)
