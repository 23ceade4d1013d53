"""The result of a training run: losses, norms, and digests of weights, gradients and optimizer.

Digests are of the unsplit tensors, so runs in different layouts can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isobit import bits
from isobit.parallel.collectives.levels import is_first_rank
from isobit.parallel.tensor.shard import gather_shards, owner_of, shard_table


@dataclass(frozen=True)
class Curve:
    """The result of a run, which must be the same in every layout."""

    losses: tuple[float, ...]  # per step, fp32
    norms: tuple[float, ...]  # per step, of the gradients before clipping, fp32
    weights: str
    gradients: str  # of the last step
    optimizer: str
    finite: bool  # whether all losses, norms, weights, gradients and moments are finite
    changed: bool  # whether the weights differ from the initial ones
    parameters: int  # elements of all weights

    @classmethod
    def read(cls, record: dict[str, Any]) -> Curve:
        """Read a curve from a JSON record of its fields."""
        plain: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in record.items()
        }
        return cls(**plain)

    @property
    def digest(self) -> str:
        """A digest of everything."""
        everything = repr((self.losses, self.norms, self.weights, self.gradients, self.optimizer))
        return blake3(everything.encode()).hexdigest()[:16]


def read_curve(run: Any, first: str) -> Curve | None:
    """Return the curve on rank 0 and None elsewhere; every rank calls this.

    Args:
        run: A finished run, of isobit or stock.
        first: The digest of the initial weights.
    """
    optimizer = run.optimizer
    readers: dict[str, Callable[[Tensor], Tensor | None]] = {
        "weights": lambda p: p,
        "gradients": lambda p: p.grad,
        "exp_avg": lambda p: optimizer.state[p].get("exp_avg"),
        "exp_avg_sq": lambda p: optimizer.state[p].get("exp_avg_sq"),
    }
    found = {kind: digest_of(run.model, read) for kind, read in readers.items()}
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
    """A digest over one tensor per parameter, in the order of full names."""

    hex: str
    finite: bool
    elements: int


@torch.no_grad()
def digest_of(model: nn.Module, read: Callable[[Tensor], Tensor | None] = lambda p: p) -> Digest:
    """Return the digest on rank 0; the other ranks contribute their shards.

    Unsplit tensors are gathered one at a time, to save memory.
    """
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
