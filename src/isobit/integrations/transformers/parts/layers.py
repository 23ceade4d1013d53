"""Small layers: norms, activations, dropout by a key, and the embedding of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.dropout import drop_by_layout
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import check_embedding
from isobit.nn.linear import read_weight
from isobit.ops.embedding.op import embedding
from isobit.ops.gelu.op import gelu
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.silu.op import silu
from isobit.parallel.tensor.head_norm import head_norm
from isobit.parallel.tensor.shard import tp_group_of
from isobit.parallel.tensor.vocab import vocab_embedding

# Norms: RMSNorm with and without a weight or an offset of its weight, and LayerNorm; of rows, and of heads.


@dataclass(frozen=True)
class NormFormula:
    """The formula of a norm. Names are those of the module's attributes.

    rms: x / sqrt(mean(x²) + eps) · (offset + weight); layer: the same of x − mean(x), plus bias.
    """

    kind: str = "rms"  # or layer
    eps: str | float = "eps"
    weight: str | None = "weight"
    bias: str | None = None
    offset: float = 0.0

    def epsilon(self, module: Any) -> float:
        """Return eps of a module."""
        return self.eps if isinstance(self.eps, float) else float(getattr(module, self.eps))

    def __str__(self) -> str:
        centred = "x" if self.kind == "rms" else "(x − mean)"
        square = "x²" if self.kind == "rms" else "(x − mean)²"
        eps = self.eps if isinstance(self.eps, str) else f"{self.eps:g}"
        text = f"{centred} / sqrt(mean({square}) + {eps})"
        if self.weight is not None:
            text += f" · ({self.offset:g} + {self.weight})" if self.offset else f" · {self.weight}"
        return text + ("" if self.bias is None else f" + {self.bias}")


def forward_norm(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Compute a norm of rows [B, T, n], or of heads: [B, T, H, n] or its transpose [B, H, T, n]."""
    if x.dim() == 4:
        rows, swapped = tokens_first(x)
        found = norm_of_heads(formula, module, rows)
        return found.transpose(1, 2) if swapped else found
    samples, eps = current_layout().samples, formula.epsilon(module)
    if formula.kind == "layer":
        bias = None if formula.bias is None else getattr(module, formula.bias)
        return layer_norm(x, weight_of(formula, module, x), bias, eps, samples=samples)
    weight = weight_of(formula, module, x)
    return rms_norm(x, weight, eps, samples=samples, offset=formula.offset)


def norm_of_heads(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Compute RMSNorm of each head, [B, T, H, n]; the weight's gradient also sums over heads."""
    if formula.kind == "layer":
        refuse_layer_norm_of_heads(f"{list(x.shape)}, in a module of type {type(module).__name__}")
    samples, tp_group, eps = current_layout().samples, tp_group_of(module), formula.epsilon(module)
    if tp_group is not None:
        return head_norm(x, module.weight, eps, tp_group=tp_group, samples=samples)
    weight = weight_of(formula, module, x)
    return rms_norm(x, weight, eps, samples=samples, heads=True, offset=formula.offset)


def refuse_layer_norm_of_heads(where: str) -> NoReturn:
    """Raise: isobit.layer_norm has no sum over heads for its weight."""
    raise UnsupportedError(
        expected="LayerNorm of rows, [batch, tokens, features]",
        received=f"LayerNorm of heads: {where}",
        remedy="isobit.layer_norm has no sum over heads for its weight; RMSNorm of heads is supported",
    )


def weight_of(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Return the weight; ones where a norm has none."""
    if formula.weight is None:
        return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    weight: Tensor = getattr(module, formula.weight)
    return weight


def tokens_first(x: Tensor) -> tuple[Tensor, bool]:
    """Return heads as [B, T, H, n], and whether x was [B, H, T, n].

    Where there are as many heads as tokens, the strides tell: heads are made by a view of [B, T, H · n].
    """
    width = current_layout().positions.shape[1]
    swapped = x.shape[2] == width and (x.shape[1] != width or x.stride(1) < x.stride(2))
    return (x.transpose(1, 2).contiguous(), True) if swapped else (x, False)


# Activations that isobit computes, and dropout by a key.


def forward_silu(module: nn.Module, x: Tensor) -> Tensor:
    return silu(x)


def forward_gelu(approximate: str, module: nn.Module, x: Tensor) -> Tensor:
    return gelu(x, approximate)


def forward_dropout(name: str, module: Any, x: Tensor) -> Tensor:
    """Drop elements of the rows of a call by their key; see [Note: the key of a mask]."""
    if not (module.training and module.p):
        return x
    layout = current_layout()
    if x.shape[:-1] != layout.positions.shape:
        refuse_dropout(f"dropout of {module.p} in training, in {name}, of {tuple(x.shape)}")
    return drop_by_layout(layout, x, module.p, name)


def refuse_dropout(received: str) -> None:
    """Raise for dropout that is no module of its own: which elements it drops would depend on the batch."""
    raise UnsupportedError(
        expected="a model without dropout, but for modules of type torch.nn.Dropout over rows [B, T, channels]",
        received=received,
        remedy="set the dropout in the model's config to 0 (attention_dropout, residual_dropout, …), or call "
        "model.eval()",
    )


def kind_of_activation(module: nn.Module) -> str | None:
    """Return silu, gelu or gelu_tanh, by the class of torch or transformers; None for other modules."""
    known, kind = library("activations"), type(module)
    if kind in (nn.SiLU, known.SiLUActivation):
        return "silu"
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if kind in (known.GELUTanh, known.NewGELUActivation):
        return "gelu_tanh"
    return "gelu" if kind is known.GELUActivation else None


# The embedding of token ids, with a scale where the model has one.


def forward_embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up rows of the table; their gradient is a sum over the samples' tokens."""
    check_embedding("the embedding", module)
    samples, tp_group = current_layout().samples, tp_group_of(module)
    if tp_group is not None:
        return vocab_embedding(
            ids, module.weight, tp_group=tp_group, samples=samples, padding_idx=module.padding_idx
        )
    read = read_weight(module)
    return embedding(ids, read.weight, samples=samples, padding_idx=module.padding_idx)


def forward_scaled_embedding(scale: str, module: Any, ids: Tensor) -> Tensor:
    """Look up rows, and multiply them by the module's tensor of that name, rounded to their dtype."""
    rows = forward_embedding(module, ids)
    factor: Tensor = getattr(module, scale)
    return rows * factor.to(module.weight.dtype)
