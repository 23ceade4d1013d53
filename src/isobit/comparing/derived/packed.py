"""Decode quantised weights: layouts of compressed-tensors, GPTQ, AWQ, torchao, and fp8 with scales.

[Note: Layouts]
A layout is recognised by names and shapes alone, N outputs and K inputs:

| layout | codes | scale | zero point |
| --- | --- | --- | --- |
| compressed-tensors, packed | weight_packed int32 [N, K·b/32] | weight_scale [N, G] | weight_zero_point [N·b/32, G] |
| compressed-tensors, plain | weight int8 or fp8 [N, K] | weight_scale [N, G], [N], [1] | weight_zero_point [N, G] |
| GPTQ | qweight int32 [K·b/32, N] | scales [G, N] | qzeros [G, N·b/32], less one in format 1; g_idx [K] |
| AWQ | qweight int32 [K, N·b/32] | scales [G, N] | qzeros [G, N·b/32]; eight columns interleaved |
| torchao | _weight_qdata int8 or fp8 [N, K] | _weight_scale [N, G] | _weight_zero_point [N, G] |
| fp8 in blocks | weight fp8 [N, K] | weight_scale_inv [N/128, K/128] | none |

Packed numbers are dense: number i has the bits from i·b on, also across words. Any other layout raises an error that
names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobit.comparing.tensor_files import Checkpoint, unreadable

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Parts of layouts that are not decoded here, with their names.
FOREIGN = {
    ".quant_state.bitsandbytes": "bitsandbytes",
    ".weight_global_scale": "NVFP4 of compressed-tensors",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes' LLM.int8",
    "_blocks": "MXFP4",
}


@dataclass(frozen=True)
class Codes:
    """A quantised weight, decoded.

    Attributes:
        codes: [N, K], whole numbers, or fp8 values as numbers; fp64.
        scale: of each group, [N, G]; fp64.
        zero: zero point of each group, [N, G]; fp64.
        group: the group of each column, [K].
        low: the least code.
        high: the largest code.
        fp8: the dtype of fp8 codes, None for whole numbers.
        scale_dtype: the dtype in which scales are stored.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    low: float
    high: float
    fp8: torch.dtype | None
    scale_dtype: torch.dtype

    def steps(self) -> Tensor:
        """Return the scale of each element, [N, K]."""
        return self.scale[:, self.group]

    def values(self) -> Tensor:
        """Return the weights that the codes stand for, [N, K]."""
        return (self.codes - self.zero[:, self.group]) * self.steps()

    def by_group(self, x: Tensor) -> Tensor:
        """Add up [N, K] over the columns of each group, [N, G]."""
        return x.new_zeros(self.scale.shape).index_add(1, self.group, x)


