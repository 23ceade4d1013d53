"""The parameters of one rank as they are compared: digests, dtypes, shapes, and whether they are finite."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from isobit import bits
from isobit.errors import ArgumentError
from isobit.parallel.tensor.shard import local_shard_of

DIGEST = 16  # bytes of BLAKE3; two different tensors have the same with a probability of 2^-128
Entry = tuple[str, str, list[int], str]  # shard, dtype, shape, digest


@dataclass(frozen=True)
class Replica:
    """The parameters of a rank.

    Attributes:
        tensors: Each parameter, or the rank's shard of it.
        table: What is compared of each.
        nonfinite: Parameters that have a NaN or an infinity.
        digest: The digest of the table.
    """

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Entry]
    nonfinite: tuple[str, ...]
    digest: str

    @classmethod
    def of(
        cls, named: Iterable[tuple[str, Tensor]], shards: Mapping[int, Any] | None = None
    ) -> Replica:
        """Read every parameter: its digest, and whether it is finite."""
        tensors: dict[str, Tensor] = {}
        table: dict[str, Entry] = {}
        for name, given in named:
            shard = local_shard_of(given, shards)
            tensor = shard.local.detach()
            if tensor.layout != torch.strided or tensor.is_meta or name in tensors:
                received = (
                    "named twice" if name in tensors else f"{tensor.layout} on {tensor.device}"
                )
                raise ArgumentError(
                    expected="dense tensors that are not on the meta device, each with a unique name",
                    received=f"{name!r}, {received}",
                    remedy="leave this tensor out",
                )
            tensors[name] = tensor
            table[name] = (shard.where, str(tensor.dtype), list(tensor.shape), bits.digest(tensor))
        if not tensors:
            raise ArgumentError(
                expected="a parameter",
                received="none",
                remedy="pass a model with parameters, or named tensors",
            )
        nonfinite = tuple(name for name, tensor in tensors.items() if not is_finite(tensor))
        return cls(
            tensors,
            table,
            nonfinite,
            blake3(json.dumps(table, sort_keys=True).encode()).hexdigest(length=DIGEST),
        )

    def wholes(self, name: str) -> Tensor:
        """Return the raw bits of a parameter as one integer per element."""
        return bits.as_integers(self.tensors[name]).reshape(-1)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity, from its minimum and maximum."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    extremes = (plain.float() if plain.element_size() == 1 else plain).aminmax()
    return all(bool(extreme.isfinite()) for extreme in extremes)
