"""Operators that are split over P ranks have the bits of the unsplit ones: outputs and gradients.

For P = 1, 2, 4 and 8 in fp32, bf16 and fp16: column, row, QKV group, embedding, log-probabilities,
logits and head norm, of the whole batch and of shares.
"""

import copy
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel as stock
from torch.distributed.tensor.parallel import parallelize_module

import isobit
from isobit import CutError, UnsupportedError, bits
from isobit.ops.linear import partial
from isobit.parallel import get_total_norm
from isobit.parallel.collectives import tree_collectives
from isobit.parallel.tensor import head_norm
from isobit.parallel.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_linear,
    column_linear_group,
    row_linear,
)
from isobit.parallel.tensor.shard import full_state, load_full_state, shard_table
from isobit.parallel.tensor.styles import ColwiseParallel, RowwiseParallel, VocabParallel
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.parallel.tensor.vocab import VocabParallelEmbedding, vocab_embedding, vocab_logprob
from isobit.simulator import World
from tests.parallel import tensor_cases as cases
from tests.parallel.tensor_cases import WHOLE, draw, part

FP32 = torch.float32


def tensor_ranks():
    return TensorParallelGroup.of(
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    )


def on_ranks(count, check):
    """The value of check(ranks) on each rank."""
    return World(count).run(lambda _: check(tensor_ranks())).values


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_operator_has_the_unsplit_bits(count):
    assert on_ranks(count, cases.differences) == [{}] * count


def test_eight_ranks():
    def check(ranks):
        wide = [case(ranks, FP32, WHOLE, features=2048) for case in (cases.column, cases.row)]
        return [
            *wide,
            *(
                case(ranks, FP32, WHOLE)
                for case in (cases.group, cases.logprob, cases.norm_of_heads)
            ),
        ]

    assert on_ranks(8, check) == [[[]] * 5] * 8


# ---- planted wrongs: each makes a case red -------------------------------------------------------------------


def fold_left(total, group, *, async_op=False):
    held = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(held, total, group=group)
    total.copy_(reduce(torch.add, held))


def round_before_the_merge(total, group, *, async_op=False, all_reduce=tree_collectives.all_reduce):
    total.copy_(total.bfloat16())
    return all_reduce(total, group, async_op=async_op)


@pytest.mark.parametrize("wrong", [fold_left, round_before_the_merge])
def test_another_merge_of_ranks_is_seen(monkeypatch, wrong):
    monkeypatch.setattr(tree_collectives, "all_reduce", wrong)
    for case, name in (
        (cases.row, "output"),
        (cases.column, "input_grad"),
        (cases.logprob, "hidden_grad"),
    ):
        assert all(
            name in found
            for found in on_ranks(4, lambda ranks, case=case: case(ranks, FP32, WHOLE))
        )


def test_a_bias_added_on_each_rank_is_seen(monkeypatch):
    def biased(x, weight, cut, output=partial.output):
        found = output(x, weight, cut)
        found.values.add_(
            cases.parameters(80, 1024, FP32)[1] / cut.parts
        )  # the sum is right, its order is not
        return found

    def check(ranks):
        x, (w, b) = draw(4, 7, 1024, dtype=FP32, seed=1), cases.parameters(80, 1024, FP32)
        split = row_linear(part(x, ranks, 2), part(w, ranks, 1), tp_group=ranks)
        return bits.equal(split, isobit.linear(x, w, b))

    monkeypatch.setattr(partial, "output", biased)
    assert on_ranks(2, check) == [False, False]


def test_samples_merged_before_heads_are_seen(monkeypatch):
    def samples_first(totals, samples, ranks):
        total = head_norm.partial.merge_samples(totals, samples.total)
        ranks.all_reduce(total)
        return total

    monkeypatch.setattr(head_norm, "merge_weight_grad", samples_first)
    assert (
        on_ranks(2, lambda ranks: cases.norm_of_heads(ranks, FP32, WHOLE)) == [["weight_grad"]] * 2
    )


def test_floats_added_over_the_vocabulary_lose_minus_zero(monkeypatch):
    def as_floats(ranks, held):
        dist.all_reduce(held, group=ranks.group)
        return held

    monkeypatch.setattr(TensorParallelGroup, "combine_bits", as_floats)
    assert on_ranks(2, lambda ranks: cases.embedding(ranks, FP32, WHOLE)) == [["output"]] * 2


# ---- modules and styles ---------------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.up, self.down = (
            nn.Embedding(512, 96),
            nn.Linear(96, 1024),
            nn.Linear(1024, 80),
        )

    def forward(self, ids):
        return self.down(self.up(self.table(ids)))


def unsplit(net, ids):
    hidden = isobit.embedding(ids, net.table.weight)
    return isobit.linear(
        isobit.linear(hidden, net.up.weight, net.up.bias), net.down.weight, net.down.bias
    )


IDS = torch.arange(0, 512, 23).reshape(1, -1)


def compare_networks(split, whole, ranks):
    """Outputs, gradients and full state of a split network and the whole one."""
    grad = draw(1, IDS.numel(), 80, dtype=FP32, seed=9)
    expected, found = unsplit(whole, IDS), split(IDS)
    expected.backward(grad)
    found.backward(grad)
    shards = shard_table(split)
    wrong = [] if bits.equal(found, expected) else ["output"]
    for name, parameter in whole.named_parameters():
        here = split.get_parameter(name).grad
        there = part(parameter.grad, ranks, shards[name].axis) if name in shards else parameter.grad
        wrong += [] if bits.equal(here, there) else [name]
    same = bits.digest(full_state(split)) == bits.digest(whole)
    return wrong if same else [*wrong, "state"]


