"""Check a quantised checkpoint against the one it was made from: every weight within half a step, per group.

[Note: Half a step]
A code that was rounded to nearest is within half a step of its weight. What a tool may add to that is derived: the
stored scale and the quotient are each rounded once in their dtypes, so |w|·(u of the scale + u of the weight) more; a
zero point that is added before codes are rounded makes one more rounding, of the code's own size. A
code at the end of its range may be clipped; a group is wrong if its largest weight is beyond twice the range.
GPTQ does not round to nearest: it moves a column's error into the columns after it. A tensor most of whose groups are
beyond half a step is judged per group instead: the mean error is within half a step, the root of the mean square within
one and a half, and the codes follow the weights with a slope between 3/4 and 5/4. This finds a wrong scale, zero
point or tensor, not a wrong single code.
AWQ and SmoothQuant multiply columns (and rows of the layer before) first. If that explains a tensor, the factors are
fitted, and norms may differ by their inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.comparing.checkpoints.compare import shapes_of
from isobit.comparing.checkpoints.names import Side, match_names
from isobit.comparing.checkpoints.readers import read_checkpoint, read_json
from isobit.comparing.derived.loading import Loader
from isobit.comparing.derived.packed import FP8, Codes, Packed, find_packed
from isobit.comparing.derived.records import (
    LEFT,
    STATED,
    WRONG,
    Derivation,
    Progress,
    TensorVerdict,
    is_linear_weight,
)
from isobit.comparing.tensor_files import Checkpoint
from isobit.errors import ArgumentError

CLIPPED = 2.0  # times the range: what observers that shrink it, and AWQ, clip at most
MOST_GROUPS = (
    0.5  # share of groups beyond half a step from which a tensor was not rounded to nearest
)
BIAS, SPREAD, SLOPE = 0.5, 1.5, 0.25  # of such a tensor's groups, in steps and relative
# Tensors that quantisation adds: scales of activations and of the key-value cache.
ADDED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_zero_point")


@dataclass(frozen=True)
class Fit:
    """How codes explain a weight.

    Attributes:
        beyond: elements further than half a step, [N, K].
        groups: groups with such elements, [N, G].
        error: in steps, [N, K].
    """

    beyond: Tensor
    groups: Tensor
    error: Tensor

    @property
    def count(self) -> int:
        """How many elements are beyond half a step."""
        return int(self.beyond.sum())


def check_quantised(
    path: Path | str,
    base: Path | str,
    *,
    nearest: bool = False,
    progress: Progress | None = None,
) -> Derivation:
    """Decode every quantised weight and compare it with the weight it was made from.

    Args:
        path: The quantised checkpoint: compressed-tensors, GPTQ, AWQ, torchao's int8 and fp8, fp8 with scales.
        base: The checkpoint that it was made from.
        nearest: Whether all codes must be rounded to nearest, so that GPTQ's are wrong.
        progress: Called after each tensor with its number, the number of all, and its name.

    Returns:
        A verdict per tensor; see [Note: Half a step]. Tensors that are not quantised must have the base's bits, or
        its values in another dtype.

    Raises:
        ArgumentError: If a checkpoint cannot be read, or has a layout that is not decoded here.
        OSError: If a file is not there or is not a regular file.
    """
    found, original = read_checkpoint(Path(path)), read_checkpoint(Path(base))
    config = quantisation_config(Path(path))
    packed = find_packed(found, format_2=config.get("checkpoint_format") == "gptq_v2")
    parts = {part for one in packed.values() for part in one.parts}
    plain = {name: t.shape for name, t in found.tensors.items() if name not in parts}
    names = plain | {name: base_shape(one) for name, one in packed.items()}
    matching = match_names(names, shapes_of(original))
    loader = Loader(original)
    sides = {str(pair.left): pair.right for pair in matching.pairs}
    verdicts, factors = [], []
    order = [*packed, *plain]
    for number, name in enumerate(order, 1):
        before = loader.side(sides[name]) if name in sides else None
        if name in packed:
            verdict, columns = judge_packed(name, packed[name], before, nearest, original, sides)
            factors.append(columns)
        else:
            now = found.tensors[name].load()
            verdict = judge_plain(name, now, before, [f for f in factors if f is not None])
        verdicts.append(verdict)
        if progress is not None:
            progress(number, len(order), name)
    for name in matching.only_right:
        if name not in found.ties and name not in original.ties:
            verdicts.append(
                TensorVerdict(name, WRONG, 0, cause="the base has it, this checkpoint does not")
            )
    verdicts = [stated_but_plain(one, config, packed, names) for one in verdicts]
    layouts = sorted({one.layout for one in packed.values()})
    said = f"made from {base} by quantisation ({', '.join(layouts) or 'nothing is quantised'})"
    return Derivation(str(path), said, tuple(verdicts), tuple(found.notes))


def base_shape(one: Packed) -> tuple[int, ...]:
    """Return the shape of the weight that codes stand for."""
    return tuple(one.load().codes.shape)


def quantisation_config(path: Path) -> dict[str, Any]:
    """Return what config.json says on quantisation; nothing if there is none."""
    folder = path if path.is_dir() else path.parent
    for name in ("config.json", "quantize_config.json", "quantization_config.json"):
        try:
            config = read_json(folder / name)
        except (OSError, ArgumentError):
            continue
        if isinstance(config, dict):
            inner = config.get("quantization_config", config if "bits" in config else None)
            if isinstance(inner, dict):
                return inner
    return {}


def stated_but_plain(
    one: TensorVerdict,
    config: dict[str, Any],
    packed: dict[str, Packed],
    shapes: dict[str, tuple[int, ...]],
) -> TensorVerdict:
    """Turn a linear layer that was left into a wrong one if the configuration says that all of them are quantised."""
    groups = config.get("config_groups")
    targets = [
        target
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
        for target in (group.get("targets") or ())
    ]
    if one.verdict != LEFT or "Linear" not in targets or one.name in packed:
        return one
    if not one.name.endswith(".weight") or not is_linear_weight(one.name, shapes[one.name]):
        return one
    module = one.name.removesuffix(".weight")
    if is_ignored(module, config.get("ignore") or ()):
        return one
    cause = "the configuration says that it is quantised, and it is not"
    return replace(one, verdict=WRONG, wrong=one.elements, cause=cause)


def is_ignored(module: str, ignored: Any) -> bool:
    """Return whether a module is on the list of those that were left out."""
    for one in ignored:
        if not isinstance(one, str):
            continue
        if one.startswith("re:"):
            try:
                if re.match(one[3:], module):
                    return True
            except re.error:
                continue
        elif module == one or module.endswith(f".{one}"):
            return True
    return False


def unit(dtype: torch.dtype) -> float:
    """Return half the distance of 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


