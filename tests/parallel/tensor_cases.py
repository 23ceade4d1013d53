"""Cases for tensor parallelism: each compares a split operator with the unsplit one on a rank.

A case returns the names of the outputs and gradients that differ.
"""

from contextlib import contextmanager, nullcontext

import torch

import isobit
from isobit import Samples, bits
from isobit.integrations.transformers.head import logits_of
from isobit.ops.portable.samples import as_samples
from isobit.ops.share import Share, collecting
from isobit.parallel.tensor.head_norm import head_norm
from isobit.parallel.tensor.linear import column_linear, column_linear_group, row_linear
from isobit.parallel.tensor.shard import Shard, take_shard
from isobit.parallel.tensor.vocab import (
    vocab_cross_entropy,
    vocab_embedding,
    vocab_logits,
    vocab_logprob,
)

LENGTHS, WIDTH = (7, 3, 5, 6), 7
WHOLE = Samples.padded(LENGTHS, width=WIDTH)
SHARE = Samples.padded(LENGTHS, width=WIDTH, first=4, total=16)
CUMULATIVE = torch.tensor([0, 10, 11, 17, 28], dtype=torch.int32)  # the same 28 rows, packed


def draw(*shape, dtype, seed):
    """Full mantissas, wide exponents."""
    make = torch.Generator().manual_seed(seed)
    wide = torch.exp2(torch.randint(-8, 8, shape, generator=make).float())
    return (torch.randn(shape, generator=make) * wide).to(dtype)


def leaf(tensor):
    """Keeps a gradient as it is delivered: that of the whole batch rounded, that of a share not."""
    made = tensor.detach().clone().requires_grad_()
    made.grad_dtype = torch.float32
    return made


@contextmanager
def collected(samples):
    with (
        collecting(Share(samples.first, samples.total, len(samples.spans)))
        if isinstance(samples, Samples) and samples.is_share
        else nullcontext()
    ):
        yield


def part(whole, ranks, axis):
    return take_shard(whole, Shard.equal(ranks, axis, whole.shape[axis]))


def differing(**pairs):
    return [name for name, (found, expected) in pairs.items() if not bits.equal(found, expected)]


def column(ranks, dtype, samples, features=1024):
    x, (w, b) = draw(4, WIDTH, 96, dtype=dtype, seed=1), parameters(features, 96, dtype)
    g = draw(4, WIDTH, features, dtype=dtype, seed=4)
    whole_x, local_x, w0, b0 = leaf(x), leaf(x), leaf(w), leaf(b)
    w1, b1 = leaf(part(w, ranks, 0)), leaf(part(b, ranks, 0))
    with collected(samples):
        y0 = isobit.linear(whole_x, w0, b0, samples=samples)
        y0.backward(g)
        y1 = column_linear(local_x, w1, b1, tp_group=ranks, samples=samples)
        y1.backward(part(g, ranks, 2))
    return differing(
        output=(y1, part(y0.detach(), ranks, 2)),
        input_grad=(local_x.grad, whole_x.grad),
        weight_grad=(w1.grad, part(w0.grad, ranks, 0)),
        bias_grad=(b1.grad, part(b0.grad, ranks, 0)),
    )


def parameters(rows, columns, dtype):
    return draw(rows, columns, dtype=dtype, seed=2), draw(rows, dtype=dtype, seed=3)


def row(ranks, dtype, samples, features=1024):
    x, (w, b) = draw(4, WIDTH, features, dtype=dtype, seed=1), parameters(80, features, dtype)
    g = draw(4, WIDTH, 80, dtype=dtype, seed=4)
    x0, w0, b0, b1 = leaf(x), leaf(w), leaf(b), leaf(b)
    x1, w1 = leaf(part(x, ranks, 2)), leaf(part(w, ranks, 1))
    with collected(samples):
        y0 = isobit.linear(x0, w0, b0, samples=samples)
        y0.backward(g)
        y1 = row_linear(x1, w1, b1, tp_group=ranks, samples=samples)
        y1.backward(g)
    return differing(
        output=(y1, y0),
        input_grad=(x1.grad, part(x0.grad, ranks, 2)),
        weight_grad=(w1.grad, part(w0.grad, ranks, 1)),
        bias_grad=(b1.grad, b0.grad),
    )


def group(ranks, dtype, samples):
    """Queries, keys and values of 8 groups: 16 query heads of 64, and 8 of keys and values."""
    x, sizes = draw(4, WIDTH, 96, dtype=dtype, seed=1), (1024, 512, 512)
    weights = [draw(size, 96, dtype=dtype, seed=10 + size + i) for i, size in enumerate(sizes)]
    biases = [draw(size, dtype=dtype, seed=20 + size + i) for i, size in enumerate(sizes)]
    grads = [draw(4, WIDTH, size, dtype=dtype, seed=30 + size + i) for i, size in enumerate(sizes)]
    x0, x1, w0, b0 = leaf(x), leaf(x), [leaf(w) for w in weights], [leaf(b) for b in biases]
    w1, b1 = ([leaf(part(t, ranks, 0)) for t in of] for of in (weights, biases))
    with collected(samples):
        y0 = isobit.linear_group(x0, w0, b0, groups=8, samples=samples)
        torch.autograd.backward(y0, grads)
        y1 = column_linear_group(x1, w1, b1, groups=8, tp_group=ranks, samples=samples)
        torch.autograd.backward(y1, [part(g, ranks, 2) for g in grads])
    return differing(
        input_grad=(x1.grad, x0.grad),
        **{
            f"output_{i}": (b, part(a.detach(), ranks, 2))
            for i, (a, b) in enumerate(zip(y0, y1, strict=True))
        },
        **{
            f"weight_{i}": (b.grad, part(a.grad, ranks, 0))
            for i, (a, b) in enumerate(zip(w0, w1, strict=True))
        },
        **{
            f"bias_{i}": (b.grad, part(a.grad, ranks, 0))
            for i, (a, b) in enumerate(zip(b0, b1, strict=True))
        },
    )


