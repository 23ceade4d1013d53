"""Micro-batches, ranks and engines change no bit of a step's gradients.

1. Every layout, dtype and engine: p.grad is the whole batch's by plain autograd, on every rank; tied weights too.
2. Partials hold log2(micro-batches) + 1 times the parameters in fp32, at most.
3. A step that fails leaves nothing behind; what is refused changes nothing; close() leaves the model as it was.
4. Left folds, rounded partials, ranks added in turn, and stock accumulation have other bits.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit import ArgumentError, Samples, UnsupportedError, bits
from isobit.chain.models import build_model
from isobit.errors import AgreementError
from isobit.ops.share import Share, collecting
from isobit.order.tree import Counter
from isobit.parallel import GlobalBatch, Gradients, carrier, movement, partials
from isobit.parallel.buckets import BucketedExchange
from isobit.simulator import World

BF16 = torch.bfloat16
LENGTHS = (5, 9, 3, 12, 1, 7, 4, 6)
VOCABULARY, WIDTH = 24, 32
LAYOUTS = [(1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = isobit.nn.Linear(WIDTH, 2 * WIDTH), isobit.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, samples):
        return x + self.down(isobit.gelu(self.up(x, samples)), samples)


class Net(nn.Module):
    """Embedding, norm, a block and a head; `aside` is used where it is asked for, `idle` never."""

    def __init__(self, dtype=torch.float32, tied=False):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.block, self.aside, self.idle = Block(), nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(7))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, ids, targets, samples, aside=False):
        x = isobit.embedding(ids, self.table.weight, samples=samples)
        x = isobit.rms_norm(x, self.norm, samples=samples)
        x = self.block(x, samples)
        if aside:
            x = isobit.rms_norm(x, self.aside, samples=samples)
        return isobit.linear_logprob(x, self.head.weight, targets, samples=samples).clone()


def make(dtype=torch.float32, frozen=("aside", "idle"), **options):
    torch.manual_seed(3)
    net = Net(dtype, **options)
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def tokens(first, stop):
    """Packed ids and targets of these samples."""
    drawn = torch.randint(0, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
    return drawn[:, sum(LENGTHS[:first]) : sum(LENGTHS[:stop])]


def loss_of(net, held, share=None, **options):
    first, of = (0, None) if share is None else (share.first, share.of)
    samples = Samples.packed(LENGTHS[held.start : held.stop], first=first, of=of)
    return isobit.exact_sum(net(*tokens(held.start, held.stop), samples, **options)) / -sum(LENGTHS)


def read(net):
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def whole(net):
    """By plain autograd."""
    loss_of(net, range(len(LENGTHS))).backward()
    return read(net)


def step(gradients, net, wrong=None, **options):
    batch = gradients.batch
    for micro in range(batch.micro_batches):
        with gradients.micro_batch(micro) as share:
            loss = loss_of(net, batch.samples(gradients.rank, micro), share, **options)
            if wrong is not None and micro == batch.micro_batches - 1:
                wrong(loss)
            loss.backward()


def collect(net, ranks, micro, order="rank"):
    gradients = Gradients(net, GlobalBatch(len(LENGTHS), ranks, micro, order))
    step(gradients, net)
    return gradients


def on_ranks(ranks, function):
    return [function(0)] if ranks == 1 else World(ranks).run(function).values


def found_by(ranks, micro, wrap=lambda net: net, order="rank", **options):
    """What each rank has."""

    def run(_):
        net = make(**options)
        gradients = collect(wrap(net), ranks, micro, order)
        count = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert gradients.peak_bytes <= micro.bit_length() * count * 4 * (2 if options.get("tied") else 1)
        assert gradients.peak_bytes or micro == 1
        return read(net)

    return on_ranks(ranks, run)


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not bits.equal(found[name], expected[name])]


@pytest.mark.parametrize(
    ("dtype", "tied"), [(torch.float32, False), (BF16, False), (torch.float32, True), (BF16, True)]
)
@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_every_layout_has_the_gradients_of_the_whole_batch(ranks, micro, dtype, tied):
    expected = whole(make(dtype, tied=tied))
    assert {g.dtype for g in expected.values()} == {dtype}
    for found in found_by(ranks, micro, dtype=dtype, tied=tied):
        assert differing(found, expected) == []


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_engines(ranks, dtype):
    def sharded(net):
        fully_shard(net.block)
        return fully_shard(net)

    expected = whole(make(dtype))
    for wrap, order in ((DistributedDataParallel, "rank"), (sharded, "micro")):
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
            samples = Samples.packed([3], first=share.first, of=2)
            mine(x[3 * rank : 3 * rank + 3], samples).square().sum().backward()
        return read(mine)

    found = on_ranks(2, run)
    layer(x, Samples.packed([3, 3])).square().sum().backward()
    assert [differing(one, read(layer)) for one in found] == [[], []]
    mixed = nn.Sequential(isobit.nn.Linear(9, 5).double(), isobit.nn.Linear(5, 5))

    def refused(_):
        with pytest.raises(UnsupportedError, match="fp64 or none"):
            Gradients(mixed, GlobalBatch(2, 2))

    on_ranks(2, refused)


# ---- parameters that are absent or frozen -------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 2), (4, 1)])
def test_absent_parameters_have_zeros(ranks, micro):
    """`aside` is used by the second half of the batch alone: its gradient is theirs, after +0 for the others'."""

    def run(rank):
        net = make(frozen=())
        batch = GlobalBatch(len(LENGTHS), ranks, micro)
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
        share = Share(first, len(LENGTHS))
        with collecting(share):
            loss_of(net, range(first, first + 4), share, aside=first == 4).backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
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

    def sharded(_):
        net = fully_shard(make(frozen=("idle",)))
        collect(net, 2, 2, "micro")
        return read(net)

    expected = whole(make())
    for found in on_ranks(2, sharded):
        assert bits.equal(found.pop("aside"), torch.zeros(WIDTH))
        assert differing(found, expected) == []

    def wrapped(_):
        net = make(frozen=("idle",))
        with pytest.raises(UnsupportedError, match="none for 1 of"):
            collect(DistributedDataParallel(net), 2, 2)
        return read(net)

    assert on_ranks(2, wrapped) == [{}, {}]