@pytest.mark.parametrize("count", [2, 4])
def test_styles_of_parallelize_module(count):
    def check(ranks):
        whole = Network()
        split = copy.deepcopy(whole)
        if ranks.rank:  # as with torch's own styles, rank 0's weights are everybody's
            nn.init.zeros_(split.up.weight)
        parallelize_module(
            split,
            ranks.mesh,
            {"table": VocabParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
        )
        assert type(split.up) is ColumnParallelLinear
        assert split.up.weight.shape == (1024 // count, 96)
        return compare_networks(split, whole, ranks)

    assert on_ranks(count, check) == [[]] * count


def test_modules_made_from_whole_ones():
    def check(ranks):
        whole = Network()
        split = copy.deepcopy(whole)
        split.table = VocabParallelEmbedding.from_embedding(split.table, ranks)
        split.up = ColumnParallelLinear.from_linear(split.up, ranks)
        split.down = RowParallelLinear.from_linear(split.down, ranks)
        wrong = compare_networks(split, whole, ranks)
        fresh = nn.ModuleDict({"down": RowParallelLinear(1024, 80, mesh=ranks)})
        load_full_state(
            fresh, {f"down.{name}": value for name, value in whole.down.state_dict().items()}
        )
        return [*wrong, *([] if bits.equal(fresh.down.weight, split.down.weight) else ["loaded"])]

    assert on_ranks(2, check) == [[], []]


def test_what_is_frozen_stays_frozen():
    for kind, whole in (
        (RowParallelLinear, nn.Linear(1024, 8)),
        (ColumnParallelLinear, nn.Linear(8, 1024)),
    ):
        made = kind.from_linear(whole.requires_grad_(False), None)
        assert [p.requires_grad for p in made.parameters()] == [False, False]


def test_the_norm_of_split_parameters():
    """Also of parameters without their module, as torch's own clip_grad_norm_ is called."""
    whole = nn.Linear(96, 1024)
    grads = [torch.randn_like(p) for p in whole.parameters()]
    expected = isobit.optim.get_total_norm(grads)

    def check(ranks):
        split = ColumnParallelLinear.from_linear(whole, ranks)
        for parameter, grad in zip(split.parameters(), grads, strict=True):
            parameter.grad = grad.chunk(ranks.size)[ranks.rank].clone()
        return [
            bits.equal(get_total_norm(given), expected) for given in (split, split.parameters())
        ]

    assert on_ranks(2, check) == [[True] * 2] * 2


def test_stock_styles_have_other_bits_when_split():
    """The control: torch's own ColwiseParallel and RowwiseParallel, fp32, against the unsplit stock network."""

    def check(ranks):
        torch.manual_seed(3)
        whole = nn.Sequential(nn.Linear(96, 1024), nn.Linear(1024, 80))
        split = parallelize_module(
            copy.deepcopy(whole),
            ranks.mesh,
            {"0": stock.ColwiseParallel(), "1": stock.RowwiseParallel()},
        )
        x = draw(4, 7, 96, dtype=FP32, seed=1)
        return bits.equal(split(x), whole(x))

    for count in (2, 4):
        assert on_ranks(count, check) == [False] * count


# ---- refusals -------------------------------------------------------------------------------------------------


def alone(parts, coordinate=0):
    return TensorParallelGroup("tp", None, coordinate, parts)


def test_what_the_plan_cannot_cut_is_refused():
    x = torch.randn(2, 3, 96)
    for call in (
        lambda: column_linear(x, torch.randn(100, 96), tp_group=alone(3)),
        lambda: column_linear(
            x, torch.randn(128, 96), tp_group=alone(4)
        ),  # segments of 512 are 256 long
        lambda: column_linear_group(x, [torch.randn(512, 96)] * 2, groups=2, tp_group=alone(4)),
        lambda: row_linear(x, torch.randn(8, 96), tp_group=alone(4)),
        lambda: vocab_logprob(
            x, torch.randn(64, 96), torch.zeros(2, 3, dtype=torch.int64), tp_group=alone(4)
        ),
        lambda: head_norm.head_norm(torch.randn(2, 3, 5, 64), torch.randn(64), tp_group=alone(3)),
        lambda: VocabParallelEmbedding(100, 8, mesh=alone(3)),
        lambda: ColumnParallelLinear(96, 512, mesh=alone(4)),
        lambda: RowParallelLinear(512, 96, mesh=alone(4)),
    ):
        with pytest.raises(CutError, match=r"(?s)expected .*\n  received: .*\n  remedy"):
            call()


def test_other_refusals():
    table_part = torch.randn(8, 4, requires_grad=True)
    with pytest.raises(isobit.ArgumentError, match="ids from 0 to 15"):
        vocab_embedding(torch.tensor([16]), table_part, tp_group=alone(2))
    with pytest.raises(UnsupportedError, match="Gradients"):  # a share that nobody collects
        column_linear(
            torch.randn(4, 7, 96),
            torch.randn(256, 96).requires_grad_(),
            tp_group=alone(1),
            samples=cases.SHARE,
        )
    with pytest.raises(UnsupportedError, match="split it once"):
        ColwiseParallel()._apply(ColumnParallelLinear(96, 512, mesh=None), None)
    with pytest.raises(UnsupportedError, match="a plain Embedding"):
        VocabParallel()._apply(isobit.nn.Linear(4, 4), None)
    x = torch.randn(3, 96, requires_grad=True)
    with pytest.raises(UnsupportedError, match="first-order"):
        torch.autograd.grad(
            column_linear(x, torch.randn(256, 96), tp_group=alone(1)).sum(), x, create_graph=True
        )
