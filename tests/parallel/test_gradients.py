"""Micro-batches, ranks, DDP and FSDP2 change no bit of a step's gradients.

1. In every layout and dtype, p.grad on every rank is that of plain autograd on the whole batch.
2. Partial gradients take at most log2(micro-batches) + 1 times the parameters in fp32.
3. Left folds, rounded partial gradients and a sum in rank order have other bits.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit import Samples, UnsupportedError, bits
from isobit.gates.model.models import build_model
from isobit.ops.share import Share, collecting
from isobit.order.tree import Counter
from isobit.parallel import GlobalBatch, Gradients
from isobit.parallel.collectives import transfers
from isobit.parallel.data import reducer
from tests.parallel.gradient_nets import (
    LENGTHS,
    WIDTH,
    collect,
    differing,
    loss_of,
    make,
    on_ranks,
    plain,
    read,
    sharded,
    whole,
)

BF16 = torch.bfloat16
LAYOUTS = [(1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]


def found_by(ranks, micro, wrap=plain, order="rank", **options):
    """What each rank has."""

    def run(_):
        net = make(**options)
        gradients = collect(wrap(net), ranks, micro, order)
        count = sum(
            p.numel() for p in net.parameters() if p.requires_grad
        )  # of each use, where it is tied
        assert gradients.peak_bytes <= micro.bit_length() * count * 4
        assert gradients.peak_bytes or micro == 1
        return read(net)

    return on_ranks(ranks, run)


@pytest.mark.parametrize(
    ("dtype", "tied"), [(torch.float32, False), (BF16, False), (torch.float32, True), (BF16, True)]
)
@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
@pytest.mark.sweep(10)
def test_every_layout_has_the_gradients_of_the_whole_batch(ranks, micro, dtype, tied):
    expected = whole(make(dtype, tied=tied))
    assert {g.dtype for g in expected.values()} == {dtype}
    for found in found_by(ranks, micro, dtype=dtype, tied=tied):
        assert differing(found, expected) == []


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_engines(ranks, dtype):
    expected = whole(make(dtype))
    engines = ((DistributedDataParallel, "rank"), (sharded, "micro"), (plain, "micro"))
    for wrap, order in engines:
        for found in found_by(ranks, 2, wrap, order, dtype=dtype):
            assert differing(found, expected) == []


def test_a_tied_transformer():
    """The adapter refuses a tied weight in a share; here each use has a leaf of its own."""
    lengths = torch.tensor([5, 9, 3, 7])
    mask = (torch.arange(9) < lengths[:, None]).long()
    ids = torch.randint(0, 128, mask.shape, generator=torch.Generator().manual_seed(5))
    built = build_model("qwen3-tiny", BF16)

    def score(model, rows):
        found = isobit.logprobs(model, ids[rows], mask[rows])
        return isobit.exact_sum(found) / -int(lengths.sum() - 4)

    def run(_):
        model, batch = copy.deepcopy(built), GlobalBatch(4, 2, 2)
        isobit.enable(model, strict=False)
        gradients = Gradients(model, batch)
        for micro in range(2):
            with gradients.micro_batch(micro):
                score(model, list(batch.samples(gradients.rank, micro))).backward()
        gradients.close()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return read(model)

    model = copy.deepcopy(built)
    isobit.enable(model, strict=False)
    score(model, [0, 1, 2, 3]).backward()
    expected = read(model)
    for found in on_ranks(2, run):
        assert differing(found, expected) == []


def test_fp64_is_exchanged_in_fp64():
    x, layer = torch.randn(6, 9, dtype=torch.float64), isobit.nn.Linear(9, 5).double()

    def run(rank):
        mine = copy.deepcopy(layer)
        gradients = Gradients(mine, GlobalBatch(2, 2))
        with gradients.micro_batch(0) as share:
            samples = Samples.packed([3], first=share.first, total=2)
            mine(x[3 * rank : 3 * rank + 3], samples).square().sum().backward()
        return read(mine)

    found = on_ranks(2, run)
    layer(x, Samples.packed([3, 3])).square().sum().backward()
    assert [differing(one, read(layer)) for one in found] == [[], []]
    mixed = nn.Sequential(isobit.nn.Linear(9, 5).double(), isobit.nn.Linear(5, 5))

    def refused(_):
        with pytest.raises(UnsupportedError, match="all or none of them fp64"):
            Gradients(mixed, GlobalBatch(2, 2))

    on_ranks(2, refused)


# ---- parameters that are absent or frozen -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "micro", "order"), [(1, 4, "rank"), (2, 2, "rank"), (2, 2, "micro"), (4, 1, "rank")]
)
def test_absent_parameters_have_zeros(ranks, micro, order):
    """`aside` is used by the second half of the batch alone: its gradient is theirs, after +0 for the others'."""

    def run(rank):
        net = make(frozen=())
        batch = GlobalBatch(len(LENGTHS), ranks, micro, order)
        gradients = Gradients(net, batch)
        for at in range(micro):
            held = batch.samples(rank, at)
            with gradients.micro_batch(at) as share:
                loss_of(net, held, share, aside=held.start >= 4).backward()
        return read(net)

    found = on_ranks(ranks, run)
    assert all(differing(one, found[0]) == [] for one in found)
    assert bits.equal(found[0]["idle"], torch.zeros(7))
    assert differing(found[0], halves()) == []