def fit(codes: Codes, weight: Tensor, dtype: torch.dtype, slack: Tensor | float = 0.0) -> Fit:
    """Compare weights with what their codes stand for; see [Note: Half a step]."""
    step = codes.steps()
    half = step.abs() / 2 if codes.fp8 is None else half_fp8(codes) * step.abs()
    allowed = half + weight.abs() * (unit(codes.scale_dtype) + unit(dtype)) + slack
    zero = codes.zero[:, codes.group]
    shifted = (zero != 0) & (zero != (codes.low + codes.high + 1) / 2)
    size = torch.maximum(codes.codes.abs(), (codes.codes - zero).abs()) + 1
    allowed = allowed + torch.where(shifted, unit(dtype) * size * step.abs(), 0.0)
    difference = weight - codes.values()
    at_low, at_high = codes.codes <= codes.low, codes.codes >= codes.high
    outward = torch.where(step > 0, difference, -difference)
    clipped = (at_high & (outward > 0)) | (at_low & (outward < 0))
    reach = torch.maximum(codes.high - zero, zero - codes.low) * step.abs()
    clipped &= weight.abs() <= CLIPPED * reach
    beyond = ~(difference.abs() <= allowed) & ~clipped
    groups = codes.by_group(beyond.double()) > 0
    return Fit(beyond, groups, difference / step)


def half_fp8(codes: Codes) -> Tensor:
    """Return half the distance between fp8 numbers at each code."""
    assert codes.fp8 is not None
    info = torch.finfo(codes.fp8)
    size = codes.codes.abs().clamp(min=float(info.smallest_normal))
    return torch.exp2(torch.floor(torch.log2(size))) * float(info.eps) / 2


