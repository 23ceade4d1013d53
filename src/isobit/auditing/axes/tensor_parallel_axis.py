"""The axis `tp`: the whole model against tensor-parallel ranks.

Products of split layers are made again as the ranks compute them: some columns each, or partial sums that an
all-reduce adds. The list is complete if the run with all of them substituted is a run of the split model on simulated
ranks, bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from isobit.auditing.axes import data_parallel_axis
from isobit.auditing.axes.axes import NotApplicableError, VariantCall, Variation, same_start
from isobit.auditing.axes.data_parallel_axis import PATIENCE
from isobit.auditing.judging.accuracy import ROUNDING, units, worst
from isobit.auditing.judging.effects import outputs_of
from isobit.auditing.judging.findings import Comparison, GuiltyCall
from isobit.auditing.labels.labels import Known, Rows
from isobit.auditing.records import ERROR, ORDER, Accuracy, AxisReport, Guilty, Place, Unjudged
from isobit.auditing.replay.call import form_of, operator_name
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.replay import Again, Key, is_exact
from isobit.auditing.replay.watching import Judged, Pair, Watcher, first_line
from isobit.auditing.subjects import Inputs
from isobit.foundation.machine import thread_count
from isobit.integrations.transformers.state import find_state
from isobit.integrations.transformers.tensor_parallel import shard as shard_model
from isobit.parallel.tensor.linear import column_linear, row_linear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World

# Which linear layers of a model tensor-parallel ranks split, and how.

COLUMN, ROW = "column", "row"
# Names of layers that models without a plan split: those that read the whole input, and the one that reads theirs.
PAIRS = (
    ({"q_proj", "k_proj", "v_proj"}, {"o_proj", "out_proj"}),
    ({"gate_proj", "up_proj"}, {"down_proj"}),
    ({"query", "key", "value", "q", "k", "v"}, {"o", "out"}),
    ({"gate", "up"}, {"down"}),
    ({"w1", "w3"}, {"w2"}),
    ({"fc1", "c_fc"}, {"fc2", "c_proj"}),
)


@dataclass(frozen=True)
class Split:
    """How one linear layer is split.

    Attributes:
        path: its module's path.
        by: "column", each rank has some outputs; or "row", each rank has some inputs.
        gathers: whether ranks exchange the outputs of a column split, so that each has all.
    """

    path: str
    by: str
    gathers: bool = False


@dataclass
class Plan:
    """The splits of a model by path, and the patterns that cannot be replayed with their reasons."""

    splits: dict[str, Split] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def plan_of(model: nn.Module) -> Plan:
    """Return a model's own tensor-parallel plan, and where it adds over no ranks, one recognised by names."""
    plan = from_styles(model, styles_of(model))
    if not any(split.by == ROW for split in plan.splits.values()):
        plan.splits = {**from_names(model).splits, **plan.splits}
    return plan


def styles_of(model: Any) -> dict[str, str]:
    """Return the patterns and styles of transformers' plan, with the paths of this model's modules."""
    found = getattr(model, "_tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        found = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    known = found.items() if isinstance(found, Mapping) else ()
    return {str(pattern): style for pattern, style in known if isinstance(style, str)}


def from_styles(model: nn.Module, styles: Mapping[str, str]) -> Plan:
    """Apply transformers' patterns, such as `model.layers.*.mlp.up_proj: colwise`."""
    plan = Plan()
    forms = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$"), pattern, style)
        for pattern, style in styles.items()
    ]
    for path, module in model.named_modules():
        for form, _, style in forms:
            if isinstance(module, nn.Linear) and form.match(path) and side_of(style):
                gathers = side_of(style) == COLUMN and style != "colwise"
                plan.splits[path] = Split(path, side_of(style), gathers)
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    for form, pattern, style in forms:
        applies = any(form.match(name) for name in names)
        if applies and splits_sums(style) and not any(form.match(p) for p in plan.splits):
            plan.unknown[pattern] = f"tensor-parallel style {style} is not replayed"
    return plan