# ---- failures and refusals ------------------------------------------------------------------------------------


def fail_in_forward(loss):
    raise ZeroDivisionError


def fail_in_backward(loss):
    """After the head's gradient has been taken, and before the table's."""

    def wrong(_):
        raise ZeroDivisionError

    node = loss.grad_fn
    while "norm" not in node.name().lower():
        node = next(above for above, _ in node.next_functions if above is not None)
    node.register_prehook(wrong)


@pytest.mark.parametrize("wrong", [fail_in_forward, fail_in_backward])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 2)])
def test_a_failed_step_leaves_nothing(wrong, ranks, micro, monkeypatch):
    monkeypatch.setattr(carrier, "BucketedExchange", functools.partial(BucketedExchange, bucket_bytes=4))
    expected = whole(make(BF16))

    def run(_):
        net = make(BF16)
        gradients = Gradients(net, GlobalBatch(len(LENGTHS), ranks, micro))
        with pytest.raises(ZeroDivisionError):
            step(gradients, net, wrong)
        assert {(p.grad, p.grad_dtype) for p in net.parameters()} == {(None, BF16)}
        step(gradients, net)
        return read(net)

    for found in on_ranks(ranks, run):
        assert differing(found, expected) == []


def test_a_step_that_failed_on_one_rank_is_not_mixed_with_the_next():
    def run(rank):
        net = make()
        gradients = Gradients(net, GlobalBatch(len(LENGTHS), 2, 2))
        if rank:
            with pytest.raises(ZeroDivisionError):
                step(gradients, net, fail_in_forward)
        with pytest.raises(AgreementError, match="gave up a step"):
            step(gradients, net)
        return read(net)

    assert on_ranks(2, run) == [{}, {}]


def test_gradients_that_are_held_are_not_written_to():
    def run(_):
        net = make()
        gradients = collect(net, 2, 2)
        held = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        before = read(net)
        net.zero_grad()
        with torch.no_grad():
            net.norm.mul_(2)
        step(gradients, net)
        assert differing(read(net), before) != []
        return differing(held, before)

    assert on_ranks(2, run) == [[], []]


