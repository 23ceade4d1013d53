"""optimizer.step() and clipping before the last micro-batch are refused, for any optimizer; skipping a step is not."""

import pytest
import torch
from torch import nn

import isobit
from isobit import ArgumentError, Samples, UnsupportedError, bits
from isobit.parallel import GlobalBatch, Gradients
from isobit.simulator import World
from tests.attacks.small_net import (
    OF,
    REDUCERS,
    TOKENS,
    Net,
    alone,
    held,
    micro_batch,
    read,
    tokens,
)

OPTIMIZERS = {
    "isobit": lambda p: isobit.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("reducer", REDUCERS)
def test_an_early_step_is_refused(reducer, name):
    ranks, micro_batches, wrap, order = REDUCERS[reducer]
    dtype = torch.bfloat16

    def run(_):
        net = Net(dtype)
        wrapped = wrap(net)
        gradients = Gradients(wrapped, GlobalBatch(OF, ranks, micro_batches, order))
        optimizer = OPTIMIZERS[name](wrapped.parameters())
        before = held(net)
        for index in range(micro_batches):
            micro_batch(gradients, wrapped, index, dtype)
            if index < micro_batches - 1:
                with pytest.raises(UnsupportedError, match=rf"(?s)step\(\).*micro-batch {index}"):
                    optimizer.step()
        optimizer.step()
        after = held(net)
        return before != after

    assert World(ranks).run(run).values == [True] * ranks


def test_a_step_inside_the_last_block_and_clipping_are_refused():
    net = Net(torch.float32)
    gradients = Gradients(net, GlobalBatch(OF, micro_batches=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    micro_batch(gradients, net, 0, torch.float32)
    for clip in (isobit.optim.clip_grad_norm_, isobit.parallel.clip_grad_norm_):
        with pytest.raises(UnsupportedError, match="clip_grad_norm_"):
            clip(net.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match=r"SGD\.step"), gradients.micro_batch(1):
        optimizer.step()


def test_other_optimizers_and_models_step_as_they_like():
    net, other = Net(torch.float32), nn.Linear(2, 2)
    gradients = Gradients(net, GlobalBatch(OF, micro_batches=2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    micro_batch(gradients, net, 0, torch.float32)
    other(torch.ones(2)).sum().backward()
    before = bits.digest(other)
    optimizer.step()
    assert bits.digest(other) != before


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_step_may_be_skipped(reducer):
    """By discard() between micro-batches, by an exception in one, by close(), and by dropping the object."""
    ranks, micro_batches, wrap, order = REDUCERS[reducer]
    dtype = torch.bfloat16

    def run(_):
        net = Net(dtype)
        wrapped = wrap(net)
        gradients = Gradients(wrapped, GlobalBatch(OF, ranks, micro_batches, order))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        micro_batch(gradients, wrapped, 0, dtype)
        gradients.discard()
        optimizer.step()
        micro_batch(gradients, wrapped, 0, dtype)
        with pytest.raises(ZeroDivisionError), gradients.micro_batch(1):
            raise ZeroDivisionError
        optimizer.step()
        with gradients.micro_batch(0) as share:
            with pytest.raises(ArgumentError, match=r"discard\(\) inside micro-batch 0"):
                gradients.discard()
            with (
                pytest.raises(ArgumentError, match="inside micro-batch 0"),
                gradients.micro_batch(0),
            ):
                pass
            samples = Samples.packed(
                [TOKENS] * gradients.batch.size, first=share.first, total=share.total
            )
            x = tokens(dtype)[share.first : share.first + gradients.batch.size]
            isobit.exact_sum(wrapped(x, samples).float().square()).backward()
        for index in range(1, micro_batches):
            micro_batch(gradients, wrapped, index, dtype)
        return read(net)

    assert set(World(ranks).run(run).values) == {alone(dtype)}


def test_a_collector_that_is_gone_refuses_nothing():
    for drop in ("close", "del"):
        net = Net(torch.float32)
        gradients = Gradients(net, GlobalBatch(OF, micro_batches=2))
        micro_batch(gradients, net, 0, torch.float32)
        if drop == "close":
            gradients.close()
        del gradients
        torch.optim.SGD(net.parameters(), lr=0.1).step()