def side_of(style: str) -> str:
    """Return the side that a style of a linear layer splits, "" if it is another kind of style."""
    if style.startswith("colwise"):
        return COLUMN
    return ROW if style.startswith("rowwise") else ""


def splits_sums(style: str) -> bool:
    """Return whether a style splits products: those of experts and of fused weights do."""
    return any(word in style for word in ("colwise", "rowwise", "gemm", "experts")) and (
        not style.startswith("embedding")
    )


def from_names(model: nn.Module) -> Plan:
    """Recognise queries, keys, values and output, or up and down, by name in one parent module."""
    plan = Plan()
    for parent, module in model.named_modules():
        children = {n: c for n, c in module.named_children() if isinstance(c, nn.Linear)}
        for columns, rows in PAIRS:
            if children.keys() & columns and children.keys() & rows:
                for name in children.keys() & (columns | rows):
                    path = f"{parent}.{name}" if parent else name
                    plan.splits[path] = Split(path, COLUMN if name in columns else ROW)
    return plan


# Make the products of split layers again as tensor-parallel ranks compute them.

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
        total = data_parallel_axis.all_reduce(self.partials(func, flat))
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

        values: list[Tensor] = (
            World(self.ranks, patience=data_parallel_axis.PATIENCE).run(program).values
        )
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
                ranks = (data_parallel_axis.ranks_that_divide(inputs) or [self.ranks])[-1]
                parts = again.partials(call.func, call.flat, ranks)
                judged = data_parallel_axis.judge(
                    AXIS, again.split.path, [[part] for part in parts]
                )
                self.collectives[family] = judged
        super().settle(call, pairs, plans)

    def find(self, call: Judged, pair: Pair, found: Comparison) -> GuiltyCall:
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


# Run a whole model under tensor parallelism on simulated ranks.


def run_on_ranks(inputs: Inputs, plan: Plan, ranks: int) -> dict[str, Tensor]:
    """Return the outputs of rank 0 of a model that is split over simulated ranks."""
    threads = torch.get_num_threads()

    def program(rank: int) -> dict[str, Tensor]:
        with thread_count(threads), torch.no_grad(), same_start():
            model = split_copy(inputs.model, plan, ranks)
            out = outputs_of(model(*inputs.args, **inputs.named))
        return {name: tensor.clone() for name, tensor in out.items()}

    found: dict[str, Tensor] = World(ranks, patience=PATIENCE).run(program).values[0]
    return found


