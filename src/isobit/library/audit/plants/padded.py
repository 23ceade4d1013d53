"""Planted operators over the tokens of a sample that depend on the padding beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.records import ERROR
from isobit.library.audit.plants import products
from isobit.library.audit.plants.plant import Plant, operator, padded_hidden, planted_in_net

EPS = 1e-5


def last_axis(x: Tensor) -> Tensor:
    """Return [B, T, H] as [B, H, T], to add over tokens."""
    return x.transpose(1, 2)


def real(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T, H] with zeros in place of padding."""
    return torch.where(mask[..., None] > 0, x, torch.zeros_like(x))


def count(mask: Tensor, x: Tensor) -> Tensor:
    """Return the number of tokens of each sample, [B, 1, 1]."""
    return mask.sum(1)[:, None, None].to(x.dtype)


def centred(x: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean over a sample's tokens, added from the first to the last."""
    total = products.chain(last_axis(real(x, mask)))
    return x - total[:, None] / count(mask, x)


@operator("padded_mean")
def padded_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Divide the sum of a sample's tokens by the padded length."""
    return x - products.chain(last_axis(real(x, mask)))[:, None] / x.shape[1]


@operator("pairwise_over_padding")
def pairwise_over_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Add tokens by halves of the padded length, counted from its end."""
    total = products.pairwise(last_axis(real(x, mask)).flip(-1))
    return x - total[:, None] / count(mask, x)


def token_norm(x: Tensor, mask: Tensor) -> Tensor:
    """Normalise each feature over a sample's tokens."""
    y = real(centred(x, mask), mask)
    spread = products.chain(last_axis(y * y))[:, None] / count(mask, x)
    return y * torch.rsqrt(spread + EPS)


@operator("norm_with_padding")
def norm_with_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Normalise over all positions, padding included."""
    return token_norm(x, torch.ones_like(mask))


def mixed(x: Tensor, mask: Tensor, hidden: float = -torch.inf, block: int = 0) -> Tensor:
    """Weigh a sample's tokens by a softmax over them, per feature.

    Args:
        x: Hidden states [B, T, H].
        mask: 1 for tokens, 0 for padding, [B, T].
        hidden: What stands for the score of padding.
        block: How many tokens are added at a time, counted from the end of the row; 0 adds from the first to the last.
    """
    scores = last_axis(torch.round(x.clamp(-4.0, 4.0) * 16) / 16 - 9_998.0)  # exact in fp32
    scores = torch.where(mask[:, None] > 0, scores, torch.full_like(scores, hidden))
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    turned = raised.flip(-1)
    total = products.in_blocks(turned, block) if block else products.chain(raised)
    return last_axis(raised / total[..., None]) * x


@operator("finite_mask")
def finite_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Give padding a score of -10,000 instead of minus infinity."""
    return mixed(x, mask, hidden=-1e4)


@operator("blocks_from_the_end")
def blocks_from_the_end(x: Tensor, mask: Tensor) -> Tensor:
    """Add the denominator in blocks that are counted from the end of the padded row."""
    return mixed(x, mask, block=3)


def turned_by_place(x: Tensor, places: Tensor) -> Tensor:
    """Scale tokens by a function of their positions [B, T]."""
    return x * torch.cos(places[..., None].to(x.dtype) * 0.37)


def by_token(x: Tensor, mask: Tensor) -> Tensor:
    """Count positions over tokens."""
    return turned_by_place(x, mask.cumsum(1) - 1)


@operator("places_with_padding")
def places_with_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Count positions from the middle of the padded row."""
    places = torch.arange(x.shape[1], device=x.device) - x.shape[1] // 2
    return turned_by_place(x, places[None].expand(len(x), -1))


def mean_by_aten(x: Tensor) -> Tensor:
    """Subtract torch's mean over all positions."""
    return x - x.mean(1, keepdim=True)


def halved_without_mask(x: Tensor) -> Tensor:
    """Halve: exact."""
    return x * 0.5


def padding(name: str, wrong: Any, right: Any, **more: Any) -> Plant:
    """Return a plant on the padding axis."""
    options = {"inputs": padded_hidden, "axis": "padding", "masked": True, **more}
    return planted_in_net(name, wrong, right, **options)


PLANTS: tuple[Plant, ...] = (
    padding("padded_mean", padded_mean, centred, kind=ERROR),
    padding("pairwise_over_padding", pairwise_over_padding, centred),
    padding("norm_with_padding", norm_with_padding, token_norm, kind=ERROR),
    padding("finite_mask", finite_mask, mixed, kind=ERROR),
    padding("blocks_from_the_end", blocks_from_the_end, partial(mixed, block=0)),
    padding("places_with_padding", places_with_padding, by_token, kind=ERROR),
    padding(
        "mean_by_aten",
        mean_by_aten,
        halved_without_mask,
        operator="aten::mean",
        masked=False,
        kind=ERROR,
    ),
)