def judge_packed(
    name: str,
    packed: Packed,
    before: Tensor | None,
    nearest: bool,
    original: Checkpoint,
    sides: dict[str, Side],
) -> tuple[TensorVerdict, Tensor | None]:
    """Judge one quantised weight; also return the factors of its columns, if it has any."""
    codes = packed.load()
    n = codes.codes.numel()
    if before is None:
        return TensorVerdict(name, WRONG, n, n, "the base has no such weight"), None
    if before.shape != codes.codes.shape:
        shapes = f"shape {list(codes.codes.shape)}, the base has {list(before.shape)}"
        return TensorVerdict(name, WRONG, n, n, shapes), None
    broken = ~torch.isfinite(codes.scale) | (codes.scale == 0)
    weight = before.double()
    empty = codes.by_group(weight.abs()) == 0  # a group of zeros may have any scale
    broken &= ~(empty & torch.isfinite(codes.scale))
    if bool(broken.any()):
        at = [int(i) for i in broken.nonzero()[0]]
        said = f"the scale of row {at[0]}, group {at[1]} is {float(codes.scale[at[0], at[1]])}"
        return TensorVerdict(name, WRONG, n, int(broken.sum()), said), None
    found = fit(codes, weight, before.dtype)
    figures: dict[str, float | int | str] = {
        "layout": packed.layout,
        "beyond half a step": found.count,
        "largest error in steps": float(found.error.abs().max()) if n else 0.0,
    }
    if not found.count:
        return TensorVerdict(name, STATED, n, figures=figures), None
    if float(found.groups.double().mean()) > MOST_GROUPS:
        columns = factors_of(codes, weight, before.dtype)
        if columns is not None:
            figures["columns multiplied"] = "yes"
            return TensorVerdict(name, STATED, n, figures=figures), columns
        if not nearest and follows(codes, weight, found):
            figures["rounding"] = "not to nearest, as by GPTQ"
            return TensorVerdict(name, STATED, n, figures=figures), None
    cause = why(codes, weight, before.dtype, found, name, original, sides)
    return TensorVerdict(name, WRONG, n, found.count, cause, figures), None


def follows(codes: Codes, weight: Tensor, found: Fit) -> bool:
    """Return whether codes that were not rounded to nearest follow their weights in every group."""
    count = codes.by_group(torch.ones_like(weight))
    if int(count.min()) < 16:  # too few columns for a mean; the tensor is judged as one group
        codes = replace(
            codes,
            scale=codes.scale[:, :1],
            zero=codes.zero[:, :1],
            group=torch.zeros_like(codes.group),
        )
        count = codes.by_group(torch.ones_like(weight))
    bias = codes.by_group(found.error).abs() / count
    spread = (codes.by_group(found.error.square()) / count).sqrt()
    values = weight - found.error * codes.steps() if codes.scale.shape[1] == 1 else codes.values()
    of_weight = codes.by_group(weight.square())
    slope = codes.by_group(values * weight) / torch.where(of_weight > 0, of_weight, 1.0)
    right = (bias <= BIAS) & (spread <= SPREAD) & ((slope - 1).abs() <= SLOPE)
    return bool((right | (of_weight == 0)).all())