def embedding(ranks, dtype, samples, width=33):
    """An odd number of 16-bit elements, rows of −0, a padding row, and ids that repeat over samples."""
    table = draw(64, width, dtype=dtype, seed=1)
    table[::5] = -0.0
    ids = torch.randint(0, 64, (4, WIDTH), generator=torch.Generator().manual_seed(2))
    ids[0, :3] = 50
    ids[:, 4], ids[:, 5] = 7, 40
    g = draw(4, WIDTH, width, dtype=dtype, seed=3)
    t0, t1 = leaf(table), leaf(part(table, ranks, 0))
    with collected(samples):
        y0 = isobit.embedding(ids, t0, samples=samples, padding_idx=50)
        y0.backward(g)
        y1 = vocab_embedding(ids, t1, tp_group=ranks, samples=samples, padding_idx=50)
        y1.backward(g)
    return differing(output=(y1, y0), table_grad=(t1.grad, part(t0.grad, ranks, 0)))


def logprob(ranks, dtype, samples):
    hidden, w = draw(4, WIDTH, 96, dtype=dtype, seed=1), draw(2048, 96, dtype=dtype, seed=2) / 4096
    targets = torch.randint(0, 2048, (4, WIDTH), generator=torch.Generator().manual_seed(3))
    targets[1, 2] = -100
    h0, h1, w0, w1 = leaf(hidden), leaf(hidden), leaf(w), leaf(part(w, ranks, 0))
    asked = {"temperature": 0.7, "samples": samples}
    with collected(samples):
        y0 = isobit.linear_logprob(h0, w0, targets, **asked)
        y1 = vocab_logprob(h1, w1, targets, tp_group=ranks, **asked)
        with torch.no_grad():  # a mean over a share is nothing to train on
            loss0 = isobit.linear_cross_entropy(h0, w0, targets, samples=samples)
            loss1 = vocab_cross_entropy(h1, w1, targets, tp_group=ranks, samples=samples)
        g = draw(4, WIDTH, dtype=torch.float32, seed=4)
        y0.backward(g)
        y1.backward(g)
    return differing(
        output=(y1, y0),
        loss=(loss1, loss0),
        hidden_grad=(h1.grad, h0.grad),
        weight_grad=(w1.grad, part(w0.grad, ranks, 0)),
    )


def logits(ranks, dtype, samples):
    given = WHOLE if samples is SHARE else samples
    hidden, w = draw(4, WIDTH, 96, dtype=dtype, seed=1), draw(1024, 96, dtype=dtype, seed=2)
    head = torch.nn.Linear(96, 1024, bias=False, dtype=dtype)
    head.weight = torch.nn.Parameter(w)
    head.weight.grad_dtype = torch.float32
    h0, h1, w1 = leaf(hidden), leaf(hidden), leaf(part(w, ranks, 0))
    y0 = logits_of(h0, head, as_samples(given))
    y1 = vocab_logits(h1, w1, tp_group=ranks, samples=given)
    g = draw(4, WIDTH, 1024, dtype=torch.float32, seed=4)
    y0.backward(g)
    y1.backward(g)
    return differing(
        output=(y1, y0),
        hidden_grad=(h1.grad, h0.grad),
        weight_grad=(w1.grad, part(head.weight.grad, ranks, 0)),
    )


def norm_of_heads(ranks, dtype, samples):
    x, w = draw(4, WIDTH, 8, 64, dtype=dtype, seed=1), draw(64, dtype=dtype, seed=2)
    g = draw(4, WIDTH, 8, 64, dtype=dtype, seed=3)
    x0, x1, w0, w1 = leaf(x), leaf(part(x, ranks, 2)), leaf(w), leaf(w)
    with collected(samples):
        y0 = isobit.rms_norm(x0, w0, 1e-6, samples=samples, heads=True)
        y0.backward(g)
        y1 = head_norm(x1, w1, 1e-6, tp_group=ranks, samples=samples)
        y1.backward(part(g, ranks, 2))
    return differing(
        output=(y1, part(y0.detach(), ranks, 2)),
        input_grad=(x1.grad, part(x0.grad, ranks, 2)),
        weight_grad=(w1.grad, w0.grad),
    )


CASES = {
    case.__name__: case for case in (column, row, group, embedding, logprob, logits, norm_of_heads)
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def differences(ranks, dtypes=DTYPES):
    """Every case, of the whole batch and of a share of it: what differs, by case."""
    found = {}
    for name, case in CASES.items():
        for dtype in dtypes:
            for samples in (WHOLE, SHARE):
                wrong = case(ranks, dtype, samples)
                if wrong:
                    found[f"{name} {dtype} {'share' if samples.is_share else 'whole'}"] = wrong
    return found
