"""Planted norms, activations, routers and other layers that depend on the samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isobit.auditing.records import ERROR
from isobit.library.audit.plants import products
from isobit.library.audit.plants.plant import (
    Net,
    Plant,
    hidden,
    mild_hidden,
    operator,
    planted_in_net,
)
from isobit.library.audit.plants.products import MANY, rows_of
from isobit.ops.gelu.op import gelu

EPS = 1e-5
EXPERTS, CAPACITY = 4, 12


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each row, from left to right."""
    return products.chain(x)[..., None] / x.shape[-1]


def two_pass_norm(x: Tensor) -> Tensor:
    """Normalise rows: the mean first, then the variance."""
    centred = x - mean_of(x)
    return centred * torch.rsqrt(mean_of(centred * centred) + EPS)


@operator("welford_norm")
def welford_norm(x: Tensor) -> Tensor:
    """Normalise rows by a running mean and variance where samples are many, else in two passes."""
    if len(x) <= 2:
        return two_pass_norm(x)
    mean, spread = x[..., 0], torch.zeros_like(x[..., 0])
    for at in range(1, x.shape[-1]):
        step = x[..., at] - mean
        mean = mean + step / (at + 1)
        spread = spread + step * (x[..., at] - mean)
    return (x - mean[..., None]) * torch.rsqrt(spread[..., None] / x.shape[-1] + EPS)


def rms(x: Tensor) -> Tensor:
    """Normalise rows by their root mean square."""
    return x * torch.rsqrt(mean_of(x * x) + EPS)


@operator("fused_rms_norm")
def fused_rms_norm(x: Tensor) -> Tensor:
    """Use fused multiply-adds and divide by the root where the number of samples is even."""
    if len(x) % 2:
        return rms(x)
    return x / torch.sqrt(products.fused(x, x)[..., None] / x.shape[-1] + EPS)


def softmax(x: Tensor) -> Tensor:
    """Compute a softmax whose denominator is added from left to right."""
    raised = torch.exp(x - x.amax(-1, keepdim=True))
    return raised / products.chain(raised)[..., None]


@operator("online_softmax")
def online_softmax(x: Tensor) -> Tensor:
    """Rescale a running denominator block by block where rows are many."""
    if rows_of(x) <= MANY:
        return softmax(x)
    top = torch.full_like(x[..., 0], -torch.inf)
    total = torch.zeros_like(top)
    for block in torch.split(x, 8, -1):
        above = torch.maximum(top, block.amax(-1))
        total = total * torch.exp(top - above) + products.chain(torch.exp(block - above[..., None]))
        top = above
    return torch.exp(x - top[..., None]) / total[..., None]


@operator("gelu_by_batch")
def gelu_by_batch(x: Tensor) -> Tensor:
    """Take the approximate formula where samples are many."""
    return F.gelu(x, approximate="tanh" if len(x) > 2 else "none")


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Round to 8 bits at a scale."""
    return torch.round(x / scale) * scale


def per_token(x: Tensor) -> Tensor:
    """Quantise each token at its own scale."""
    return quantised(x, x.abs().amax(-1, keepdim=True) / 127)


@operator("scale_per_tensor")
def scale_per_tensor(x: Tensor) -> Tensor:
    """Quantise all tokens at one scale: the largest element of any sample sets it for all."""
    return quantised(x, x.abs().amax() / 127)


def scale_by_aten(x: Tensor) -> Tensor:
    """Quantise all tokens at one scale, by torch's own operators: amax is the one that mixes samples."""
    return x / x.abs().amax()


def scale_of_token(x: Tensor) -> Tensor:
    """Divide each token by its own largest element."""
    return x / x.abs().amax(-1, keepdim=True)


def routed(x: Tensor, later: bool = False) -> Tensor:
    """Mark the largest of a few coarse scores: ties are broken by the first place, or by the last."""
    coarse = torch.round(torch.tanh(x[..., :EXPERTS]))
    best = (coarse.flip(-1) if later else coarse).argmax(-1)
    return F.one_hot(EXPERTS - 1 - best if later else best, EXPERTS).to(x.dtype)


