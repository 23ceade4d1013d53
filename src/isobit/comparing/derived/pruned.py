"""Check a pruned checkpoint: the stated share of zeros in every layer, N:M groups, and what was not to be touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path

import torch
from torch import Tensor

from isobit import bits
from isobit.comparing.checkpoints.compare import shapes_of
from isobit.comparing.checkpoints.names import match_names
from isobit.comparing.checkpoints.readers import read_checkpoint
from isobit.comparing.derived.loading import Loader
from isobit.comparing.derived.packed import Codes, find_packed
from isobit.comparing.derived.records import (
    LEFT,
    STATED,
    WRONG,
    Derivation,
    Progress,
    TensorVerdict,
    is_linear_weight,
)
from isobit.comparing.tensor_files import Checkpoint, unreadable
from isobit.errors import ArgumentError


@dataclass(frozen=True)
class Pruning:
    """What a checkpoint is said to be.

    Attributes:
        sparsity: the share of zeros, None if only N:M is stated.
        n_m: at most N of M neighbours along the last axis are not zero.
        at_least: whether more zeros than stated are accepted.
        updated: whether kept weights may differ from the base, as after SparseGPT.
        targets: names of pruned weights, as a regular expression; None for weights of linear layers.
        ignore: names of weights among them that were left out.
    """

    sparsity: Fraction | None = None
    n_m: tuple[int, int] | None = None
    at_least: bool = False
    updated: bool = False
    targets: re.Pattern[str] | None = None
    ignore: re.Pattern[str] | None = None

    def __str__(self) -> str:
        said = (
            [] if self.sparsity is None else [f"{float(self.sparsity):g} of the weights are zero"]
        )
        if self.n_m is not None:
            said.append(f"at most {self.n_m[0]} of {self.n_m[1]} neighbours are not zero")
        return " and ".join(said)

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a weight is said to be pruned."""
        if self.ignore is not None and self.ignore.search(name):
            return False
        if self.targets is not None:
            return bool(self.targets.search(name)) and len(shape) >= 1
        return is_linear_weight(name, shape)