def factors_of(codes: Codes, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of columns, [K], if with those of rows they bring every weight within half a step."""
    values = codes.values()
    rows, columns = values.new_ones(len(values), 1), values.new_ones(1, values.shape[1])
    for _ in range(8):
        scaled = weight * rows
        columns = (values * scaled).sum(0, True) / scaled.square().sum(0, True).clamp(min=1e-300)
        scaled = weight * columns
        rows = (values * scaled).sum(1, True) / scaled.square().sum(1, True).clamp(min=1e-300)
    fitted = weight * rows * columns
    if float(columns.min()) <= 0 or float(columns.max() / columns.min()) < 1.05:
        return None
    # The factors are estimates: their standard errors, eight times, are allowed for.
    residue = (values - fitted).square()
    of_columns = residue.mean(0, True) / fitted.square().sum(0, True).clamp(min=1e-300)
    of_rows = residue.mean(1, True) / fitted.square().sum(1, True).clamp(min=1e-300)
    slack = 8 * (of_columns.sqrt() + of_rows.sqrt()) * fitted.abs()
    if float((slack / codes.steps().abs()).mean()) > 1:
        return None  # factors that explain anything explain nothing
    return columns[0] if not fit(codes, fitted, dtype, slack).count else None


def why(
    codes: Codes,
    weight: Tensor,
    dtype: torch.dtype,
    found: Fit,
    name: str,
    original: Checkpoint,
    sides: dict[str, Side],
) -> str:
    """Return the cause: the first change of one thing that explains nine in ten of the wrong elements."""
    beyond = f"{found.count:,} of {weight.numel():,} weights are further than half a step"
    at = [int(i) for i in found.groups.nonzero()[0]]
    groups = int(found.groups.sum())
    where = f"in {groups:,} of {found.groups.numel():,} groups, first row {at[0]}, group {at[1]}"
    tried = {
        "zero point one too large": replace(codes, zero=codes.zero - 1),
        "zero point one too small": replace(codes, zero=codes.zero + 1),
        "scale of the next group": replace(codes, scale=codes.scale.roll(1, 1)),
        "scale of the group before": replace(codes, scale=codes.scale.roll(-1, 1)),
        "scale of the next row": replace(codes, scale=codes.scale.roll(1, 0)),
        "scale of the row before": replace(codes, scale=codes.scale.roll(-1, 0)),
        "neighbouring codes swapped": replace(codes, codes=swapped(codes.codes)),
        "scale twice too large": replace(codes, scale=codes.scale / 2),
        "scale half as large": replace(codes, scale=codes.scale * 2),
        "sign of the scale": replace(codes, scale=-codes.scale),
        "groups in another sequence": replace(codes, group=codes.group.flip(0)),
    }
    for cause, other in tried.items():
        again = fit(other, weight, dtype)
        if int((again.beyond & found.groups[:, codes.group]).sum()) * 10 <= found.count:
            return f"{cause}: {beyond}, {where}"
    values = codes.values()
    best, which = correlation(values, weight), ""
    if best < 0.5:
        for other_name, side in sides.items():
            stored = [original.tensors[piece.name] for piece in side.pieces]
            if len(stored) == 1 and stored[0].shape == tuple(weight.shape) and other_name != name:
                same = correlation(values, stored[0].load().double())
                if same > max(best, 0.5):
                    best, which = same, other_name
        if which:
            return f"codes of {which} (correlation {best:.3f}): {beyond}, {where}"
    return f"{beyond}, {where}; correlation with the base {best:.3f}"


def swapped(codes: Tensor) -> Tensor:
    """Swap neighbouring columns, as a reader of the wrong half of a byte does."""
    even = codes.shape[1] // 2 * 2
    order = torch.arange(even).reshape(-1, 2).flip(1).flatten()
    return torch.cat((codes[:, order], codes[:, even:]), 1)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation of two tensors."""
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0


def judge_plain(
    name: str, now: Tensor, before: Tensor | None, factors: list[Tensor]
) -> TensorVerdict:
    """Judge a tensor that is not quantised: the base's bits, its values in another dtype, or divided by factors."""
    n = now.numel()
    if before is None:
        if name.endswith(ADDED):
            return TensorVerdict(name, LEFT, n, figures={"added by quantisation": "yes"})
        return TensorVerdict(name, WRONG, n, n, "the base has no such tensor")
    if now.shape != before.shape:
        shapes = f"shape {list(now.shape)}, the base has {list(before.shape)}"
        return TensorVerdict(name, WRONG, n, n, shapes)
    if bits.equal(now, before):
        return TensorVerdict(name, LEFT, n)
    may_cast = now.dtype != before.dtype and now.is_floating_point() and now.dtype not in FP8
    if may_cast and bits.equal(now, before.to(now.dtype)):
        return TensorVerdict(name, LEFT, n, figures={"cast": str(now.dtype)})
    found = bits.first_difference(now, before.to(now.dtype))
    count = n if found is None or found.count is None else int(found.count)
    if now.ndim == 1 and now.is_floating_point():
        for columns in factors:
            if columns.shape == now.shape:
                apart = (now.double() * columns / before.double() - 1).abs()
                if float(apart.nan_to_num(0.0).max()) < 2**-4:
                    return TensorVerdict(
                        name, LEFT, n, figures={"divided by columns' factors": "yes"}
                    )
    cause = f"not quantised, but {count:,} elements differ from the base"
    if not bool(torch.isfinite(now.double()).all()):
        cause = f"NaN or infinity: {cause}"
    return TensorVerdict(name, WRONG, n, count, cause)
