"""Compare two dumps: align their entries, then compare each pair by the strongest thing that both have."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobit import bits
from isobit.comparing.dumps.align import Pair, align
from isobit.comparing.dumps.load import load_dump
from isobit.comparing.dumps.records import (
    BITS,
    DIGEST,
    HASH,
    Dump,
    DumpComparison,
    Entry,
    NotCompared,
    PlaceDifference,
    Unreadable,
)
from isobit.comparing.dumps.tensor_files import TensorReader, UnreadableError
from isobit.errors import ArgumentError, in_one_line
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import Difference

# Compare the values of two entries: bits, ulps and the largest difference.


@dataclass(frozen=True)
class Verdict:
    """How two values differ; `what` is empty if they do not.

    Attributes:
        what: "", "bits", "shape", "dtype", "value" or "outputs".
        detail: how they differ, in words.
        shortened: whether only the common rows were compared.
    """

    what: str = ""
    detail: str = ""
    difference: Difference | None = None
    ulps: int | None = None
    largest: float | None = None
    shortened: bool = False


def compare_values(left: Any, right: Any, common_rows: bool) -> Verdict:
    """Compare two tensors bit by bit, or two plain values.

    Args:
        left: A tensor or a plain value.
        right: The same of the other run.
        common_rows: Whether to compare what both have, if one tensor is longer along one axis.

    Returns:
        How they differ.

    Example:
        >>> from isobit.comparing.dumps.compare import compare_values
        >>> compare_values(torch.ones(1, 2), torch.ones(8, 2), common_rows=False).detail
        'shape [1, 2] and [8, 2]: the left may be the first 1 of 8 rows of the right'
        >>> compare_values(torch.ones(1, 2), torch.ones(8, 2), common_rows=True).what
        ''
    """
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        if type(left) is type(right) and repr(left) == repr(right):
            return Verdict()
        return Verdict("value", f"{_short(left)} and {_short(right)}")
    left, right = _plain(left), _plain(right)
    shortened = False
    if left.shape != right.shape:
        axis = longer_axis(tuple(left.shape), tuple(right.shape))
        if axis is None or not common_rows:
            return Verdict("shape", describe_shapes(tuple(left.shape), tuple(right.shape)))
        rows = min(left.shape[axis], right.shape[axis])
        left, right = left.narrow(axis, 0, rows), right.narrow(axis, 0, rows)
        shortened = True
    if left.dtype != right.dtype:
        largest = _largest(left.reshape(-1), right.reshape(-1))
        return Verdict(
            "dtype", f"dtype {_name(left)} and {_name(right)}", None, None, largest, shortened
        )
    found = bits.first_difference(left, right)
    if found is None:
        return Verdict(shortened=shortened)
    at = _differing(left, right)
    left, right = left.reshape(-1)[at], right.reshape(-1)[at]
    return Verdict("bits", str(found), found, _ulps(left, right), _largest(left, right), shortened)


def longer_axis(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return the axis along which one shape is longer, if it is the only one that differs."""
    if len(left) != len(right):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    return differing[0] if len(differing) == 1 else None


def describe_shapes(left: tuple[int, ...], right: tuple[int, ...]) -> str:
    """Describe two shapes that differ, and whether one may be the first rows of the other."""
    text = f"shape {list(left)} and {list(right)}"
    axis = longer_axis(left, right)
    if axis is None:
        return text
    rows = "rows" if axis == 0 else f"along axis {axis}"
    few, many = sorted((left[axis], right[axis]))
    shorter, longer = ("left", "right") if left[axis] == few else ("right", "left")
    return f"{text}: the {shorter} may be the first {few} of {many} {rows} of the {longer}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:  # its bits cannot be viewed as integers: torch crashes
        raise TypeError("a quantized tensor has no plain values")
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg()


def _differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return flat indices of the elements that differ in any bit."""
    wrong = bits.as_integers(left) != bits.as_integers(right)
    if left.is_complex():
        wrong = wrong.any(-1)
    return wrong.reshape(-1).nonzero().reshape(-1)


def _largest(left: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the largest |difference|, or None if it is not finite."""
    if not left.numel():
        return None
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    found = float((left.to(wide) - right.to(wide)).abs().max())
    return found if math.isfinite(found) else None