def halves():
    """The same by hand: each half alone, then the sum of the two."""
    totals = {}
    for first in (0, 4):
        net = make(frozen=())
        for p in net.parameters():
            p.grad_dtype = torch.float32
        share = Share(first, len(LENGTHS), 4)
        with collecting(share):
            loss_of(net, range(first, first + 4), share, aside=first == 4).backward()
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in net.named_parameters()
        }
        totals = {name: totals[name] + grad if totals else grad for name, grad in found.items()}
    return totals


def test_frozen_parameters_have_none():
    net = make()
    collect(net, 1, 2)
    assert net.idle.grad is None
    assert net.aside.grad is None
    assert {"block.up.weight", "norm"} <= read(net).keys()


def test_engines_and_absent_parameters():
    """fully_shard adds zeros; DistributedDataParallel would leave buckets unexchanged."""

    def split(_):
        net = fully_shard(make(frozen=("idle",)))
        collect(net, 2, 2, "micro")
        return read(net)

    expected = whole(make())
    for found in on_ranks(2, split):
        assert bits.equal(found.pop("aside"), torch.zeros(WIDTH))
        assert differing(found, expected) == []

    def wrapped(_):
        net = make(frozen=("idle",))
        with pytest.raises(UnsupportedError, match="none for 1 of"):
            collect(DistributedDataParallel(net), 2, 2)
        return read(net)

    assert on_ranks(2, wrapped) == [{}, {}]


# ---- wrong orders ------------------------------------------------------------------------------------------------


class Fold(Counter):
    """Adds as they come, which is what autograd does."""

    def push(self, node, value):
        if self:
            ((first, total),) = self
            self.clear()
            while node.first > first.first:
                node = node.parent
            value = total + value
        self.append((node, value))


class Rounded(Counter):
    def push(self, node, value):
        super().push(node, value.bfloat16().float())


def fold_ranks(rows, total):
    total.copy_(functools.reduce(torch.add, rows))


@pytest.mark.parametrize(
    ("home", "name", "wrong", "layout"),
    [
        (reducer, "Counter", Fold, (1, 8)),
        (reducer, "Counter", Rounded, (1, 2)),
        (transfers, "add_rows", fold_ranks, (4, 1)),
    ],
)
def test_a_wrong_order_has_other_bits(home, name, wrong, layout, monkeypatch):
    monkeypatch.setattr(home, name, wrong)
    expected = whole(make())
    for found in found_by(*layout):
        assert {"block.up.weight", "head.weight", "norm"} <= set(differing(found, expected))
