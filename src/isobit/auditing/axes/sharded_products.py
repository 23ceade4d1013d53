"""Make the products of split layers again as tensor-parallel ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.auditing.axes import collectives
from isobit.auditing.axes.tensor_plan import COLUMN, Split
from isobit.auditing.judging.accuracy import ROUNDING, units, worst
from isobit.auditing.judging.findings import Comparison, Finding
from isobit.auditing.labels.labels import Known
from isobit.auditing.records import ERROR, ORDER, Accuracy, Guilty
from isobit.auditing.replay.call import form_of, operator_name
from isobit.auditing.replay.exactness import is_exact
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.recording import Key
from isobit.auditing.replay.replay import Again
from isobit.auditing.replay.watching import Judged, Pair, Watcher
from isobit.parallel.tensor.linear import row_linear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World

AXIS = "tp"
# Where each operator has its input, its weight and its bias, and along which dimension the weight has the inputs.
FORMS: dict[str, tuple[int, int, int | None, int]] = {
    "aten::mm": (0, 1, None, 0),
    "aten::addmm": (1, 2, 0, 0),
    "aten::linear": (0, 1, 2, 1),
    "isobit::linear": (0, 1, 2, 1),
    "isobit::portable_linear": (0, 1, 2, 1),
    "isobit::linear_roots": (0, 1, None, 1),
}
PACKED = "packed"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class SplitProduct(Again):
    """A product of a split layer, computed by simulated ranks."""

    def __init__(self, split: Split, ranks: int) -> None:
        """Split as a layer of the plan over so many ranks."""
        self.split, self.ranks, self.results = split, ranks, []

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Return the arguments themselves: no product writes to them."""
        return list(flat)

    def run(self, func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
        """Compute the product of every rank, and join or add them."""
        at_x, at_weight, at_bias, along = FORMS[operator_name(func)]
        x, weight = flat[at_x], flat[at_weight]
        bias = flat[at_bias] if at_bias is not None else None
        if self.split.by != COLUMN and not is_aten(func):
            return [self.run_ours(x, weight, bias)]
        cut = weight.shape[along if self.split.by != COLUMN else 1 - along]
        if cut % self.ranks:
            raise ValueError(f"{cut} cannot be divided over {self.ranks} ranks")
        if self.split.by == COLUMN:
            return [torch.cat(self.columns(func, flat, x, weight, bias), -1)]
        total = collectives.all_reduce(self.partials(func, flat))
        return [total if bias is None else total + bias]

    def columns(self, func: Any, flat: list[Any], x: Any, weight: Any, bias: Any) -> list[Tensor]:
        """Return every rank's columns of the product."""
        _, at_weight, at_bias, along = FORMS[operator_name(func)]
        names, _, _ = form_of(func)
        found = []
        for rank in range(self.ranks):
            made = list(flat)
            made[at_weight] = shard(weight, 1 - along, rank, self.ranks)
            if PACKED in names:
                made[names.index(PACKED)] = None  # of the whole weight
            if at_bias is not None and bias is not None:
                made[at_bias] = shard(bias, -1, rank, self.ranks)
            found.append(call(func, made))
        return found

    def partials(self, func: Any, flat: list[Any], ranks: int | None = None) -> list[Tensor]:
        """Return every rank's sum over its inputs, without the bias."""
        at_x, at_weight, at_bias, along = FORMS[operator_name(func)]
        count = ranks or self.ranks
        found = []
        for rank in range(count):
            x = shard(flat[at_x], -1, rank, count)
            weight = shard(flat[at_weight], along, rank, count)
            if at_bias is not None:
                weight = weight if along == 0 else weight.t()
                found.append(torch.mm(x, weight) if x.dim() == 2 else torch.matmul(x, weight))
                continue
            made = list(flat)
            made[at_x], made[at_weight] = x, weight
            found.append(call(func, made))
        return found

    def run_ours(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Add the ranks' parts of isobit's product by isobit's split layer, on simulated ranks."""

        def program(rank: int) -> Tensor:
            mine, part = shard(x, -1, rank, self.ranks), shard(weight, 1, rank, self.ranks)
            with torch.no_grad():
                return row_linear(
                    mine, part, bias, tp_group=TensorParallelGroup.of(dist.group.WORLD)
                )

        values: list[Tensor] = World(self.ranks, patience=collectives.PATIENCE).run(program).values
        return values[0]


class SplitHeads(Again):
    """An attention of which every rank has some heads."""

    def __init__(self, ranks: int) -> None:
        """Split the heads over so many ranks."""
        self.ranks, self.results = ranks, []

    def arguments(self, func: Any, flat: list[Any], spec: Any) -> list[Any]:
        """Return the arguments themselves."""
        return list(flat)

    def run(self, func: Any, flat: list[Any], spec: Any) -> list[Tensor]:
        """Compute the attention of every rank's heads, and join them; the second result is only for backward."""
        if any(value.shape[1] % self.ranks for value in flat[:3]):
            raise ValueError(f"the heads cannot be divided over {self.ranks} ranks")
        found = []
        for rank in range(self.ranks):
            made = [self.heads_of(value, rank) for value in flat[:3]]
            mask, scale = flat[5:7]
            if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
                mask = self.heads_of(mask, rank)
            found.append(func(*made, *flat[3:5], attn_mask=mask, scale=scale)[0])
        return [torch.cat(found, 1)]

    def heads_of(self, value: Tensor, rank: int) -> Tensor:
        """Return a rank's heads of [batch, heads, tokens, ...], in memory as a rank's own projection leaves them."""
        size = value.shape[1] // self.ranks
        return value.narrow(1, rank * size, size).transpose(1, 2).contiguous().transpose(1, 2)


class TensorWatcher(Watcher):  # type: ignore[no-untyped-call]
    """Judge the products of split layers, and attention by heads."""

    def __init__(self, places: Places, splits: dict[int, Split], ranks: int) -> None:
        """Watch a run.

        Args:
            places: Where calls are.
            splits: How the layers are split, by the storage of their weight.
            ranks: The number of ranks.
        """
        super().__init__(places, AXIS)
        self.splits, self.ranks = splits, ranks
        self.collectives: dict[str, Guilty | None] = {}  # by class of layers

    def plan(
        self, func: Any, flat: list[Any], spec: Any, key: Key
    ) -> list[tuple[Again, list[Any]]] | str | None:
        """Return how ranks make the call; None if it is no product of a split layer."""
        if is_exact(func):
            return None
        if operator_name(func) == ATTENTION:
            return [(SplitHeads(self.ranks), list(flat))]
        split = self.split_of(flat)
        if split is None:
            return None
        if operator_name(func) not in FORMS or is_scaled(func, flat):
            return f"{operator_name(func)} of a split layer is not replayed by ranks"
        again = SplitProduct(split, self.ranks)
        return [(again, again.arguments(func, flat, spec))]

    def split_of(self, flat: Sequence[Any]) -> Split | None:
        """Return how the layer is split whose weight is among the arguments."""
        for value in flat:
            if isinstance(value, Tensor):
                found = self.splits.get(value.untyped_storage()._cdata)
                if found is not None:
                    return found
        return None

    def follow(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor], key: Key
    ) -> list[Known]:
        """Return no marks: every row is compared."""
        return [{} for _ in results]

    def settle(
        self, call: Judged, pairs: Sequence[Pair], plans: list[tuple[Again, list[Any]]]
    ) -> None:
        """Judge the call, and for the first layer of each class the all-reduce of more ranks."""
        again = plans[0][0]
        if isinstance(again, SplitProduct) and again.split.by != COLUMN and is_aten(call.func):
            family = replace(call.place, module=again.split.path).family
            if family not in self.collectives:
                inputs = call.flat[FORMS[operator_name(call.func)][0]].shape[-1]
                ranks = (collectives.ranks_that_divide(inputs) or [self.ranks])[-1]
                parts = again.partials(call.func, call.flat, ranks)
                judged = collectives.judge(AXIS, again.split.path, [[part] for part in parts])
                self.collectives[family] = judged
        super().settle(call, pairs, plans)

    def find(self, call: Judged, pair: Pair, found: Comparison) -> Finding:
        """Tell order from error; ranks may round their partial sums to the result's dtype."""
        finding = super().find(call, pair, found)
        again = pair.again
        if isinstance(again, SplitProduct) and again.split.by != COLUMN and is_aten(call.func):
            finding.kind, finding.accuracy = explain_partials(call, pair, again)
        return finding


def explain_partials(call: Judged, pair: Pair, again: SplitProduct) -> tuple[str, Accuracy]:
    """Return whether rounding explains the sum of the ranks' partial sums, and both errors."""
    wide = [v.double() if isinstance(v, Tensor) else v for v in call.flat]
    size = [v.abs() if isinstance(v, Tensor) else v for v in wide]
    bias_at = FORMS[operator_name(call.func)][2]
    bias = wide[bias_at] if bias_at is not None else None
    parts = again.partials(call.func, wide)
    exact = magnitude = torch.zeros_like(parts[0])
    allowed = torch.zeros_like(exact)
    for part, scale in zip(parts, again.partials(call.func, size), strict=True):
        exact, magnitude = exact + part, magnitude + scale
        allowed = allowed + units(part, pair.run.dtype) + units(exact, pair.run.dtype)
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + bias.abs()
        allowed = allowed + units(exact, pair.run.dtype)
    terms = call.flat[FORMS[operator_name(call.func)][0]].shape[-1]
    allowed = allowed + 4 * terms * ROUNDING * magnitude
    errors = [worst(value, exact, allowed) for value in (pair.run, pair.variant)]
    return (ERROR if max(errors) > 1 else ORDER), Accuracy("fp64", errors[0], errors[1])


def shard(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's part along a dimension, laid out in memory as the whole is."""
    size = tensor.shape[dim] // ranks
    part = tensor.narrow(dim, rank * size, size)
    if tensor.dim() == 2 and tensor.stride(0) == 1:
        return part.t().contiguous().t()
    return part.contiguous()


def call(func: Callable[..., Any], flat: list[Any]) -> Tensor:
    """Call an operator whose only result is a tensor, with all its arguments in order."""
    names, _, _ = form_of(func)
    result: Tensor = func(**dict(zip(names, flat, strict=True)))
    return result


def is_aten(func: Any) -> bool:
    """Return whether an operator is torch's own."""
    return operator_name(func).startswith("aten::")


def is_scaled(func: Any, flat: list[Any]) -> bool:
    """Return whether an addmm scales its terms, which no linear layer does."""
    return operator_name(func) == "aten::addmm" and flat[3:5] != [1, 1]
