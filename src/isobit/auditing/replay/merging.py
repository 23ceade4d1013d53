"""Sums over samples: what one call with all samples must equal, from one call per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isobit.auditing.replay.call import form_of, operator_name
from isobit.order.plan import LEAF
from isobit.order.samples import segment_size
from isobit.order.tree import merge

MIXED_OURS = "adds over samples in isobit's order, so that its result is no sample's row"


def is_ours(func: Any) -> bool:
    """Return whether an operator is isobit's and can compute a share of a batch's gradient."""
    names, _, _ = form_of(func)
    return operator_name(func).startswith("isobit::") and "of" in names and "spans" in names


def ask_for_share(func: Any, flat: list[Any], of: int, samples: int = 1) -> list[Any]:
    """Return the arguments with which isobit's operator computes some samples' part of a sum over `of`, not rounded.

    One sample's part is asked for as a share of two samples: its value does not depend on where it is in the batch,
    and every share stays in fp32.

    Args:
        func: The operator.
        flat: Its arguments for one sample; spans, where they are given, are those of the variant's own call.
        of: The number of samples of the audited run.
        samples: How many of them the arguments have; several have equally many rows.

    Raises:
        IndexError: If the sum is not one of samples' sums; see `is_sum_of_samples`.
    """
    names, _, _ = form_of(func)
    made = list(flat)
    if made[names.index("of")] > samples:
        return made  # the variant ran in a share of the batch, and these are its own samples
    first = next(v for v in flat if isinstance(v, Tensor))
    heads = "heads" in names and bool(flat[names.index("heads")])  # [..., heads, features]
    rows = first.shape[: -2 if heads else -1].numel()
    if samples > 1:
        size = rows // samples
        made[names.index("spans")] = torch.tensor([[at * size, size] for at in range(samples)])
        made[names.index("of")] = of
        return made
    at = names.index("spans")
    if not isinstance(made[at], Tensor) or len(made[at]) != 1:
        made[at] = torch.tensor([[0, rows]])
    if not is_sum_of_samples(of, int(made[at][0, 1])):
        raise IndexError(
            f"isobit adds {segment_size(of)} samples of {of} in one segment, leaf by leaf, so that one sample's part "
            f"of more than {LEAF} rows is not defined"
        )
    made[names.index("of")] = 2
    return made


def is_sum_of_samples(of: int, rows: int) -> bool:
    """Return whether isobit's sum over samples is one of sums per sample.

    Segments with one sample each are; so are segments of several samples, each of them one leaf.
    """
    return segment_size(of) == 1 or rows <= LEAF


class Parts:
    """Each sample's parts of sums over samples, by storage, for as long as the sum is alive."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, list[Tensor]]] = {}

    def put(self, whole: Tensor, parts: Sequence[Tensor]) -> None:
        """Keep the parts of a sum, in the sum's own layout."""
        storage = whole.untyped_storage()
        offset = whole.storage_offset()
        if offset or not all(part.shape == whole.shape for part in parts):
            return
        made = [
            torch.empty_strided(p.shape, whole.stride(), dtype=p.dtype, device=p.device).copy_(p)
            for p in parts
        ]
        self._kept[storage._cdata] = (StorageWeakRef(storage), made)  # type: ignore[no-untyped-call]

    def get(self, tensor: Tensor) -> list[Tensor] | None:
        """Return the parts of a sum, or of a view of one."""
        found = self._kept.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            return None
        reach = sum(n and (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.storage_offset() + reach
        if any(end >= part.untyped_storage().nbytes() // part.element_size() for part in found[1]):
            return None
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return [part.as_strided(shape, stride, offset) for part in found[1]]


def merge_parts(parts: Sequence[Tensor], ours: bool, dtype: torch.dtype) -> Tensor:
    """Merge the results of one call per sample: by isobit's tree, or one after another as autograd adds them."""
    if ours:
        size = segment_size(len(parts))
        leaves = [add_all(parts[at : at + size]) for at in range(0, len(parts), size)]
        return merge(leaves, torch.add).to(dtype)
    return add_all(parts).to(dtype)


def add_all(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors from left to right in their own dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