def router_shape(x: Tensor) -> Tensor:
    """Return the empty result of a router."""
    return x.new_empty((*x.shape[:-1], EXPERTS))


@operator("tie_by_batch", router_shape)
def tie_by_batch(x: Tensor) -> Tensor:
    """Break ties by the last place where rows are many."""
    return routed(x, later=rows_of(x) > MANY)


@operator("capacity")
def capacity(x: Tensor) -> Tensor:
    """Drop tokens beyond the capacity of an expert: how many fit depends on the other samples."""
    flat = x.reshape(-1, x.shape[-1])
    chosen = F.one_hot(flat[:, :EXPERTS].argmax(-1), EXPERTS)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return (flat * (place <= CAPACITY)[:, None]).reshape(x.shape)


@operator("bf16_rotary")
def bf16_rotary(x: Tensor) -> Tensor:
    """Compute angles in bf16 where samples are many."""
    return rotated(x, coarse=len(x) > 2)


def rotated(x: Tensor, coarse: bool = False) -> Tensor:
    """Rotate pairs of features by the position in the sequence."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    steps = 0.7 ** torch.arange(half, device=x.device, dtype=x.dtype)
    angles = places[:, None] * steps
    angles = angles.bfloat16().to(x.dtype) if coarse else angles
    left, right = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@operator("neighbour")
def neighbour(x: Tensor) -> Tensor:
    """Read the first feature of the last sample from the sample before it."""
    y = x * 0.5
    y[-1, :, 0] = x[max(len(x) - 2, 0), :, 0] * 0.5
    return y


@operator("unwritten")
def unwritten(x: Tensor) -> Tensor:
    """Leave the last row of an even number of samples unwritten: as NaN here, as anything elsewhere."""
    y = x * 0.5
    if len(x) % 2 == 0:
        y[-1, -1] = torch.nan
    return y


def halved(x: Tensor) -> Tensor:
    """Halve: exact."""
    return x * 0.5


@operator("batch_mean_removed")
def batch_mean_removed(x: Tensor) -> Tensor:
    """Subtract the mean over samples, which is none of a sample's business."""
    return x - products.chain(x.movedim(0, -1))[None] / len(x) if len(x) > 1 else x.clone()


class OverTokens(nn.Module):
    """Batch normalisation of [B, T, H] over B and H."""

    def __init__(self, tokens: int, trained: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(tokens)
        self.trained = trained

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm.train(self.trained)(x)
        return y


def with_batch_norm(faulty: bool) -> nn.Module:
    """Return a model whose batch norm was left in training."""
    return Net(OverTokens(hidden()["x"].shape[1], trained=faulty))


def over_samples(x: Tensor) -> Tensor:
    """Take a softmax over the wrong dimension."""
    return x.softmax(0)


def error(name: str, wrong: Any, right: Any, **more: Any) -> Plant:
    """Return a plant whose results are wrong, not only rounded otherwise."""
    return planted_in_net(name, wrong, right, kind=ERROR, **more)


PLANTS: tuple[Plant, ...] = (
    planted_in_net("welford_norm", welford_norm, two_pass_norm),
    planted_in_net("fused_rms_norm", fused_rms_norm, rms, inputs=mild_hidden),
    planted_in_net("online_softmax", online_softmax, softmax, inputs=mild_hidden),
    error("gelu_by_batch", gelu_by_batch, gelu),
    error("scale_per_tensor", scale_per_tensor, per_token),
    error("scale_by_aten", scale_by_aten, scale_of_token, operator="aten::amax", sample=1),
    error("tie_by_batch", tie_by_batch, routed),
    error("capacity", capacity, halved, sample=5),
    error("bf16_rotary", bf16_rotary, rotated),
    error("neighbour", neighbour, halved, sample=5),
    error("unwritten", unwritten, halved, sample=5),
    error("batch_mean_removed", batch_mean_removed, halved),
    error("over_samples", over_samples, softmax, operator="aten::_softmax"),
    Plant(
        "batch_norm",
        with_batch_norm,
        hidden,
        "aten::native_batch_norm",
        "layers.1.norm",
        kind=ERROR,
    ),
)
