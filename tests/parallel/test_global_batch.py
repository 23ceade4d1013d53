"""Shares cover each global batch once, in one order at every layout, and each is one subtree."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from isobit import ArgumentError, CutError, Samples
from isobit.parallel.data.global_batch import GlobalBatch, GlobalBatchSampler


@st.composite
def batches(draw, of=None):
    of = of or draw(st.integers(1, 9)) * 2 ** draw(st.integers(0, 6))
    most = (of & -of).bit_length() - 1
    ranks = draw(st.integers(0, most))
    return GlobalBatch(
        of,
        1 << ranks,
        1 << draw(st.integers(0, most - ranks)),
        draw(st.sampled_from(["rank", "micro"])),
    )


def places(batch):
    return [(rank, micro) for rank in range(batch.ranks) for micro in range(batch.micro_batches)]


@given(batches())
def test_shares_cover_the_batch_once_and_are_subtrees(batch):
    held = [batch.samples(*place) for place in places(batch)]
    assert sorted(chain(*held)) == list(range(batch.total))
    for rank, micro in places(batch):
        share = batch.share(rank, micro)
        assert (
            len(Samples.packed([1] * batch.size, first=share.first, total=share.total).roots) == 1
        )


@given(batches())
def test_what_is_merged_first_is_a_run(batch):
    """Order rank: a rank's micro-batches; order micro: a micro-batch's ranks."""
    for outer in range(batch.ranks if batch.order == "rank" else batch.micro_batches):
        inner = range(batch.micro_batches if batch.order == "rank" else batch.ranks)
        runs = [
            batch.samples(*((outer, i) if batch.order == "rank" else (i, outer))) for i in inner
        ]
        joined = list(chain(*runs))
        assert joined == list(range(joined[0], joined[0] + len(joined)))
        assert len(Samples.packed([1] * len(joined), first=joined[0], total=batch.total).roots) == 1


@pytest.mark.parametrize("layout", [(16, 3, 1), (16, 8, 4), (12, 8, 1), (7, 2, 1), (6, 1, 4)])
def test_cuts_inside_a_segment_are_refused(layout):
    with pytest.raises(CutError, match="segments"):
        GlobalBatch(*layout)


def test_arguments_are_checked():
    for wrong in ((0,), (16, 0), (16, 1, 0), (16, 1, 1, "strided")):
        with pytest.raises(ArgumentError):
            GlobalBatch(*wrong)
    for wrong in ((2, 0), (-1, 0), (0, 4)):
        with pytest.raises(ArgumentError):
            GlobalBatch(16, 2, 4).share(*wrong)


# ---- the sampler ------------------------------------------------------------------------------------------


def samplers(batch, length, **options):
    return [GlobalBatchSampler(length, batch, rank, **options) for rank in range(batch.ranks)]


def in_global_order(batch, handed):
    """What the ranks were handed, put where the layout says: one list of indices a global batch."""
    found = []
    for at in range(0, len(handed[0]), batch.micro_batches):
        whole = [None] * batch.total
        for rank, micro in places(batch):
            for place, index in zip(
                batch.samples(rank, micro), handed[rank][at + micro], strict=True
            ):
                whole[place] = index
        found.append(whole)
    return found


@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_every_layout_hands_out_one_global_order(data, count, epoch, shuffle):
    of, over = data.draw(st.sampled_from([8, 12, 16])), data.draw(st.integers(0, 7))
    orders = []
    for batch in (GlobalBatch(of), data.draw(batches(of))):
        made = samplers(batch, count * of + over, seed=3, shuffle=shuffle, drop_last=True)
        for sampler in made:
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == len(sampler)
        orders.append(in_global_order(batch, [list(sampler) for sampler in made]))
    assert orders[0] == orders[1]
    assert len(set(chain(*orders[0]))) == count * of


@given(st.data(), st.integers(0, 4))
def test_a_state_goes_on_at_another_layout(data, done):
    wanted = list(GlobalBatchSampler(64, GlobalBatch(16), 0, seed=1))
    before, after = data.draw(batches(16)), data.draw(batches(16))
    sampler = GlobalBatchSampler(64, before, 0, seed=1)
    for _, _ in zip(range(done * before.micro_batches), sampler, strict=False):
        pass
    state = sampler.state_dict()
    assert state["done"] == done
    resumed = samplers(after, 64, seed=1)
    for one in resumed:
        one.load_state_dict(state)
        one.set_epoch(state["epoch"])
    assert in_global_order(after, [list(one) for one in resumed]) == wanted[done:]
    assert (
        in_global_order(after, [list(one) for one in resumed]) == wanted
    )  # the next pass is a whole one


def test_a_batch_counts_when_its_last_micro_batch_is_handed_out():
    sampler = GlobalBatchSampler(32, GlobalBatch(16, 2, 4), 1)
    counts = [sampler.state_dict()["done"] for _ in sampler]
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2]
    assert sampler.state_dict(trained=1)["done"] == 1


def test_epochs_and_seeds_are_other_orders():
    def order(seed, epoch):
        sampler = GlobalBatchSampler(64, GlobalBatch(16), 0, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(chain(*sampler))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    assert order(1, 2) == order(1, 2)
    torch.manual_seed(7)  # the global generator is neither read nor moved
    first = torch.rand(1)
    torch.manual_seed(7)
    order(1, 2)
    assert torch.rand(1) == first


def test_refusals():
    batch = GlobalBatch(16, 2, 4)
    with pytest.raises(ArgumentError, match="drop_last"):
        GlobalBatchSampler(33, batch, 0)
    with pytest.raises(ArgumentError, match="smaller"):
        GlobalBatchSampler(15, batch, 0, drop_last=True)
    with pytest.raises(ArgumentError):
        GlobalBatchSampler(32, batch, 2)
    sampler = GlobalBatchSampler(32, batch, 0)
    for wrong in ({"seed": 1}, {"length": 48}, {"of": 8}, {"shuffle": False}, {"done": 3}):
        with pytest.raises(ArgumentError, match="keep dataset"):
            sampler.load_state_dict(sampler.state_dict() | wrong)


def test_a_loader_takes_it():
    sampler = GlobalBatchSampler(32, GlobalBatch(16, 2, 2), 1, shuffle=False)
    assert [b.tolist() for b in DataLoader(range(32), batch_sampler=sampler)][:2] == [
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


def test_the_control_hands_out_no_runs():
    """torch's sampler strides: its ranks' batches are no runs of the global batch."""
    ranks = [list(DistributedSampler(range(16), 2, rank, shuffle=False)) for rank in range(2)]
    assert ranks[0] == list(range(0, 16, 2))
    batch = GlobalBatch(16, 2)
    assert in_global_order(batch, [[rank] for rank in ranks]) != [list(range(16))]
