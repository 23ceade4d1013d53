"""NaNs, infinities and subnormal numbers over shares: one value for every layout, reducer and mode of the processor.

1. inf − inf over micro-batches and ranks, and NaNs of any payload: the bits of the whole batch, one NaN.
2. Norms, clipping and losses of such gradients, over ranks.
3. torch.set_flush_denormal changes no merge.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isobit
from isobit import Samples, bits
from isobit.parallel import GlobalBatch, Gradients, LossMeter, RowParallelLinear
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.parallel.tensor.vocab import vocab_cross_entropy
from isobit.simulator import World

OF, IN, OUT = 4, 37, 23  # odd: tails of vectors differ from the rest
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
LAYOUTS = {
    "micro-batches": (1, 4, lambda net: net, "rank"),
    "ranks": (4, 1, lambda net: net, "rank"),
    "both": (2, 2, lambda net: net, "rank"),
    "DDP": (2, 2, DistributedDataParallel, "rank"),
    "FSDP2": (2, 2, fully_shard, "micro"),
    "FSDP2, one micro-batch": (4, 1, fully_shard, "micro"),
}


def output_gradient(dtype):
    """A row each sample: inf on the first, -inf on the last; NaN, a NaN of all bits, and finite numbers beside."""
    made = torch.ones(OF, OUT)
    made[0, :8], made[3, :8] = torch.inf, -torch.inf
    made[1, 8:10], made[2, 10:12] = torch.nan, torch.inf
    made = made.to(dtype)
    made.view(torch.int32 if dtype == torch.float32 else torch.int16)[2, 12:14] = -1
    return made


def whole(layer, dtype):
    layer(torch.ones(OF, 1, IN, dtype=dtype)).backward(output_gradient(dtype).unsqueeze(1))
    return {name: p.grad for name, p in layer.named_parameters()}


class Layer(isobit.nn.Linear):
    """fully_shard warns of outputs that are views."""

    def forward(self, x, samples=None):
        return super().forward(x, samples).clone()


def make(dtype):
    torch.manual_seed(0)
    return Layer(IN, OUT).to(dtype)


def collected(rank, dtype, ranks, micro_batches, wrap, order):
    layer = make(dtype)
    wrapped = wrap(layer)
    batch = GlobalBatch(OF, ranks, micro_batches, order)
    gradients = Gradients(wrapped, batch)
    for index in range(micro_batches):
        with gradients.micro_batch(index) as share:
            samples = Samples.packed([1] * batch.size, first=share.first, total=OF)
            held = slice(share.first, share.first + batch.size)
            wrapped(torch.ones(batch.size, IN, dtype=dtype), samples=samples).backward(
                output_gradient(dtype)[held]
            )
    return layer


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- 1. one NaN ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_of_shares_is_the_nan_of_the_whole(layout, dtype):
    expected = whole(make(dtype), dtype)
    nans = bits.as_integers(expected["weight"][:8]).unique().tolist()
    assert [n & (2 ** (8 * dtype.itemsize) - 1) for n in nans] == [NAN[dtype]]

    def run(rank):
        return {
            name: full(p.grad).clone()
            for name, p in collected(rank, dtype, *LAYOUTS[layout]).named_parameters()
        }

    for found in World(LAYOUTS[layout][0]).run(run).values:
        for name, grad in expected.items():
            assert bits.equal(found[name], grad), (
                f"{name}: {bits.first_difference(found[name], grad)}"
            )


def test_a_nan_of_tied_uses():
    """Uses are added last: inf of one, -inf of the other."""

    def run(micro_batches):
        torch.manual_seed(0)
        one, two = (isobit.nn.Linear(9, 9, bias=False).bfloat16() for _ in range(2))
        two.weight = one.weight
        gradients = Gradients(
            nn.ModuleList([one, two]), GlobalBatch(2, micro_batches=micro_batches)
        )
        for index in range(micro_batches):
            with gradients.micro_batch(index) as share:
                size = 2 // micro_batches
                samples, x = (
                    Samples.packed([1] * size, first=share.first, total=2),
                    torch.ones(size, 9).bfloat16(),
                )
                loss = (
                    one(x, samples).float().sum() * torch.inf
                    - two(x, samples).float().sum() * torch.inf
                )
                loss.backward()
        return one.weight.grad

    found = [run(1), run(2)]
    assert bits.as_integers(found[0]).unique().tolist() == [NAN[torch.bfloat16]]
    assert bits.equal(*found)


def test_a_nan_of_tensor_parallel_ranks():
    x = torch.ones(3, 1024)
    x[0, 0], x[0, -1], x[1, 700] = torch.inf, -torch.inf, torch.nan
    targets = torch.tensor([1, 600, 3])

    for dtype in DTYPES[:2]:
        torch.manual_seed(0)
        layer = nn.Linear(1024, 16).to(dtype)
        layer.weight.data.fill_(1.0)
        words = torch.randn(1024, 8).to(dtype)
        words[0], words[1023] = torch.inf, -torch.inf

        def run(_, layer=layer, words=words, dtype=dtype):
            ranks = TensorParallelGroup.of(dist.group.WORLD)
            half = slice(512 * ranks.rank, 512 * (ranks.rank + 1))
            hidden = torch.ones(3, 8).to(dtype).requires_grad_()
            loss = vocab_cross_entropy(hidden, words[half], targets, tp_group=ranks)
            loss.backward()
            return (
                RowParallelLinear.from_linear(layer, ranks)(x[:, half].to(dtype)).detach(),
                loss.detach(),
                hidden.grad,
            )

        hidden = torch.ones(3, 8).to(dtype).requires_grad_()
        loss = isobit.linear_cross_entropy(hidden, words, targets)
        loss.backward()
        expected = (
            isobit.linear(x.to(dtype), layer.weight, layer.bias).detach(),
            loss.detach(),
            hidden.grad,
        )
        assert expected[0].isnan().any()
        for found in World(2).run(run).values:
            for ours, theirs in zip(found, expected, strict=True):
                assert bits.equal(ours, theirs), bits.first_difference(ours, theirs)


# ---- 2. norms, clipping, losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["ranks", "FSDP2"])
def test_clipping_by_a_norm_that_is_not_finite(layout, dtype):
    layer = make(dtype)
    whole(layer, dtype)
    norm = isobit.optim.clip_grad_norm_(layer.parameters(), 1.0)
    clipped = {name: p.grad for name, p in layer.named_parameters()}

    def run(rank):
        made = collected(rank, dtype, *LAYOUTS[layout])
        clip = isobit.parallel.clip_grad_norm_ if "FSDP" in layout else isobit.optim.clip_grad_norm_
        found = clip(made if "FSDP" in layout else made.parameters(), 1.0)
        return found, {name: full(p.grad).clone() for name, p in made.named_parameters()}

    for found, grads in World(LAYOUTS[layout][0]).run(run).values:
        assert bits.equal(found, norm)
        for name, grad in clipped.items():
            assert bits.equal(grads[name], grad), (
                f"{name}: {bits.first_difference(grads[name], grad)}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_shards_is_the_step_of_the_whole(dtype):
    """Also of DTensors, with NaNs and infinities among the gradients."""
    layer = make(dtype)
    whole(layer, dtype)
    isobit.optim.AdamW(layer.parameters(), lr=0.1).step()
    expected = {name: p.detach() for name, p in layer.named_parameters()}
    nans = bits.as_integers(expected["weight"][:8]).unique().tolist()
    assert [n & (2 ** (8 * dtype.itemsize) - 1) for n in nans] == [NAN[dtype]]

    def run(rank):
        made = collected(rank, dtype, *LAYOUTS["FSDP2"])
        isobit.optim.AdamW(made.parameters(), lr=0.1).step()
        return {name: full(p.detach()).clone() for name, p in made.named_parameters()}

    for found in World(2).run(run).values:
        assert all(bits.equal(found[name], p) for name, p in expected.items())


def test_losses_of_ranks():
    terms = torch.tensor([torch.inf, 1.0, -torch.inf, 2.0])

    def run(rank):
        meter = LossMeter()
        meter.add(terms.chunk(dist.get_world_size())[rank])
        return meter.value(), meter.cross_entropy()

    expected = World(1).run(run).values[0]
    assert expected[0].isnan()
    for ranks in (2, 4):
        for found in World(ranks).run(run).values:
            assert all(bits.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- 3. subnormal numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["micro-batches", "both", "DDP", "FSDP2"])
def test_flushing_changes_no_merge(layout):
    """Gradients of 90,000 elements, which torch's pool would share out; each sample's is subnormal, their sum too."""
    ranks, micro_batches, wrap, order = LAYOUTS[layout]
    x = torch.randn(OF, 300, generator=torch.Generator().manual_seed(1))
    out = torch.randn(OF, 300, generator=torch.Generator().manual_seed(2)).mul(2.0**-128)

    def make_layer():
        torch.manual_seed(0)
        return Layer(300, 300, bias=False)

    def run(rank, flushes):
        layer = make_layer()
        wrapped = wrap(layer)
        batch = GlobalBatch(OF, ranks, micro_batches, order)
        gradients = Gradients(wrapped, batch)
        torch.set_flush_denormal(flushes)
        try:
            for index in range(micro_batches):
                with gradients.micro_batch(index) as share:
                    samples = Samples.packed([1] * batch.size, first=share.first, total=OF)
                    held = slice(share.first, share.first + batch.size)
                    wrapped(x[held], samples=samples).backward(out[held])
        finally:
            torch.set_flush_denormal(False)
        return full(layer.weight.grad).clone()

    layer = make_layer()
    layer(x.unsqueeze(1)).backward(out.unsqueeze(1))
    expected = layer.weight.grad
    subnormal = (expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)
    assert subnormal.sum() > 10_000
    for flushes in (False, True):
        for found in World(ranks).run(run, flushes).values:
            assert bits.equal(found, expected), bits.first_difference(found, expected)
