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
from isobit.ops.gelu.op import gelu
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


def forward_offset_norm(
    module: Any, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute RMSNorm with the factor 1 + weight in fp32; with a residual, of the rounded sum."""
    stream = x if residual is None else plain_add(residual, x)
    found = rms_norm(stream, module.weight, module.variance_epsilon, offset=1.0)
    return found if residual is None else (found, stream)


def forward_geglu(module: Any, x: Tensor) -> Tensor:
    """Compute gelu(gate) · up; gelu(gate) is rounded first, as in the trainer, whose product is a composite's."""
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate.contiguous(), module.approximate) * up


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
    logits = logits[:, : module.org_vocab_size].contiguous()
    return logits if module.scale == 1.0 else logits * module.scale  # a power of two: exact


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
        size = cos.shape[-1]
        if size == self.head_size:
            return rotary(heads, cos, sin).view(x.shape)
        rotated = rotary(heads[..., :size], cos, sin)
        return torch.cat((rotated, heads[..., size:]), -1).view(x.shape)


def read_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return the inverse frequencies and the scaling of the one rotary embedding that transformers has for a config."""
    from transformers import AutoModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM builds models under the model's dtype
    try:
        with torch.device("meta"):  # without weights: only the class of one module is wanted
            made = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        found = [m for m in made.modules() if any("inv_freq" in name for name in m._buffers)]
        if len(found) != 1 or not hasattr(found[0], "inv_freq"):
            refuse(
                "one table of rotary frequencies for all layers",
                f"{len(found)} modules with frequencies in {type(made).__name__}"
                if len(found) != 1
                else f"{type(found[0]).__name__}, with one table for each kind of layer",
                "serve a model with one rotary embedding",
            )
        with torch.device("cpu"):
            angles = type(found[0])(config=config)
    finally:
        torch.set_default_dtype(before)
    return angles.inv_freq.float().cpu(), float(angles.attention_scaling)
