"""Whole tensors of a checkpoint: a verdict on a derived tensor needs more than one pass over it."""

from __future__ import annotations

import torch

from isobit.comparing.checkpoints.names import Side
from isobit.comparing.tensor_files import Checkpoint, unreadable


class Loader:
    """Loads sides of comparisons; keeps the tensor that it loaded last, which the next slice may need."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load tensors of one checkpoint."""
        self.checkpoint = checkpoint
        self.last: tuple[str, torch.Tensor] | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """Return a stored tensor."""
        if self.last is None or self.last[0] != name:
            self.last = None  # frees it before the next one is read
            self.last = (name, self.checkpoint.tensors[name].load())
        return self.last[1]

    def side(self, side: Side) -> torch.Tensor:
        """Return the pieces of a side, put together."""
        found = []
        for piece in side.pieces:
            tensor = self.tensor(piece.name)
            if piece.start is not None and piece.stop is not None:
                tensor = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
            found.append(tensor)
        if len(found) == 1:
            return found[0]
        if len({one.dtype for one in found}) > 1:  # as bits they cannot be put together
            raise unreadable(self.checkpoint.path, "shards of one dtype", f"several for {side}")
        return torch.cat(found, side.dim)
