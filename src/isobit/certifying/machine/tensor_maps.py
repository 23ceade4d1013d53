"""Tensor maps: how a bulk copy (TMA) finds the elements of a box in a tensor, and lays them into shared memory.

A map has the address, sizes and strides of a tensor, the sizes of a box, and a swizzle. Dimension 0 is the one
whose elements are side by side. Elements of a box that are outside the tensor are zeros when it is copied to
shared memory, and are left out when it is copied from there (PTX ISA, "Tensors" and "tensormap.replace").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.certifying.machine.matrix_descriptors import swizzled
from isobit.certifying.machine.memory import Buffer

Addresses = npt.NDArray[np.int64]
Fail = Callable[[str], Exception]

# Codes of tensormap.replace (PTX ISA, table of .elemtype and of .swizzle_mode).
ELEMENT_BYTES = {1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 10: 2}
SWIZZLE_LINES = {0: 0, 1: 32, 2: 64, 3: 128}
SCALARS = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
BY_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")


@dataclass
class TensorMap:
    """The fields of a map: scalars under their name, others under (name, dimension)."""

    fields: dict[str | tuple[str, int], int] = field(default_factory=dict)
    ready: bool = False  # Whether a fence made it usable for copies.

    def get(self, name: str, dimension: int | None, fail: Fail) -> int:
        """Return a field; one that was never written cannot be used."""
        key = name if dimension is None else (name, dimension)
        if key not in self.fields:
            raise fail(f"a tensor map without {name}")
        return self.fields[key]

    def box(
        self, at: list[int], shared: int, fail: Fail
    ) -> tuple[Addresses, Addresses, npt.NDArray[np.bool_], int]:
        """Return the elements of the box at these coordinates, as flat arrays.

        Returns:
            Addresses in global memory, addresses in shared memory, which elements are inside the tensor, and
            the bytes of an element.
        """
        rank = self.get("rank", None, fail) + 1
        size = ELEMENT_BYTES.get(self.get("elemtype", None, fail), 0)
        line = SWIZZLE_LINES.get(self.get("swizzle_mode", None, fail))
        if rank != len(at) or not size or line is None:
            raise fail(f"a tensor map of rank {rank}, element type or swizzle that is not known")
        strides = [1 if d == 0 else self.get("global_stride", d - 1, fail) for d in range(rank)]
        boxes = [self.get("box_dim", d, fail) for d in range(rank)]
        odd = [self.get("element_stride", d, fail) != 1 for d in range(rank)]
        odd += [self.get(name, None, fail) != 0 for name in ("interleave_layout", "fill_mode")]
        odd += [each % 16 != 0 for each in strides[1:]]
        if any(odd) or (line and (boxes[0] * size > line or shared % (8 * line))) or shared % 128:
            raise fail(
                "a tensor map with strides of elements, interleaving, or addresses not aligned"
            )
        address = np.full([1] * rank, self.get("global_address", None, fail), np.int64)
        dense, inside = np.zeros([1] * rank, np.int64), np.ones([1] * rank, bool)
        pitch = size
        for dimension in range(rank):
            shape = [1] * rank
            shape[rank - 1 - dimension] = boxes[dimension]
            step = np.arange(boxes[dimension]).reshape(shape)
            index = at[dimension] + step
            address = address + index * (size if dimension == 0 else strides[dimension])
            inside = inside & (index >= 0) & (index < self.get("global_dim", dimension, fail))
            dense = dense + step * pitch
            pitch *= boxes[dimension]
        placed = shared + dense
        return (
            address.reshape(-1),
            (swizzled(placed, line) if line else placed).reshape(-1),
            inside.reshape(-1),
            size,
        )


@dataclass
class TensorArgument:
    """A tensor descriptor that the host passes: an argument of a kernel, in place of a Buffer.

    Args:
        buffer: the tensor's memory.
        shape: sizes, the outermost dimension first.
        strides: in elements; the last is 1.
        metadata: what the compiler chose, one entry of Triton's `metadata.tensordesc_meta`: "swizzle",
            "elem_type" and "block_size".
        padding: what elements outside the tensor are: "zero"; anything else is refused when it is used.

    The kernel has parameters for the map, then for each size, then for each stride: see `arguments`.
    """

    buffer: Buffer
    shape: Sequence[int]
    strides: Sequence[int]
    metadata: Mapping[str, Any]
    padding: str = "zero"

    def arguments(self) -> list[TensorArgument | int]:
        """Return what stands in the list of arguments for this descriptor."""
        return [self, *self.shape, *self.strides]

    def tensor_map(self) -> TensorMap:
        """Return the map, when the buffer has its address."""
        rank, size = len(self.shape), self.buffer.data.dtype.itemsize
        made = TensorMap(ready=True)
        made.fields = {
            "global_address": self.buffer.base,
            "rank": rank - 1,
            "elemtype": int(self.metadata["elem_type"]),
            "interleave_layout": 0,
            "swizzle_mode": int(self.metadata["swizzle"]),
            "fill_mode": int(self.padding != "zero"),
        }
        for d in range(rank):
            outer = rank - 1 - d
            made.fields["box_dim", d] = int(self.metadata["block_size"][outer])
            made.fields["global_dim", d] = int(self.shape[outer])
            made.fields["element_stride", d] = 1
            if d:
                made.fields["global_stride", d - 1] = int(self.strides[outer]) * size
        return made
