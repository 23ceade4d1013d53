"""The modules of isobit.nn: Embedding, Linear, RMSNorm, LayerNorm and SwiGLU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.embedding.op import embedding
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear_with_packed
from isobit.ops.linear.packed import Snapshot, WatchedWeight
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import accumulation_dtype
from isobit.ops.swiglu.op import swiglu
from isobit.order.samples import Samples

# isobit.nn.Embedding.


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


# isobit.nn.Linear.

PACKED = "_isobit_packed"  # on a frozen layer: its PackedWeight; None on a copy of one


class Linear(torch.nn.Linear):
    """torch.nn.Linear that computes isobit.linear.

    Example:
        >>> layer = isobit.nn.Linear(64, 32)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """

    @classmethod
    def sharing(cls, module: torch.nn.Linear) -> Linear:
        """Return a layer that shares the parameters of a torch.nn.Linear."""
        made = cls(module.in_features, module.out_features, bias=False, device="meta")
        made.weight = module.weight
        made.bias = module.bias
        return made.train(module.training)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.linear(input, weight, bias)."""
        read = read_weight(self)
        return linear_with_packed(input, read.weight, self.bias, samples, read.packed)


class WeightRead(NamedTuple):
    """What one call reads of a layer. The caller holds it until the call has ended.

    Attributes:
        weight: The layer's weight, or a frozen layer's snapshot of it.
        packed: Its packed form, or None.
        snapshot: Keeps the memory that the weight had, should another thread write it meanwhile.
    """

    weight: Tensor
    packed: Tensor | None = None
    snapshot: Snapshot | None = None


def read_weight(layer: torch.nn.Linear | torch.nn.Embedding) -> WeightRead:
    """Return what a call reads: the present snapshot of a frozen layer where no gradient is taken, else the weight."""
    weight = layer.weight
    watched: WatchedWeight | None = layer.__dict__.get(PACKED)
    # A compiled graph packs on the fly: it cannot check whether the weight was written. In training a form would be
    # packed at every step.
    if (
        watched is None
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and weight.requires_grad)
    ):
        return WeightRead(weight)
    snapshot = watched.current(weight)
    if snapshot is None:
        return WeightRead(watched.hold(weight))
    return WeightRead(snapshot.weight, snapshot.packed, snapshot)


# isobit.nn.RMSNorm and isobit.nn.LayerNorm.


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over one axis, with a weight, that computes isobit.rms_norm.

    Raises:
        ArgumentError: If normalized_shape has more than one axis, or elementwise_affine is False.

    Example:
        >>> norm = isobit.nn.RMSNorm(64)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(norm(x)[:1], norm(x[:1]))
        True
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        check_one_axis(self)

    def forward(self, x: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.rms_norm(x, weight, eps); an eps of None is that of the accumulation dtype, as in torch."""
        eps = torch.finfo(accumulation_dtype(x.dtype)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, samples=samples)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm over one axis, with a weight, that computes isobit.layer_norm.

    Raises:
        ArgumentError: If normalized_shape has more than one axis, or elementwise_affine is False.

    Example:
        >>> norm = isobit.nn.LayerNorm(64)
        >>> x = torch.randn(8, 64)
        >>> torch.equal(norm(x)[:1], norm(x[:1]))
        True
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_one_axis(self)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute isobit.layer_norm(input, weight, bias, eps)."""
        return layer_norm(input, self.weight, self.bias, self.eps, samples=samples)


def check_one_axis(norm: torch.nn.RMSNorm | torch.nn.LayerNorm) -> None:
    """Raise unless a norm has a weight of one axis."""
    if len(norm.normalized_shape) != 1 or not norm.elementwise_affine:
        raise ArgumentError(
            expected="a norm over the last axis with elementwise_affine=True",
            received=f"normalized_shape={norm.normalized_shape}, elementwise_affine={norm.elementwise_affine}",
            remedy="flatten the normalized axes into one; to train no weight, call norm.requires_grad_(False)",
        )


# isobit.nn.SwiGLU.


class SwiGLU(torch.nn.Module):
    """The gated feed-forward block of Llama: down_proj(silu(gate_proj(x)) * up_proj(x)).

    The gradient of x through gate_proj and up_proj is one sum: isobit.linear_group. Their forward hooks are not called
    while gradients are enabled.

    Args:
        in_features: The size of the input.
        hidden_features: The number of outputs of gate_proj and up_proj.
        out_features: The size of the output; by default in_features.
        bias: Whether the three layers have biases.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> block = isobit.nn.SwiGLU(16, 48)
        >>> sorted(block.state_dict())
        ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
        >>> x = torch.randn(8, 16)
        >>> torch.equal(block(x)[:1], block(x[:1]))
        True
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = Linear(in_features, hidden_features, **made)
        self.up_proj = Linear(in_features, hidden_features, **made)
        self.down_proj = Linear(hidden_features, out_features or in_features, **made)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Compute down_proj(silu(gate_proj(input)) * up_proj(input))."""
        layers = (self.gate_proj, self.up_proj)
        if torch.is_grad_enabled():
            weights, biases = [m.weight for m in layers], [m.bias for m in layers]
            gate, up = linear_group(input, weights, biases, samples=samples)
        else:  # the same bits, from packed weights if the layers are frozen
            gate, up = (layer(input, samples) for layer in layers)
        return self.down_proj(swiglu(gate, up), samples)  # type: ignore[no-any-return]
