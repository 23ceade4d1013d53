"""Compare products with the order of addition: revealed trees of the native ones, and bits on hard values."""

from __future__ import annotations

import torch

from isobit.errors import RevealError, in_one_line
from isobit.foundation import native
from isobit.foundation.records import Attestation
from isobit.ops.attesting import wide_values
from isobit.order.addition import digest
from isobit.order.evaluate import ENGINES, evaluate, expected_tree, feature_segments
from isobit.reveal.targets import products
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import reveal

# 1 and 5 take the paths for few rows, 33 leaves a tail in the tile engine, 130 a second tile.
ROW_COUNTS = (1, 5, 33, 130)
# Two segments; one long segment of many leaves, the last of them short; a leaf that is not a multiple of the engine's
# block.
EXTENTS = (512, 4099, 300)


def attest_kernels() -> tuple[Attestation, ...]:
    """Return one attestation per dtype that has native kernels."""
    return tuple(
        attest_dtype(dtype, "amx" if dtype == torch.bfloat16 and native.pairs_bf16() else "chain")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def attest_dtype(dtype: torch.dtype, engine: str) -> Attestation:
    """Reveal the tree at several row counts, then compare values with the exact evaluator."""
    name, checks = str(dtype).removeprefix("torch."), 0
    extent = EXTENTS[0]
    expected = digest(expected_tree(feature_segments(extent, engine), engine))
    for rows in ROW_COUNTS:
        checks += 1
        try:
            found = reveal(forward_target(dtype, rows, extent), arithmetic=False).order_digest
        except RevealError as error:
            return Attestation(name, engine, False, checks, f"{rows} rows: {in_one_line(error)}")
        if found != expected:
            detail = f"{rows} rows: tree {found[:8]}, expected {expected[:8]}"
            return Attestation(name, engine, False, checks, detail)
    for extent in EXTENTS:
        checks += 1
        if not values_agree(dtype, engine, extent):
            detail = f"values at extent {extent} differ from the exact evaluator"
            return Attestation(name, engine, False, checks, detail)
    return Attestation(name, engine, True, checks, f"tree {expected[:8]}")


def forward_target(dtype: torch.dtype, rows: int, extent: int) -> TensorTarget:
    """Return the sum of y over K as a target: in the last of `rows` rows, before it is rounded."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.isobit.linear_roots(x, weight, extent, 0)[0]  # type: ignore[no-any-return]

    return products.linear(extent, rows, dtype=dtype, row=rows - 1, function=run)


def values_agree(dtype: torch.dtype, engine: str, extent: int) -> bool:
    """Return whether two rows by one column of hard values equal the evaluator's, bit for bit."""
    generator = torch.Generator().manual_seed(extent)
    x, weight = (wide_values((n, extent), dtype, generator) for n in (2, 1))
    got = torch.ops.isobit.linear_roots(x, weight, extent, 0)[0, :, 0]
    segments = feature_segments(extent, engine)
    column = weight[0].double().tolist()
    want = [
        evaluate(segments, list(zip(row, column, strict=True)), ENGINES[engine])
        for row in x.double().tolist()
    ]
    return torch.equal(got, torch.tensor(want, dtype=torch.float32))
