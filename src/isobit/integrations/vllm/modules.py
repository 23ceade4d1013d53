"""Forward functions of the modules of vLLM's decoders, computed with isobit's operators and the trainer's roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.transformers.parts.rotary import extend_angles
from isobit.integrations.transformers.residual import plain_add
from isobit.integrations.vllm.refusals import refuse
from isobit.integrations.vllm.weights import PackedLinear
from isobit.ops.embedding.op import embedding
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.rotary.op import rotary
from isobit.ops.swiglu.op import swiglu


def forward_norm(
    module: Any, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute RMSNorm; with a residual, of the sum after it was rounded, as the trainer does and vLLM does not."""
    if residual is None:
        return rms_norm(x, module.weight, module.variance_epsilon)
    stream = plain_add(residual, x)
    return rms_norm(stream, module.weight, module.variance_epsilon), stream


def forward_swiglu(module: Any, x: Tensor) -> Tensor:
    """Compute silu(gate) · up in fp32 with one rounding; vLLM rounds silu(gate) first."""
    gate, up = x.chunk(2, dim=-1)
    return swiglu(gate, up)


def forward_embedding(module: Any, ids: Tensor) -> Tensor:
    """Look up rows of the table, without those that vLLM adds as padding."""
    return embedding(ids.long(), module.weight[: module.org_vocab_size])


def forward_logits(
    module: Any,
    packed: PackedLinear,
    head: Any,
    hidden: Tensor,
    embedding_bias: Tensor | None = None,
    skip_gather: bool = False,
) -> Tensor:
    """Return logits [rows, V] in fp32 without rounding them; V is the model's, without vLLM's padding."""
    if embedding_bias is not None:
        refuse("a head without bias", "an embedding bias", "serve a model without one")
    logits = packed.compute_fp32(hidden, head.weight)  # columns do not depend on one another
    return logits[:, : module.org_vocab_size].contiguous()


class OrderedRotary(nn.Module):
    """The rotary embedding with the trainer's table: cos and sin in fp32, extended in blocks of positions.

    vLLM rounds its table to the model's dtype, and shares it among the models of a process.
    """

    def __init__(self, frequencies: Tensor, scaling: float, head_size: int) -> None:
        super().__init__()
        self.head_size, self.scaling = head_size, scaling
        self._frequencies = frequencies
        self._angles = torch.empty(2, 0, 2 * len(frequencies), dtype=torch.float32)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key [rows, heads · head_size] by the angles of their positions."""
        rows = int(positions.max()) + 1 if positions.numel() else 0
        if self._angles.shape[1] < rows:
            self._angles = extend_angles(self._angles, self._frequencies, self.scaling, rows)
        cos, sin = self._angles[:, positions].unbind(0)
        rotated = self._rotate(query, cos, sin)
        return rotated, None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, self.head_size)
        return rotary(heads, cos, sin).view(x.shape)


def read_frequencies(family: str, config: Any) -> tuple[Tensor, float]:
    """Return the inverse frequencies and the scaling that transformers computes for this configuration."""
    from importlib import import_module

    home = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM builds models under the model's dtype
    try:
        made = getattr(home, f"{family}RotaryEmbedding")(config=config)
    finally:
        torch.set_default_dtype(before)
    return made.inv_freq.float().cpu(), float(made.attention_scaling)