def test_refusals_change_nothing():
    net = make(BF16)
    gradients = collect(net, 1, 2)
    before = read(net)
    with pytest.raises(ArgumentError, match="zero_grad"), gradients.micro_batch(0):
        pass
    assert differing(read(net), before) == []
    net.zero_grad()
    with pytest.raises(ArgumentError, match="micro-batch 0: they are merged"), gradients.micro_batch(1):
        pass
    step(gradients, net)
    assert differing(read(net), before) == []
    net.zero_grad()
    net.idle.requires_grad_(True)
    with pytest.raises(ArgumentError, match="1 others, and 0"), gradients.micro_batch(0):
        pass
    with pytest.raises(ArgumentError, match="a group of 2 ranks"):
        Gradients(net, GlobalBatch(8, 2))


def test_refusals_of_engines():
    def run(_):
        with pytest.raises(UnsupportedError, match="tied"):
            Gradients(DistributedDataParallel(make(tied=True)), GlobalBatch(8, 2))
        with pytest.raises(UnsupportedError, match="gradient_as_bucket_view"):
            Gradients(DistributedDataParallel(make(), gradient_as_bucket_view=True), GlobalBatch(8, 2))
        net = fully_shard(make())
        with pytest.raises(UnsupportedError, match="order='micro'"):
            Gradients(net, GlobalBatch(8, 2, 2))
        gradients = collect(net, 2, 2, "micro")
        before = read(net)
        with pytest.raises(ArgumentError, match="zero_grad"), gradients.micro_batch(0):
            pass
        return differing(read(net), before)

    assert on_ranks(2, run) == [[], []]


def test_two_backwards_of_a_share_are_refused():
    net = make()
    gradients = Gradients(net, GlobalBatch(8, 1, 2))
    with gradients.micro_batch(0) as share:
        for _ in range(2):
            loss_of(net, range(4), share).backward()
    with pytest.raises(isobit.CutError, match="each with one backward"), gradients.micro_batch(1) as share:
        loss_of(net, range(4, 8), share).backward()
    assert read(net) == {}


def test_closed_the_model_is_as_it_was():
    net = make(BF16, tied=True)
    expected = whole(copy.deepcopy(net))
    names = list(net.state_dict())
    gradients = collect(net, 1, 4)
    gradients.close()
    gradients.close()
    assert differing(read(net), expected) == []
    assert net.head.weight is net.table.weight
    assert list(net.state_dict()) == names
    assert {p.grad_dtype for p in net.parameters()} == {BF16}
    net.zero_grad()
    assert differing(whole(net), expected) == []
    with pytest.raises(ArgumentError, match="anew"), gradients.micro_batch(0):
        pass


def test_closed_engines():
    """fully_shard reduces by itself again; DistributedDataParallel keeps a hook once set, which refuses."""

    def run(_):
        net = fully_shard(make())
        gradients = collect(net, 2, 2, "micro")
        gradients.close()
        net.zero_grad()
        loss_of(net, range(8)).backward()
        averaged = read(net)
        wrapped = DistributedDataParallel(make())
        collect(wrapped, 2, 2).close()
        wrapped.zero_grad()
        with pytest.raises(UnsupportedError, match="no_sync"):
            loss_of(wrapped, range(8)).backward()
        return averaged

    expected = whole(make())
    for found in on_ranks(2, run):
        assert differing(found, expected) == []  # the mean of two equal values


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
        (partials, "Counter", Fold, (1, 8)),
        (partials, "Counter", Rounded, (1, 2)),
        (movement, "add_rows", fold_ranks, (4, 1)),
    ],
)
def test_a_wrong_order_has_other_bits(home, name, wrong, layout, monkeypatch):
    monkeypatch.setattr(home, name, wrong)
    expected = whole(make())
    for found in found_by(*layout):
        assert {"block.up.weight", "head.weight", "norm"} <= set(differing(found, expected))


def test_stock_accumulation_has_other_bits():
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(8, 5, WIDTH)
    found = []
    for size in (8, 2, 1):
        layers.zero_grad()
        for first in range(0, 8, size):
            layers(x[first : first + size]).square().sum().backward()
        found.append(bits.digest({name: p.grad for name, p in layers.named_parameters()}))
    assert len(set(found)) == 3
