"""Which axis of a tensor counts rows: found from its shapes at two numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.errors import UnsupportedError


@dataclass(frozen=True)
class RowAxis:
    """The axis that counts rows, with `per_row` entries for each row (rows are outermost in it)."""

    axis: int
    per_row: int


def find_row_axis(
    what: str, shape: Sequence[int], rows: int, other_shape: Sequence[int], other_rows: int
) -> RowAxis | None:
    """Return the axis whose size changes with the number of rows, or None if no size does.

    Args:
        what: the tensor, for messages.
        shape: its shape at `rows` rows.
        rows: a number of rows.
        other_shape: its shape at `other_rows` rows.
        other_rows: another number of rows.

    Raises:
        UnsupportedError: If several axes change, or one that is no multiple of the rows.

    Example:
        >>> find_row_axis("x", [3, 64], 3, [70, 64], 70)
        RowAxis(axis=0, per_row=1)
        >>> find_row_axis("scores", [24, 16], 3, [560, 16], 70)
        RowAxis(axis=0, per_row=8)
    """
    sizes = f"{list(shape)} at {rows} rows and {list(other_shape)} at {other_rows} rows"
    if len(shape) != len(other_shape):
        raise UnsupportedError(
            expected=f"{what} to have as many axes at any number of rows",
            received=sizes,
            remedy="keep the number of axes the same",
        )
    changed = [i for i, (a, b) in enumerate(zip(shape, other_shape, strict=True)) if a != b]
    if not changed:
        return None
    axis = changed[0]
    per_row, left = divmod(shape[axis], rows)
    if len(changed) > 1 or left or other_shape[axis] != per_row * other_rows:
        raise UnsupportedError(
            expected=f"one axis of {what} to be rows, or rows times a fixed number",
            received=sizes,
            remedy="give rows an axis of their own; make scratch memory with torch.empty",
        )
    return RowAxis(axis, per_row)


def describe_shape(shape: Sequence[int], found: RowAxis | None) -> str:
    """Return a shape as text: "rows × 256", "rows·8 × 64" or "256 × 64"."""
    parts = [str(size) for size in shape]
    if found is not None:
        parts[found.axis] = "rows" if found.per_row == 1 else f"rows·{found.per_row}"
    return " × ".join(parts) or "one number"


def row_shape(shape: tuple[int, ...], axis: RowAxis) -> tuple[int, ...]:
    """Return the shape of one row."""
    inner = () if axis.per_row == 1 else (axis.per_row,)
    return (*shape[: axis.axis], *inner, *shape[axis.axis + 1 :])