@dataclass(frozen=True)
class Packed:
    """A quantised weight of a checkpoint, not read yet: its layout in words, its stored parts, and how to read it."""

    layout: str
    parts: tuple[str, ...]
    load: Callable[[], Codes]


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` unsigned numbers of `bits` bits along the last axis of int32 words."""
    starts = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    wide = torch.cat((wide, torch.zeros_like(wide[..., :1])), -1)
    at = starts // 32
    pair = wide[..., at] | (wide[..., at + 1] << 32)
    # The upper word is shifted beyond 64 bits' sign only by numbers that the mask removes.
    return (pair >> (starts % 32)) & ((1 << bits) - 1)


def find_packed(found: Checkpoint, *, format_2: bool = False) -> dict[str, Packed]:
    """Return the quantised weights of a checkpoint, by the name of the weight that they stand for.

    Args:
        found: The checkpoint.
        format_2: Whether zero points of GPTQ are stored as they are; format 1 stores them less one.

    Raises:
        ArgumentError: For a layout that is not decoded here.
    """
    for name in found.tensors:
        for part, layout in FOREIGN.items():
            if part in name:
                raise unreadable(
                    found.path,
                    "compressed-tensors, GPTQ, AWQ, torchao's int8 or fp8, or fp8 with scales",
                    f"{layout}: {name}",
                    "decompress the checkpoint with the tool that wrote it, and compare that",
                )
    packed: dict[str, Packed] = {}
    for name in found.tensors:
        stem, _, last = name.rpartition(".")
        prefix = f"{stem}." if stem else ""
        reader = {
            "weight_packed": read_compressed,
            "qweight": read_gptq_or_awq,
            "_weight_qdata": read_torchao,
            "weight": read_plain,
        }.get(last)
        if reader is None:
            continue
        one = reader(found, prefix, format_2)
        if one is not None:
            packed[f"{prefix}weight"] = one
    return packed


def part_of(found: Checkpoint, prefix: str, name: str) -> Tensor | None:
    """Read a part of a weight; None if it is not stored."""
    stored = found.tensors.get(prefix + name)
    return None if stored is None else stored.load()


def needed(found: Checkpoint, prefix: str, name: str) -> Tensor:
    """Read a part of a weight that the layout requires."""
    part = part_of(found, prefix, name)
    if part is None:
        raise unreadable(found.path, f"{prefix}{name} with the codes", "none")
    return part


def stored_parts(found: Checkpoint, prefix: str, *names: str) -> tuple[str, ...]:
    """Return which of the parts are stored."""
    return tuple(prefix + name for name in names if prefix + name in found.tensors)


def fits(found: Checkpoint, what: str, ok: bool, received: object) -> None:
    """Raise unless shapes and dtypes fit."""
    if not ok:
        raise unreadable(found.path, f"shapes and dtypes that fit in {what}", str(received))


def grouped(found: Checkpoint, name: str, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales as [N, G] and the group of each column."""
    n, k = codes.shape
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(n, 1)
    elif scale.ndim == 1:
        scale = scale.reshape(-1, 1)
    fits(found, name, scale.ndim == 2, list(scale.shape))
    if scale.shape[0] != n and scale.shape[0] and n % scale.shape[0] == 0:
        scale = scale.repeat_interleave(n // scale.shape[0], 0)  # blocks of rows
    elif scale.shape[0] != n and scale.shape[0] == -(-n // 128):
        scale = scale.repeat_interleave(128, 0)[:n]
    groups = scale.shape[1]
    fits(found, name, scale.shape[0] == n and groups > 0, list(scale.shape))
    size = k // groups if k % groups == 0 else 128
    group = torch.arange(k) // max(size, 1)
    fits(found, name, int(group.max()) == groups - 1, f"{groups} groups of {k} columns")
    return scale, group


def decoded(
    found: Checkpoint,
    name: str,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    limits: tuple[float, float],
    fp8: torch.dtype | None = None,
) -> Codes:
    """Put codes, scales and zero points together."""
    fits(found, name, scale.is_floating_point() and not codes.is_complex(), scale.dtype)
    wide, group = grouped(found, name, codes, scale)
    zero = torch.zeros_like(wide) if zero is None else grouped(found, name, codes, zero)[0]
    fits(found, name, zero.shape == wide.shape, list(zero.shape))
    return Codes(codes.double(), wide.double(), zero.double(), group, *limits, fp8, scale.dtype)


def read_compressed(found: Checkpoint, prefix: str, _: bool) -> Packed:
    """Read compressed-tensors' packed integers."""

    def load() -> Codes:
        words = needed(found, prefix, "weight_packed")
        scale = needed(found, prefix, "weight_scale")
        n, k = (int(size) for size in needed(found, prefix, "weight_shape").tolist())
        fits(found, prefix, words.dtype == torch.int32 and words.ndim == 2, words.dtype)
        bits = words.shape[1] * 32 // k if k else 0
        fits(found, prefix, 1 <= bits <= 8 and words.shape == (n, -(-k * bits // 32)), words.shape)
        half = 1 << (bits - 1)
        codes = unpack(words, bits, k) - half
        zero = part_of(found, prefix, "weight_zero_point")
        if zero is not None and zero.dtype == torch.int32 and zero.shape[0] != n:
            zero = unpack(zero.mT.contiguous(), bits, n).mT - half
        made = decoded(found, prefix, codes, scale, zero, (-half, half - 1))
        order = part_of(found, prefix, "weight_g_idx")
        return made if order is None else regrouped(found, prefix, made, order)

    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return Packed("compressed-tensors, packed", stored_parts(found, prefix, *names), load)


def regrouped(found: Checkpoint, name: str, made: Codes, order: Tensor) -> Codes:
    """Take the group of each column from a stored list."""
    fits(found, name, order.shape == made.group.shape, list(order.shape))
    if int(order.min()) < 0:  # compressed-tensors' sign for "not set"
        return made
    fits(found, name, int(order.max()) < made.scale.shape[1], f"a group {int(order.max())}")
    return replace(made, group=order.long())


def read_gptq_or_awq(found: Checkpoint, prefix: str, format_2: bool) -> Packed:
    """Read GPTQ's layout, or AWQ's, which packs along the other axis."""
    words, scales = found.tensors[f"{prefix}qweight"], found.tensors.get(f"{prefix}scales")
    if scales is None or len(scales.shape) != 2 or len(words.shape) != 2:
        raise unreadable(found.path, f"{prefix}scales [groups, outputs] with qweight", "none")
    n = scales.shape[1]
    is_gptq = words.shape[1] == n

    def load_gptq() -> Codes:
        packed, scale = needed(found, prefix, "qweight"), needed(found, prefix, "scales")
        zeros = needed(found, prefix, "qzeros")
        bits = zeros.shape[1] * 32 // n
        fits(found, prefix, bits in (2, 3, 4, 8), f"{bits} bits")
        k = packed.shape[0] * 32 // bits
        codes = unpack(packed.mT.contiguous(), bits, k)  # [N, K]
        zero = unpack(zeros, bits, n).mT + (0 if format_2 else 1)
        made = decoded(found, prefix, codes, scale.mT, zero, (0, (1 << bits) - 1))
        order = part_of(found, prefix, "g_idx")
        return made if order is None else regrouped(found, prefix, made, order)

    def load_awq() -> Codes:
        packed, scale = needed(found, prefix, "qweight"), needed(found, prefix, "scales")
        fits(
            found,
            prefix,
            packed.shape[1] * 8 == n,
            f"{packed.shape} of {n} outputs: AWQ has 4 bits",
        )
        codes = in_awq_order(packed, n).mT
        zero = in_awq_order(needed(found, prefix, "qzeros"), n).mT
        return decoded(found, prefix, codes, scale.mT, zero, (0, 15))

    names = ("qweight", "scales", "qzeros", "g_idx")
    parts = stored_parts(found, prefix, *names)
    return Packed("GPTQ", parts, load_gptq) if is_gptq else Packed("AWQ", parts, load_awq)


def in_awq_order(words: Tensor, count: int) -> Tensor:
    """Unpack AWQ's numbers of four bits, of which eight neighbours are interleaved."""
    plain = unpack(words, 4, count).reshape(len(words), -1, 8)
    found = torch.empty_like(plain)
    found[..., list(AWQ_COLUMNS)] = plain
    return found.reshape(len(words), -1)


def read_torchao(found: Checkpoint, prefix: str, _: bool) -> Packed:
    """Read torchao's int8 and fp8 tensors, as its safetensors support writes them."""

    def load() -> Codes:
        codes = needed(found, prefix, "_weight_qdata")
        scale = needed(found, prefix, "_weight_scale")
        zero = part_of(found, prefix, "_weight_zero_point")
        is_fp8 = codes.dtype in FP8
        if codes.ndim != 2 or not (is_fp8 or codes.dtype == torch.int8):
            raise unreadable(
                found.path,
                "torchao's int8 or fp8 codes, one per element",
                f"{prefix}_weight_qdata of {codes.dtype} {list(codes.shape)}",
                "dequantize the model with torchao, and compare that",
            )
        limits = fp8_limits(codes.dtype) if is_fp8 else (-128.0, 127.0)
        return decoded(found, prefix, codes, scale, zero, limits, codes.dtype if is_fp8 else None)

    names = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    return Packed("torchao", stored_parts(found, prefix, *names), load)


def read_plain(found: Checkpoint, prefix: str, _: bool) -> Packed | None:
    """Read int8 or fp8 weights with scales next to them; None for a plain weight."""
    dtype = found.tensors[f"{prefix}weight"].dtype
    if dtype not in (torch.int8, *FP8):
        return None
    name = "weight_scale_inv" if f"{prefix}weight_scale_inv" in found.tensors else "weight_scale"

    def load() -> Codes:
        codes, scale = needed(found, prefix, "weight"), needed(found, prefix, name)
        fits(found, prefix, codes.ndim == 2, list(codes.shape))
        zero = part_of(found, prefix, "weight_zero_point")
        is_fp8 = dtype in FP8
        limits = fp8_limits(dtype) if is_fp8 else (-128.0, 127.0)
        return decoded(found, prefix, codes, scale, zero, limits, dtype if is_fp8 else None)

    parts = stored_parts(found, prefix, "weight", name, "weight_zero_point")
    return Packed("one code per element", parts, load)


def fp8_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the largest finite value."""
    most = float(torch.finfo(dtype).max)
    return -most, most
