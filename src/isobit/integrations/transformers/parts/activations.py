"""Activations that isobit computes, and dropout by a key."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.dropout import drop_by_layout
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.package import library
from isobit.ops.gelu.op import gelu
from isobit.ops.silu.op import silu


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