@dataclass(frozen=True)
class Weight:
    """A weight of a pruned checkpoint, in whatever layout: its name, shape, stored parts, and how to read it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    load: Callable[[], Tensor]
    layout: str = ""


def check_pruned(
    path: Path | str,
    stated: Pruning,
    base: Path | str | None = None,
    *,
    progress: Progress | None = None,
) -> Derivation:
    """Count the zeros of every weight that is said to be pruned.

    Args:
        path: The pruned checkpoint: dense, with masks of torch.nn.utils.prune, as bitmasks of compressed-tensors, or
            quantised.
        stated: What it is said to be.
        base: The checkpoint that it was made from. Then kept weights and weights that are no target must have its bits.
        progress: Called after each tensor with its number, the number of all, and its name.

    Returns:
        A verdict per tensor. Zeros are right if the tensor has the stated share, rounded down or up, or if each of its
        rows has.

    Raises:
        ArgumentError: If nothing was stated, or a checkpoint cannot be read.
        OSError: If a file is not there or is not a regular file.
    """
    if stated.sparsity is None and stated.n_m is None:
        raise ArgumentError(
            expected="a share of zeros, or N:M",
            received="neither",
            remedy="--sparsity 0.5, or --n-m 2:4",
        )
    found = read_checkpoint(Path(path))
    weights = list(find_weights(found))
    original = None if base is None else Original(read_checkpoint(Path(base)), weights)
    verdicts = []
    for number, weight in enumerate(weights, 1):
        verdicts.append(judge(weight, stated, original))
        if progress is not None:
            progress(number, len(weights), weight.name)
    notes = [f"{one.layout}: {one.name}" for one in weights if one.layout][:3]
    if original is not None:
        verdicts += [
            TensorVerdict(name, WRONG, 0, cause="the base has it, this checkpoint does not")
            for name in original.missing
        ]
    return Derivation(str(path), str(stated), tuple(verdicts), (*found.notes, *notes))


class Original:
    """The weights before pruning, by the names of those after."""

    def __init__(self, checkpoint: Checkpoint, weights: list[Weight]) -> None:
        """Match the names of both."""
        matching = match_names({w.name: w.shape for w in weights}, shapes_of(checkpoint))
        self.sides = {str(pair.left): pair.right for pair in matching.pairs}
        tied = {name for name in matching.only_right if name in checkpoint.ties}
        self.missing = [name for name in matching.only_right if name not in tied]
        self.loader = Loader(checkpoint)

    def load(self, name: str) -> Tensor | None:
        """Read the weight before pruning; None if there is none."""
        side = self.sides.get(name)
        return None if side is None else self.loader.side(side)


def find_weights(found: Checkpoint) -> Iterator[Weight]:
    """Return every tensor of a checkpoint as the weight that it stands for."""
    used = set()
    for name, packed in find_packed(found).items():
        used |= set(packed.parts)
        shape = tuple(packed.load().codes.shape)
        yield Weight(name, shape, packed.parts, quantised_zeros(packed.load), packed.layout)
    for name, stored in found.tensors.items():
        if name in used:
            continue
        if name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in found.tensors:
            plain = name.removesuffix("_orig")
            mask = f"{plain}_mask"
            used |= {name, mask}
            load = masked(found, name, mask)
            yield Weight(plain, stored.shape, (name, mask), load, "torch.nn.utils.prune")
        elif name.endswith(".bitmask"):
            plain = name.removesuffix(".bitmask")
            parts = tuple(
                f"{plain}.{part}"
                for part in ("bitmask", "compressed", "shape", "row_offsets")
                if f"{plain}.{part}" in found.tensors
            )
            used |= set(parts)
            weight = bitmasked(found, plain)
            yield Weight(plain, tuple(weight().shape), parts, weight, "bitmask")
    for name, stored in found.tensors.items():
        if name not in used:
            yield Weight(name, stored.shape, (name,), stored.load)


def quantised_zeros(load: Callable[[], Codes]) -> Callable[[], Tensor]:
    """Return a reader of the values of codes: zero exactly where the code is the zero point."""
    return lambda: load().values()


def masked(found: Checkpoint, weight: str, mask: str) -> Callable[[], Tensor]:
    """Return a reader of weight × mask."""
    return lambda: found.tensors[weight].load() * found.tensors[mask].load()


def bitmasked(found: Checkpoint, name: str) -> Callable[[], Tensor]:
    """Return a reader of compressed-tensors' bitmasks: a bit per element, and the kept values in sequence."""

    def load() -> Tensor:
        mask, values, sizes = (
            found.tensors[f"{name}.{part}"].load() for part in ("bitmask", "compressed", "shape")
        )
        shape = tuple(int(size) for size in sizes.tolist())
        if (
            len(shape) != 2
            or mask.dtype != torch.uint8
            or mask.shape != (shape[0], -(-shape[1] // 8))
        ):
            raise unreadable(found.path, "a bit per element", f"{list(mask.shape)} of {name}")
        places = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        kept = places.reshape(shape[0], -1)[:, : shape[1]].bool()
        if int(kept.sum()) != values.numel():
            raise unreadable(
                found.path,
                f"a value for each of the {int(kept.sum()):,} bits of {name}",
                f"{values.numel():,}",
            )
        dense = torch.zeros(shape, dtype=values.dtype)
        dense[kept] = values.flatten()
        return dense

    return load


def judge(weight: Weight, stated: Pruning, original: Original | None) -> TensorVerdict:
    """Judge one tensor."""
    now, before = weight.load(), None if original is None else original.load(weight.name)
    n = now.numel()
    if not stated.takes(weight.name, weight.shape):
        if before is not None and not bits.equal(now, before):
            count = changed(now, before)
            return TensorVerdict(weight.name, WRONG, n, count, "no target, but not the base's bits")
        return TensorVerdict(weight.name, LEFT, n)
    zero = now == 0
    zeros = int(zero.sum())
    figures: dict[str, float | int | str] = {"zeros": zeros, "sparsity": zeros / max(n, 1)}
    wrong, cause = 0, ""
    if now.is_floating_point() and not bool(torch.isfinite(now).all()):
        wrong, cause = int((~torch.isfinite(now)).sum()), "NaN or infinity"
    if not cause and stated.n_m is not None:
        wrong, cause = judge_groups(zero, *stated.n_m)
    if not cause and stated.sparsity is not None:
        wrong, cause = judge_share(zero, stated.sparsity, stated.at_least)
    if not cause and before is not None:
        wrong, cause = judge_kept(now, before, zero, stated.updated)
    if original is not None and before is None and not cause:
        wrong, cause = n, "the base has no such weight"
    return TensorVerdict(weight.name, WRONG if cause else STATED, n, wrong, cause, figures)


def changed(now: Tensor, before: Tensor) -> int:
    """Return how many elements have other bits; all if dtype or shape differ."""
    found = bits.first_difference(now, before)
    return now.numel() if found is None or found.count is None else int(found.count)


def judge_share(zero: Tensor, sparsity: Fraction, at_least: bool) -> tuple[int, str]:
    """Return by how many zeros a tensor misses its share, and how."""
    n, zeros = zero.numel(), int(zero.sum())
    low, high = floor(sparsity * n), ceil(sparsity * n)
    of_rows = zero.reshape(-1, zero.shape[-1]).sum(-1) if n else torch.zeros(1)
    width = zero.shape[-1]
    rows_fit = bool((of_rows >= floor(sparsity * width)).all())
    rows_fit &= at_least or bool((of_rows <= ceil(sparsity * width)).all())
    if rows_fit or (zeros >= low and (at_least or zeros <= high)):
        return 0, ""
    share = (
        f"{zeros:,} of {n:,} weights are zero ({zeros / n:.6f}), {float(sparsity):g} are {low:,}"
    )
    if not zeros:
        return low, f"not pruned: {share}"
    return abs(zeros - low), f"{'fewer' if zeros < low else 'more'} zeros than stated: {share}"


def judge_groups(zero: Tensor, n: int, m: int) -> tuple[int, str]:
    """Return how many groups of M neighbours have more than N weights, and where the first is."""
    if zero.shape[-1] % m:
        return zero.numel(), f"rows of {zero.shape[-1]} are no groups of {m}"
    kept = (~zero).reshape(*zero.shape[:-1], -1, m).sum(-1)
    bad = kept > n
    count = int(bad.sum())
    if not count:
        return 0, ""
    if not bool(zero.any()):
        return zero.numel(), "not pruned: no weight is zero"
    at = [int(i) for i in bad.nonzero()[0]]
    where = f"first at row {at[:-1]}, columns {at[-1] * m} to {at[-1] * m + m - 1}"
    said = f"{count:,} of {bad.numel():,} groups of {m} have more than {n} weights, {where}"
    if zero.ndim == 2 and zero.shape[0] % m == 0:
        other = (~zero).mT.reshape(zero.shape[1], -1, m).sum(-1)
        if bool((other <= n).all()):
            said = f"groups run along columns, not along rows: {said}"
    return count, said


def judge_kept(now: Tensor, before: Tensor, zero: Tensor, updated: bool) -> tuple[int, str]:
    """Return how many kept weights differ from the base."""
    if now.shape != before.shape:
        return now.numel(), f"shape {list(now.shape)}, the base has {list(before.shape)}"
    if updated:
        return 0, ""
    if now.dtype != before.dtype:
        return now.numel(), f"{now.dtype}, the base has {before.dtype}"
    kept = torch.where(zero, torch.zeros_like(now), now)
    wanted = torch.where(zero, torch.zeros_like(now), before)
    if bits.equal(kept, wanted):
        return 0, ""
    count = changed(kept, wanted)
    return count, f"{count:,} kept weights differ from the base (SparseGPT does this: --updated)"
