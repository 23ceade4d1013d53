"""Formulas that a user's class can be registered with, each compared with the class's own forward before it is used."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError
from isobit.integrations.transformers.parts import composites, layers, linear, rotary
from isobit.integrations.transformers.parts.layers import NormFormula
from isobit.integrations.transformers.parts.part import Part
from isobit.integrations.transformers.parts.probing import compare_norm, largest_difference
from isobit.integrations.transformers.parts.registry import Formula

ROWS = 6  # of the input that a formula is compared on
LOOSE = 1e-5  # for formulas with products, whose sums have other orders


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy with stock forwards, on the CPU in fp32."""
    twin = copy.deepcopy(module).to("cpu").float().eval()
    for inner in twin.modules():
        inner.__dict__.pop("forward", None)
    return twin


def drawn(*shape: int) -> Tensor:
    """Return normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


class Norm(Formula):
    """RMSNorm or LayerNorm."""

    name = "norm"

    def __init__(self, formula: NormFormula) -> None:
        super().__init__()
        self.formula, self.text = formula, str(formula)

    def make(self, module: nn.Module) -> Part:
        return Part("norm", layers.forward_norm, (self.formula,), "registered", shipped=False)

    def difference(self, module: nn.Module) -> float:
        return compare_norm(module, self.formula)


class Linear(Formula):
    """A subclass of torch.nn.Linear."""

    name, text, tolerance = "linear", "x · weightᵀ + bias", LOOSE

    def make(self, module: nn.Module) -> Part:
        return Part("linear", linear.forward_linear, (None,), "registered", shipped=False)

    @torch.no_grad()
    def difference(self, module: nn.Module) -> float:
        twin: Any = twin_of(module)
        x = drawn(ROWS, twin.weight.shape[1])
        return largest_difference(twin(x), nn.functional.linear(x, twin.weight, twin.bias))


class Embedding(Formula):
    """A subclass of torch.nn.Embedding, whose rows may be scaled."""

    name = "embedding"

    def __init__(self, scale: str | None) -> None:
        super().__init__()
        self.scale = scale
        self.text = "weight[ids]" + ("" if scale is None else f" · {scale}")

    def make(self, module: nn.Module) -> Part:
        if self.scale is None:
            return Part("embedding", layers.forward_embedding, (), "registered", shipped=False)
        forward = layers.forward_scaled_embedding
        return Part("embedding", forward, (self.scale,), "registered", shipped=False)

    @torch.no_grad()
    def difference(self, module: nn.Module) -> float:
        twin: Any = twin_of(module)
        ids = torch.arange(ROWS)[None] % len(twin.weight)
        wanted = twin.weight[ids]
        if self.scale is not None:
            wanted = wanted * getattr(twin, self.scale)
        return largest_difference(twin(ids), wanted)


class RotaryEmbedding(Formula):
    """cos and sin of position · inv_freq, for both halves of a head, times attention_scaling."""

    name, text = (
        "rotary embedding",
        "cos and sin of position · inv_freq, twice, · attention_scaling",
    )
    tolerance = LOOSE

    def make(self, module: nn.Module) -> Part:
        return Part("rotary embedding", rotary.forward_rotary, (), "registered", shipped=False)

    @torch.no_grad()
    def difference(self, module: nn.Module) -> float:
        twin: Any = twin_of(module)
        places = torch.arange(3 * ROWS)[None]
        found = twin(drawn(1, 3 * ROWS, 4), places)
        wanted = rotary.forward_rotary(twin, drawn(1, 3 * ROWS, 4), places)
        return max(largest_difference(a, b) for a, b in zip(found, wanted, strict=True))


class GatedMlp(Formula):
    """down(silu(gate(x)) · up(x))."""

    name, tolerance = "gated MLP", LOOSE

    def __init__(self, gate: str, up: str, down: str) -> None:
        super().__init__()
        self.names = gate, up, down
        self.text = f"{down}(silu({gate}(x)) · {up}(x))"

    def make(self, module: nn.Module) -> Part:
        forward = linear.forward_named_swiglu
        inside = tuple(name for name, child in module.named_children() if name not in self.names)
        return Part("gated MLP", forward, self.names, "registered", shipped=False, inside=inside)

    @torch.no_grad()
    def difference(self, module: nn.Module) -> float:
        twin: Any = twin_of(module)
        gate, up, down = (getattr(twin, name) for name in self.names)
        x = drawn(1, ROWS, gate.weight.shape[1])
        return largest_difference(twin(x), down(nn.functional.silu(gate(x)) * up(x)))


class Elementwise(Formula):
    """Each element by itself, or a move of data: it runs as it is, and strict mode watches it."""

    name = "elementwise"

    def make(self, module: nn.Module) -> Part:
        return Part("elementwise", None, (), "registered", shipped=False)


class Composite(Formula):
    """Calls of children and moves of data: it runs its own code, and strict mode watches it."""

    name = "composite"

    def make(self, module: nn.Module) -> Part:
        return Part("composite", composites.forward_composite, (), "registered", shipped=False)


class HeadFormula(Formula):
    """Logits of lm_head, divided or multiplied by a number of the config or of the model."""

    name = "head"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


# ---- public -----------------------------------------------------------------------------------------------------


def rms_norm(eps: str | float = "eps", weight: str | None = "weight", offset: float = 0.0) -> Norm:
    """Describe x / sqrt(mean(x²) + eps) · (offset + weight), for `isobit.parts.register`.

    Args:
        eps: The attribute that is eps, or its value.
        weight: The attribute that is the weight; None for a norm without one.
        offset: Added to the weight: 1.0 where weights start at zero.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.rms_norm(eps="epsilon", offset=1.0).text)
        x / sqrt(mean(x²) + epsilon) · (1 + weight)
    """
    return Norm(NormFormula("rms", eps, weight, None, offset))


def layer_norm(eps: str | float = "eps", weight: str = "weight", bias: str | None = "bias") -> Norm:
    """Describe (x − mean) / sqrt(mean((x − mean)²) + eps) · weight + bias, for `isobit.parts.register`.

    Args:
        eps: The attribute that is eps, or its value.
        weight: The attribute that is the weight.
        bias: The attribute that is the bias; None for a norm without one.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.layer_norm(bias=None).text)
        (x − mean) / sqrt(mean((x − mean)²) + eps) · weight
    """
    return Norm(NormFormula("layer", eps, weight, bias))


# Named `linear_layer`, so that `isobit.linear` stays the operator's name.
def linear_layer() -> Linear:
    """Describe x · weightᵀ + bias of a subclass of torch.nn.Linear, for `isobit.parts.register`.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.linear_layer().text)
        x · weightᵀ + bias
    """
    return Linear()


def token_embedding(scale: str | None = None) -> Embedding:
    """Describe the rows of a subclass of torch.nn.Embedding, for `isobit.parts.register`.

    Args:
        scale: The attribute, a tensor, that rows are multiplied by; None if they are not.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.token_embedding(scale="embed_scale").text)
        weight[ids] · embed_scale
    """
    return Embedding(scale)


def rotary_embedding() -> RotaryEmbedding:
    """Describe a table of cosines and sines, forward(x, position_ids), for `isobit.parts.register`.

    The module has `inv_freq` and `attention_scaling`, and its values are those of both halves of a head.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.rotary_embedding().text)
        cos and sin of position · inv_freq, twice, · attention_scaling
    """
    return RotaryEmbedding()


def swiglu_mlp(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> GatedMlp:
    """Describe down(silu(gate(x)) · up(x)), for `isobit.parts.register`.

    Args:
        gate: The child whose output goes through silu.
        up: The child whose output it is multiplied by.
        down: The child that is applied to the product.

    Returns:
        The formula.

    Example:
        >>> print(isobit.parts.swiglu_mlp("w1", "w3", "w2").text)
        w2(silu(w1(x)) · w3(x))
    """
    return GatedMlp(gate, up, down)


def elementwise() -> Elementwise:
    """Describe a module that computes each element by itself, for `isobit.parts.register`: it runs as it is.

    Returns:
        The formula. Strict mode raises if the module adds numbers after all.

    Example:
        >>> print(isobit.parts.elementwise().name)
        elementwise
    """
    return Elementwise()


def composite() -> Composite:
    """Describe a module that only calls other modules and moves data, for `isobit.parts.register`: it runs as it is.

    Returns:
        The formula. Strict mode raises if the module adds numbers after all.

    Example:
        >>> print(isobit.parts.composite().name)
        composite
    """
    return Composite()


def head(kind: str = "plain") -> HeadFormula:
    """Describe how a model's forward computes logits from those of `lm_head`, for `isobit.parts.register`.

    Args:
        kind: "plain"; "divided" by config.logits_scaling; or "multiplied" by the model's logit_scale.

    Returns:
        The formula.

    Raises:
        ArgumentError: If there is no such kind.

    Example:
        >>> print(isobit.parts.head("divided").kind)
        divided
    """
    if kind not in ("plain", "divided", "multiplied"):
        raise ArgumentError(
            expected='a kind of head: "plain", "divided" or "multiplied"',
            received=repr(kind),
            remedy="a head that computes anything else is not supported: enable the backbone alone",
        )
    return HeadFormula(kind)
