"""The rotary embedding: cosines and sines by position from one table, and rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.comparing.checkpoints.weight_digests import warn_of_rounded_frequencies
from isobit.integrations.transformers.refusals import refuse
from isobit.ops.rotary.op import rotary

# On a rotary embedding, by kind of layer: frequencies and scaling, and the table made of them.
ANGLES = "_isobit_angles"
POSITIONS_AT_ONCE = 16
# Rotary kinds whose frequencies are constants; the others recompute them from the longest sequence of the batch.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "proportional")


@torch.no_grad()
def forward_rotary(
    module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Look up cos and sin [B, T, D] in fp32 by position, so that no batch changes the bits of a row."""
    if (
        position_ids.dim() == 3
    ):  # of text, height and width, which are one where there are no images
        position_ids = position_ids[0]
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq = getattr(module, prefix + "inv_freq")
    wanted = getattr(module, prefix + "attention_scaling")
    rows = int(position_ids.max()) + 1 if position_ids.numel() else 1
    tables = module.__dict__.setdefault(ANGLES, {})
    frequencies, scaling, angles = tables.get(prefix, (None, None, None))
    if (
        frequencies is None
        or scaling != wanted
        or frequencies.device != inv_freq.device
        or not torch.equal(frequencies, inv_freq)
    ):
        if inv_freq.dtype != torch.float32:  # the model was cast after it was enabled
            warn_of_rounded_frequencies(module, "rotary_emb")
        frequencies, scaling = inv_freq.clone(), wanted
        angles = torch.empty(2, 0, 2 * len(frequencies), device=frequencies.device)
    if angles.shape[1] < rows:
        angles = extend_angles(angles.cpu(), frequencies.cpu().float(), scaling, rows)
        angles = angles.to(frequencies.device)
        tables[prefix] = frequencies, scaling, angles
    cos, sin = angles[:, position_ids].unbind(0)
    return cos, sin


def extend_angles(table: Tensor, frequencies: Tensor, scaling: float, rows: int) -> Tensor:
    """Compute cos and sin of more positions in blocks: each is a call of one shape, on one thread.

    On the CPU also where the model is on a GPU, whose sine has other bits.
    """
    blocks = [table]
    for first in range(table.shape[1], rows, POSITIONS_AT_ONCE):
        places = torch.arange(first, first + POSITIONS_AT_ONCE, dtype=torch.float32, device="cpu")
        angles = (places[:, None] * frequencies).repeat(1, 2)
        blocks.append(torch.stack((angles.cos() * scaling, angles.sin() * scaling)))
    return torch.cat(blocks, dim=1)


def check_kind(name: str, module: Any) -> None:
    """Raise if a rotary embedding's frequencies follow the longest sequence of the batch."""
    kinds = getattr(module, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in ROTARY_KINDS:
            refuse(
                f"rotary frequencies that are constants: {', '.join(ROTARY_KINDS)}",
                f"{name} with rope_type={kind!r}, whose frequencies follow the longest sequence of the batch",
                "choose a constant kind, e.g. yarn",
            )


# ---- rotations ------------------------------------------------------------------------------------------------

# halves: element i is rotated with element i + D/2. pairs: with its neighbour, the angles of the table's first half.
# pairs to halves: pairs whose results are the two halves.
STYLES = ("halves", "pairs", "pairs to halves")


def rotation(style: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that a composite calls in the place of its own `apply_rotary_pos_emb`."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return (
            rotate(q, cos, sin, style, unsqueeze_dim),
            rotate(k, cos, sin, style, unsqueeze_dim),
        )

    return apply_rotary_pos_emb


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int) -> Tensor:
    """Rotate heads by the angles of their tokens; elements beyond the table's width stay as they are."""
    heads = x.transpose(1, 2) if head_axis == 1 else x  # [B, T, H, D]
    depth = cos.shape[-1]
    if style == "halves" and depth == heads.shape[-1]:
        turned = rotary(heads, cos, sin)
    else:
        part, rest = heads[..., :depth], heads[..., depth:]
        if style != "halves":
            part = torch.cat((part[..., 0::2], part[..., 1::2]), -1)
        part = rotary(part.contiguous(), cos, sin)
        if style == "pairs":
            part = torch.stack(part.chunk(2, -1), -1).flatten(-2)
        turned = torch.cat((part, rest), -1) if rest.shape[-1] else part
    return turned.transpose(1, 2) if head_axis == 1 else turned
