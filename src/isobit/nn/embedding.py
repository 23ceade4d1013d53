"""isobit.nn.Embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.embedding.op import embedding
from isobit.order.samples import Samples


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding with a dense gradient that does not depend on batch layout: isobit.embedding.

    Raises:
        ArgumentError: If max_norm, scale_grad_by_freq or sparse is set.

    Example:
        >>> table = isobit.nn.Embedding(10, 4)
        >>> table(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 4])
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **options)
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise ArgumentError(
                expected="an embedding without max_norm, scale_grad_by_freq and sparse",
                received=f"max_norm={self.max_norm}, scale_grad_by_freq={self.scale_grad_by_freq}, "
                f"sparse={self.sparse}",
                remedy="leave them out, or use torch.nn.Embedding",
            )

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Look up the rows of ids `input`."""
        return embedding(input, self.weight, samples=samples, padding_idx=self.padding_idx)
