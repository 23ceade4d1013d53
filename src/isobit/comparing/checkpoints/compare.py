"""Compare two checkpoints tensor by tensor, bit for bit, with at most a few tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from isobit import bits
from isobit.comparing.checkpoints.names import Pair, Side, key_of, match_names
from isobit.comparing.checkpoints.readers import read_checkpoint
from isobit.comparing.checkpoints.records import Comparison, TensorResult, Tie, ValueResult
from isobit.comparing.tensor_files import Checkpoint, Stored, unreadable

CHUNK = 1 << 22  # elements that are converted to fp64 at a time


class Loader:
    """Loads sides of comparisons; keeps the tensor that it loaded last, which the next slice may need."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load tensors of one checkpoint."""
        self.checkpoint = checkpoint
        self.last: tuple[str, torch.Tensor] | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """Return a stored tensor."""
        if self.last is None or self.last[0] != name:
            self.last = None  # frees it before the next one is read
            self.last = (name, self.checkpoint.tensors[name].load())
        return self.last[1]

    def side(self, side: Side) -> torch.Tensor:
        """Return the pieces of a side, put together."""
        found = []
        for piece in side.pieces:
            tensor = self.tensor(piece.name)
            if piece.start is not None and piece.stop is not None:
                tensor = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
            found.append(tensor)
        if len(found) == 1:
            return found[0]
        if len({one.dtype for one in found}) > 1:  # as bits they cannot be put together
            raise unreadable(self.checkpoint.path, "shards of one dtype", f"several for {side}")
        return torch.cat(found, side.dim)


def compare_checkpoints(
    left: Path | str,
    right: Path | str,
    *,
    common_only: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor, bit for bit.

    Args:
        left: A file or folder that `read_checkpoint` can read.
        right: The same.
        common_only: Do not let names that only one of them has decide.
        progress: Called after each tensor with its number, the number of all, and its name.

    Returns:
        The comparison: equal only if every tensor, number and text is the same.

    Raises:
        ArgumentError: If one of them cannot be read.
        OSError: If a file is not there or is not a regular file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.pt"
        >>> torch.save({"weight": torch.ones(2, 2)}, file)
        >>> found = compare_checkpoints(file, file)
        >>> found.equal, len(found.tensors), found.elements, found.bytes
        (True, 1, 4, 16)
    """
    a, b = (read_checkpoint(Path(path)) for path in (left, right))
    matching = match_names(shapes_of(a), shapes_of(b))
    loaders = Loader(a), Loader(b)
    results = []
    for number, pair in enumerate(matching.pairs, 1):
        results.append(compare_pair(pair, *loaders))
        if progress is not None:
            progress(number, len(matching.pairs), pair.name)
    ties = [
        *find_ties(a, b, matching.only_left),
        *find_ties(b, a, matching.only_right),
    ]
    tied = {tie.name for tie in ties}
    values, only_a, only_b, differ = compare_values(a, b)
    return Comparison(
        (str(left), str(right)),
        (a.kind, b.kind),
        tuple(results),
        tuple(n for n in (*matching.only_left, *only_a) if n not in tied),
        tuple(n for n in (*matching.only_right, *only_b) if n not in tied),
        tuple(ties),
        values,
        differ,
        (
            *(f"A: {note}" for note in a.notes),
            *(f"B: {note}" for note in b.notes),
            *matching.notes,
        ),
        common_only,
    )


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors."""
    return {name: tensor.shape for name, tensor in checkpoint.tensors.items()}


def compare_pair(pair: Pair, left: Loader, right: Loader) -> TensorResult:
    """Compare one tensor by its digest, and by its elements if the digests differ."""
    a, b = left.side(pair.left), right.side(pair.right)
    digests = bits.digest(a), bits.digest(b)
    differs = digests[0] != digests[1]
    return TensorResult(
        pair.name,
        str(pair.left),
        str(pair.right),
        pair.how,
        str(a.dtype).removeprefix("torch."),
        tuple(a.shape),
        a.numel(),
        a.numel() * a.element_size(),
        digests,
        bits.first_difference(a, b) if differs else None,
        largest_difference(a, b) if differs else None,
    )


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest |difference| of elements that are finite on both sides, in chunks of fp64."""
    if a.shape != b.shape or torch.float4_e2m1fn_x2 in (a.dtype, b.dtype):
        return None
    largest: float | None = None
    left, right = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), CHUNK):
        x, y = left[start : start + CHUNK], right[start : start + CHUNK]
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        apart = (x.to(wide) - y.to(wide)).abs()
        finite = apart[torch.isfinite(apart)]
        if finite.numel():
            largest = max(largest or 0.0, float(finite.max()))
    return largest


def find_ties(having: Checkpoint, lacking: Checkpoint, names: list[str]) -> list[Tie]:
    """Return which of the names are absent from the other checkpoint because they are tied.

    A tie is shown by the file: two names of one storage, metadata, or a configuration. Equal bits alone do not show
    one, since two tensors of zeros are equal too; but without them there is no tie.
    """
    found = []
    for name in names:
        tensor = having.tensors[name]
        for kept, shown_by in tie_candidates(having, lacking, name, tensor):
            other = having.tensors.get(kept)
            if other is not None and bits.equal(tensor.load(), other.load()):
                found.append(Tie(name, kept, shown_by))
                break
    return found


def tie_candidates(
    having: Checkpoint, lacking: Checkpoint, name: str, tensor: Stored
) -> Iterable[tuple[str, str]]:
    """Return names that the other checkpoint has and that may be tied to this one, with what shows it."""
    keys = {key_of(n, ("model", "state_dict")) for n in lacking.tensors}
    if tensor.memory:
        for other, entry in having.tensors.items():
            same = entry.memory == tensor.memory and other != name
            if same and key_of(other, ("model", "state_dict")) in keys:
                yield other, f"one storage of both names in {having.path.name}"
    for absent, (kept, shown_by) in lacking.ties.items():
        if key_of(absent, ("model", "state_dict")) == key_of(name, ("model", "state_dict")):
            for other in having.tensors:
                if key_of(other, ("model", "state_dict")) == key_of(kept, ("model", "state_dict")):
                    yield other, shown_by


def compare_values(
    a: Checkpoint, b: Checkpoint
) -> tuple[int, list[str], list[str], tuple[ValueResult, ...]]:
    """Compare numbers and texts by name: how many both have, which only one has, and which differ."""
    both = sorted(a.values.keys() & b.values.keys())
    differ = tuple(
        ValueResult(n, a.values[n], b.values[n]) for n in both if a.values[n] != b.values[n]
    )
    only = [sorted(x.values.keys() - y.values.keys()) for x, y in ((a, b), (b, a))]
    return len(both), only[0], only[1], differ