def split_copy(model: nn.Module, plan: Plan, ranks: int) -> nn.Module:
    """Return this rank's part of a model; what is not split is shared with the model itself."""
    if find_state(model) is not None:
        mine = copy.deepcopy(model)
        shard_model(mine, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
        return mine
    tensors = itertools.chain(model.parameters(), model.buffers())
    mine = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    group = TensorParallelGroup.of(dist.group.WORLD)
    for path, split in plan.splits.items():
        parent, _, name = path.rpartition(".")
        layer: Any = SplitLayer(mine.get_submodule(path), split, group)
        setattr(mine.get_submodule(parent), name, layer)
    return mine


class SplitLayer(nn.Module):
    """A rank's part of a linear layer, of torch's products or of isobit's."""

    def __init__(self, whole: Any, split: Split, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the weight."""
        super().__init__()
        column = split.by == COLUMN
        extent = whole.weight.shape[0 if column else 1]
        if extent % group.size:
            raise ValueError(f"{split.path}: {extent} cannot be divided over {group.size} ranks")
        self.split, self.group, self.extent = split, group, extent
        self.ours = type(whole).__module__.startswith("isobit.")
        self.weight = shard(whole.weight.detach(), 0 if column else 1, group.rank, group.size)
        bias = None if whole.bias is None else whole.bias.detach()
        self.bias = shard(bias, 0, group.rank, group.size) if column and bias is not None else bias

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's outputs, or the sum over all ranks' inputs."""
        if self.split.by == COLUMN:
            if self.ours:
                out = column_linear(input, self.weight, self.bias, tp_group=self.group)
            else:
                out = F.linear(input, self.weight, self.bias)
            return self.gather(out) if self.split.gathers else out
        if input.shape[-1] == self.extent:
            input = shard(input, -1, self.group.rank, self.group.size)
        if self.ours:
            return row_linear(input, self.weight, self.bias, tp_group=self.group)
        total = F.linear(input, self.weight)
        dist.all_reduce(total)
        return total if self.bias is None else total + self.bias

    def gather(self, part: Tensor) -> Tensor:
        """Return the outputs of all ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.group.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)


RANKS = 2


def tensor_parallel(inputs: Inputs) -> Variation:
    """Compare the whole model with two tensor-parallel ranks.

    The plan is that of the model (transformers' `_tp_plan`), or one recognised by the names of layers. An enabled
    model and layers of isobit.nn are split by `isobit.parallel`.

    Args:
        inputs: The batch, which every rank has.

    Raises:
        NotApplicableError: No layer of the model is known to be split.
    """
    plan = plan_of(inputs.model)
    if not plan.splits:
        raise NotApplicableError(
            "the model has no tensor-parallel plan, and no pair of layers that is known by name"
        )
    return TensorParallel(inputs, plan).variation()


class TensorParallel:
    """The split model, and what is known about it after the audit."""

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        """Audit these inputs with this plan."""
        self.inputs, self.plan = inputs, plan
        self.splits = by_storage(inputs.model, plan)
        self.watchers: list[TensorWatcher] = []
        self.failure = ""

    def variation(self) -> Variation:
        """Return what changes."""
        return Variation(
            AXIS,
            f"{RANKS} tensor-parallel ranks split {len(self.plan.splits)} linear layers",
            ("one worker", f"{RANKS} ranks"),
            self.inputs.run,
            (VariantCall(Rows([]), self.run, self.inputs.tokens),),
            around=nullcontext,
            watcher=self.watcher,
            after=self.add_to_report,
        )

    def watcher(self, places: Places) -> TensorWatcher:
        """Return the watcher of the audited run."""
        self.watchers.append(TensorWatcher(places, self.splits, RANKS))
        return self.watchers[-1]

    def run(self) -> dict[str, Tensor]:
        """Run the split model; where that is not possible, the whole one with the products of ranks."""
        try:
            return run_on_ranks(self.inputs, self.plan, RANKS)
        except Exception as error:  # a model may raise anything for a shape that it does not expect
            self.failure = first_line(error.__cause__ or error)
        with TensorWatcher(Places(self.inputs.model), self.splits, RANKS):
            return outputs_of(self.inputs.run())

    def add_to_report(self, report: AxisReport) -> AxisReport:
        """Add the collectives, the layers that are not replayed, and why the list is not complete."""
        judged = self.watchers[-1].collectives.values()
        unknown = [
            Unjudged(Place("tensor-parallel layer", pattern), AXIS, reason)
            for pattern, reason in self.plan.unknown.items()
        ]
        report = data_parallel_axis.add_to_report(report, judged)
        report = replace(report, unjudged=report.unjudged + tuple(unknown))
        if self.failure:
            why = f"the model could not be run on {RANKS} ranks: {self.failure}"
            return replace(report, complete=False, why_not=why)
        if unknown:
            why = f"{unknown[0].place.module} and other layers of the plan were not split: {unknown[0].reason}"
            return replace(report, complete=False, why_not=why)
        if not report.complete and not report.unjudged:
            why = "operators that run on a rank's own heads or columns differ, too"
            return replace(report, why_not=why)
        return report


def by_storage(model: nn.Module, plan: Plan) -> dict[int, Split]:
    """Return the splits by the storage of the layers' weights, which also finds a weight in a fused call."""
    found: dict[int, Split] = {}
    for path, split in plan.splits.items():
        weight = model.get_submodule(path).weight
        assert isinstance(weight, torch.Tensor)
        found[weight.untyped_storage()._cdata] = split
    return found
