"""Compare an executor's select_rows with the portable one; there is no native kernel to compare."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, wide_values
from isobit.ops.select_rows import portable

# (shape of x, chosen rows): first and last row out of order, each several blocks of columns and a tail. A GPU compiles
# a kernel for each number of rows and columns, so there is one case; no row is a call that launches nothing.
CASES = (((2, 9, 133), (17, 0, 4)),)


def difference(dtype: torch.dtype, call: Call | None = None) -> str | None:
    """Return what differs first, or None."""
    for shape, chosen in CASES if call is not None else ():
        assert call is not None
        generator = torch.Generator().manual_seed(shape[-1])
        x, rows = wide_values(shape, dtype, generator), torch.tensor(chosen, dtype=torch.int64)
        grad = wide_values((len(chosen), shape[-1]), dtype, generator)
        given = (
            call("select_rows", x, rows),
            call("select_rows_backward", grad, rows, list(shape)),
        )
        expected = (
            portable.select_rows(x, rows),
            portable.select_rows_backward(grad, rows, list(shape)),
        )
        if not all(bits.equal(a, b) for a, b in zip(given, expected, strict=True)):
            return f"select_rows of {list(shape)}"
    return None