def _ulps(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Return the largest distance in ULPs of elements that are not NaN, or None if there is none."""
    if not left.is_floating_point():
        return None
    numbers = ~(left.float().isnan() | right.float().isnan())
    left, right = left[numbers], right[numbers]
    if not left.numel():
        return None
    a, b = _steps(left), _steps(right)
    opposite = (a < 0) != (b < 0)  # only there the distance may exceed an int64
    far = a.double().abs() + b.double().abs()
    near = (a - b).abs()
    largest = [int(near[~opposite].max())] if bool((~opposite).any()) else []
    if bool(opposite.any()):
        at = int(torch.where(opposite, far, -1.0).argmax())
        largest.append(abs(int(a[at])) + abs(int(b[at])))
    return max(largest)


def _steps(values: torch.Tensor) -> torch.Tensor:
    """Return each number's place among all numbers of its dtype, 0 for both zeros."""
    found = bits.as_integers(values).to(torch.int64)
    size = values.element_size()
    if size == 8:
        return torch.where(found < 0, torch.iinfo(torch.int64).min - found, found)
    sign = 1 << (8 * size - 1)
    found = found & (2 * sign - 1)
    return torch.where(found >= sign, sign - found, found)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


ROWS = ("all", "common")
_SOUND = re.compile(r"[0-9a-f]{32,}")  # a digest, such as isobit.bits.digest
_BLIND = ("nan", "inf", "-inf")

UNSOUND = (
    "DebugMode's hashes miss differences: `norm` a changed sign, both of them rows in another order. "
    "Equal hashes mean that no difference was seen, not that there is none. "
    "DebugMode.log_tensor_hashes(isobit.bits.digest) sees every bit."
)


def compare_dumps(
    left: str | Path,
    right: str | Path,
    *,
    rows: str = "all",
    progress: Callable[[int, int], None] | None = None,
) -> DumpComparison:
    """Compare two dumps of two runs and name the first and all places that differ.

    A dump is the text of `DebugMode.debug_string()`, a file of `save_debug_log`, a folder of SGLang's dumper, or a
    tensor file or folder of tensor files (.pt, .safetensors) that are named by tensor. Files are never unpickled
    beyond tensors and plain values.

    Args:
        left: A file or folder.
        right: A file or folder. It may have another format, if both have something in common to compare.
        rows: "all" to report shapes that differ, or "common" to compare the rows that both sides have, if one
            tensor is longer along one axis: for a run of one sample against a batch that begins with it.
        progress: Called with the number of pairs that were compared and their total.

    Returns:
        A record of what differs, of what could not be compared, and of what has no partner.

    Raises:
        ArgumentError: If a dump has no entries, or `rows` is neither.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isobit.comparing.dumps import compare_dumps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, hash in (("a", 1.0), ("b", 2.0)):
        ...         line = f"    aten::neg(t: f32[2])  ->  t: f32[2]  # {{'hash': {hash}}}"
        ...         _ = Path(folder, name).write_text(line)
        ...     found = compare_dumps(Path(folder, "a"), Path(folder, "b"))
        >>> found.first.left, found.first.detail, found.exit_code
        ('aten::neg call 0', 'hash 1.0 and 2.0', 1)
    """
    if rows not in ROWS:
        raise ArgumentError(
            expected="rows='all' or rows='common'", received=repr(rows), remedy="use one of them"
        )
    dumps = load_dump(Path(left)), load_dump(Path(right))
    pairs = align(dumps[0].entries, dumps[1].entries)
    comparing = _Comparing(rows == "common")
    for done, pair in enumerate(pairs):
        comparing.compare(pair)
        if progress is not None:
            progress(done + 1, len(pairs))
    partners = {p.left.position for p in pairs}, {p.right.position for p in pairs}
    lone = [
        tuple(_shown(e) for e in dump.entries if e.position not in known)
        for dump, known in zip(dumps, partners, strict=True)
    ]
    return DumpComparison(
        left=one_line(str(left)),
        right=one_line(str(right)),
        formats=(dumps[0].format, dumps[1].format),
        entries=(len(dumps[0].entries), len(dumps[1].entries)),
        rows=rows,
        ordered=dumps[0].ordered,
        aligned=dict(Counter(pair.alignment for pair in pairs)),
        compared=dict(+comparing.compared),
        shortened=comparing.shortened,
        without_values=comparing.without_values,
        differing=tuple(comparing.differing),
        not_compared=tuple(comparing.not_compared),
        before_first=_before_first(comparing.differing[:1], pairs, dumps),
        only_left=lone[0],
        only_right=lone[1],
        unreadable=tuple(_unreadable(dumps)),
        notes=tuple(comparing.notes(len(pairs))),
    )


class _Comparing:
    """Compares pairs and keeps what was found."""

    def __init__(self, common_rows: bool) -> None:
        self.common_rows = common_rows
        self.readers = TensorReader(), TensorReader()
        self.compared: Counter[str] = Counter()
        self.differing: list[PlaceDifference] = []
        self.not_compared: list[NotCompared] = []
        self.without_values = self.shortened = self.unsound = self.blind = 0

    def compare(self, pair: Pair) -> None:
        left, right = pair.left, pair.right
        if left.stored and right.stored:
            self._by_values(pair)
        elif verdict := self._by_outputs(pair):
            self._add(pair, verdict)
        elif left.digests and right.digests:
            self._by_text(pair, DIGEST, left.digests, right.digests)
        elif left.hashes and right.hashes:
            self._by_text(pair, HASH, left.hashes, right.hashes)
        elif _has_values(left) and _has_values(right):
            self._skip(pair, "the dumps have nothing in common to compare by")
        elif _has_values(left) or _has_values(right):
            lacking = "right" if _has_values(left) else "left"
            self._skip(pair, f"the {lacking} dump has neither values nor hashes of it")
        else:
            self.without_values += 1

    def notes(self, pairs: int) -> list[str]:
        """Return sentences about what limits the result."""
        found = []
        if self.unsound:
            found.append(UNSOUND)
        if self.blind:
            found.append(f"{self.blind} equal hashes are nan or inf, which hide every difference.")
        if pairs and pairs == self.without_values:
            found.append(
                "Neither dump has values or hashes: log with DebugMode.log_tensor_hashes(isobit.bits.digest)."
            )
        return found

    def _by_values(self, pair: Pair) -> None:
        try:
            a, b = (
                dict(reader.read(entry.stored))
                for reader, entry in zip(self.readers, (pair.left, pair.right), strict=True)
                if entry.stored is not None
            )
            if not a and not b:
                self._skip(pair, "neither dump has a value of it")
                return
            verdict = self._compare_all(a, b)
        except UnreadableError as error:
            self._skip(pair, f"unreadable: {error}")
            return
        except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
            # Tensors that have no plain values: meta, quantised, nested.
            self._skip(pair, one_line(in_one_line(error)).split(". ")[0][:120])
            return
        self.compared[BITS] += verdict.what not in ("shape", "outputs")
        self.shortened += verdict.shortened
        if verdict.what:
            self._add(pair, verdict)

    def _compare_all(self, a: dict[str, Any], b: dict[str, Any]) -> Verdict:
        """Compare what two entries hold, path by path; the first difference counts."""
        if a.keys() != b.keys():
            lone = sorted(a.keys() ^ b.keys())
            return Verdict("outputs", f"{len(a)} and {len(b)} values, only one has {lone[:3]}")
        found = Verdict()
        for path in a:
            verdict = compare_values(a[path], b[path], self.common_rows)
            if verdict.what:
                where = f"value {path}: " if path and len(a) > 1 else ""
                return Verdict(**{**verdict.__dict__, "detail": where + verdict.detail})
            found = verdict if verdict.shortened else found
        return found

    def _by_outputs(self, pair: Pair) -> Verdict | None:
        """Compare dtypes and shapes where values are not stored."""
        a, b = pair.left.outputs, pair.right.outputs
        if not a or not b:
            return None
        if len(a) != len(b):
            return Verdict("outputs", f"{len(a)} and {len(b)} tensors")
        for one, other in zip(a, b, strict=True):
            if one.dtype != other.dtype:
                return Verdict("dtype", f"dtype {one.dtype} and {other.dtype}")
            if one.shape != other.shape and one.shape is not None and other.shape is not None:
                return Verdict("shape", describe_shapes(one.shape, other.shape))
        return None

    def _by_text(
        self,
        pair: Pair,
        what: str,
        left: tuple[tuple[str, str], ...],
        right: tuple[tuple[str, str], ...],
    ) -> None:
        if [(path, _kind(text)) for path, text in left] != [(p, _kind(text)) for p, text in right]:
            self._skip(pair, f"hashes of different kinds: {_texts(left)} and {_texts(right)}")
            return
        self.compared[what] += 1
        if what == HASH and not all(_kind(text) == "digest" for _, text in left):
            self.unsound += 1
        if left != right:
            self._add(pair, Verdict(what, f"{what} {_texts(left)} and {_texts(right)}"))
        elif any(text in _BLIND for _, text in left):
            self.blind += 1

    def _add(self, pair: Pair, verdict: Verdict) -> None:
        left, right = pair.left, pair.right
        if verdict.what == "shape" and self.common_rows and not (left.stored and right.stored):
            shapes = [(a.shape, b.shape) for a, b in zip(left.outputs, right.outputs, strict=True)]
            if all(a and b and (a == b or longer_axis(a, b) is not None) for a, b in shapes):
                self._skip(pair, f"{verdict.detail}; rows cannot be compared by a hash")
                return
        self.differing.append(
            PlaceDifference(
                _shown(left),
                _shown(right),
                pair.alignment,
                verdict.what,
                one_line(verdict.detail),
                verdict.difference,
                verdict.ulps,
                verdict.largest,
                one_line(left.source or right.source),
                left.position,
            )
        )

    def _skip(self, pair: Pair, reason: str) -> None:
        self.not_compared.append(
            NotCompared(_shown(pair.left), _shown(pair.right), one_line(reason))
        )


def _shown(entry: Entry) -> str:
    return one_line(entry.name)


def _before_first(
    first: list[PlaceDifference], pairs: tuple[Pair, ...], dumps: tuple[Dump, Dump]
) -> tuple[str, ...]:
    """Return what lies between the first difference and the pair before it, and has no partner."""
    if not first:
        return ()
    at = next(i for i, pair in enumerate(pairs) if pair.left.position == first[0].position)
    ends = pairs[at].left.position, pairs[at].right.position
    begins = (pairs[at - 1].left.position, pairs[at - 1].right.position) if at else (-1, -1)
    known = {pair.left.position for pair in pairs}, {pair.right.position for pair in pairs}
    return tuple(
        f"{side}: {_shown(dumps[i].entries[position])}"
        for i, side in enumerate(("left", "right"))
        for position in range(begins[i] + 1, ends[i])
        if position not in known[i]
    )


def _has_values(entry: Entry) -> bool:
    return bool(entry.stored or entry.digests or entry.hashes)


def _kind(text: str) -> str:
    """Return which function a hash comes from, as far as its text shows."""
    if _SOUND.fullmatch(text):
        return "digest"
    if re.fullmatch(r"-?\d+", text):
        return "integer"
    is_float = text in _BLIND or re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text)
    return "float" if is_float else "text"


def _texts(leaves: tuple[tuple[str, str], ...]) -> str:
    shown = ", ".join(text for _, text in leaves[:3])
    return shown + (f", … ({len(leaves)})" if len(leaves) > 3 else "")


def _unreadable(dumps: tuple[Dump, Dump]) -> list[Unreadable]:
    return [
        Unreadable(one_line(f"{dump.path}: {one.where}"), one_line(one.reason))
        for dump in dumps
        for one in dump.unreadable
    ]
