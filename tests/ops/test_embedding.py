"""The embedding gathers bits, and its table's gradient has one order over the samples.

1. Native equals portable, bit for bit: ids that repeat within leaves, samples and segments, and are absent.
2. Adding +0 for what is absent changes no bit, also of −0 gradients.
3. The cost is that of the tokens, whatever the number of samples.

embedding-kernel-v1 judges the order, the invariances and the error.
"""

import time

import pytest
import torch
import torch.nn.functional as F

from isobit import ArgumentError, UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.embedding import portable
from isobit.ops.embedding.op import embedding
from isobit.order.samples import Samples
from isobit.order.tree import merge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def drawn(shape, seed, dtype=torch.float32):
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


def drawn_ids(shape, vocabulary, seed=0):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def table_grad(ids, weight, grad, **options):
    leaf = weight.detach().requires_grad_()
    return torch.autograd.grad(embedding(ids, leaf, **options), leaf, grad)[0]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 40])
@pytest.mark.parametrize("lengths", [(600,), (5,) * 64, (9, 0, 300), (40,) * 12, (1,), (0,), ()])
def test_native_equals_portable(lengths, vocabulary, dtype):
    for side in ("left", "right"):
        samples = Samples.padded(lengths, width=max(lengths, default=0) + 3, side=side)
        ids = drawn_ids((samples.rows,), vocabulary)
        weight, grad = drawn((vocabulary, 19), 1, dtype), drawn((samples.rows, 19), 2, dtype)
        assert bits.equal(embedding(ids, weight, samples=samples), F.embedding(ids, weight))
        for padding in (-1, 1):
            found = table_grad(
                ids, weight, grad, samples=samples, padding_idx=None if padding < 0 else padding
            )
            expected = portable.embedding_weight_grad(grad, ids, samples, vocabulary, padding)
            assert bits.first_difference(found, expected) is None


def test_the_sparse_sum_is_the_dense_definition():
    """Every row of the table over all tokens, those of other ids as +0, by the tree itself."""
    samples, vocabulary = Samples.packed([300, 4, 0, 20, 7, 7, 260, 1]), 5
    ids, grad = drawn_ids((samples.rows,), vocabulary - 1), drawn((samples.rows, 3), 1)
    grad[ids == 2] = -0.0
    sums = []
    for segment in samples.segments:
        total = torch.zeros(vocabulary, 3)
        for at, leaf in enumerate(segment):
            run = torch.zeros(vocabulary, 3)
            for token in range(leaf.start, leaf.start + leaf.length):
                run += torch.where(
                    torch.arange(vocabulary)[:, None] == ids[token], grad[token], 0.0
                )
            total = total + run if at else run
        sums.append(total)
    expected = merge(sums, torch.add)
    assert not torch.signbit(expected[expected == 0]).any()
    assert bits.equal(table_grad(ids, torch.zeros(vocabulary, 3), grad, samples=samples), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_special_values(dtype):
    ids, grad = torch.tensor([0, 0, 1, 1, 2, 2, 3]), torch.ones(7, 2, dtype=dtype)
    grad[0], grad[2], grad[3], grad[4:6] = torch.nan, torch.inf, -torch.inf, -0.0
    found = table_grad(ids, torch.zeros(5, 2, dtype=dtype), grad)
    expected = (
        torch.tensor([torch.nan, torch.nan, 0.0, 1.0, 0.0], dtype=dtype).unsqueeze(1).expand(5, 2)
    )
    assert bits.equal(found, expected.contiguous())


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0), (2, 2, 3)])
def test_shapes_are_stocks(shape):
    ids, weight = drawn_ids(shape, 4), drawn((4, 5), 1).requires_grad_()
    for kind in (torch.int64, torch.int32):
        ours, stock = embedding(ids.to(kind), weight), F.embedding(ids.to(kind), weight)
        assert bits.equal(ours.detach(), stock.detach())
        grad = drawn((*shape, 5), 2)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, weight, grad)[0] for y in (ours, stock))
        )


def test_gradcheck_in_fp64():
    ids, weight = drawn_ids((2, 9), 4), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: embedding(ids, w), (weight,))


@needs_native
def test_time_does_not_grow_with_samples_times_vocabulary():
    """2,048 tokens as one sample, and as 1,024 of a table that a dense pass a sample would walk 1,024 times."""
    ids, weight, grad = drawn_ids((2048,), 8192), torch.zeros(8192, 64), drawn((2048, 64), 1)

    def best(samples):
        found = []
        for _ in range(5):
            started = time.perf_counter()
            table_grad(ids, weight, grad, samples=samples)
            found.append(time.perf_counter() - started)
        return min(found)

    assert best(Samples.packed([2] * 1024)) < 20 * best(Samples.packed([2048]))


@needs_native
def test_opcheck():
    ids, weight = drawn_ids((2, 5), 4), torch.randn(4, 3, requires_grad=True)
    embedding(ids, weight)
    for prefix in ("", "portable_"):
        torch.library.opcheck(
            getattr(torch.ops.isobit, f"{prefix}embedding"), (ids, weight, None, -1)
        )


def test_compiles_whole_with_the_same_bits():
    ids, weight = drawn_ids((2, 5), 4), torch.randn(4, 3, requires_grad=True)
    compiled = torch.compile(
        lambda i, w: embedding(i, w).square().sum(), fullgraph=True, backend="aot_eager"
    )
    plain = torch.autograd.grad(embedding(ids, weight).square().sum(), weight)[0]
    assert bits.equal(torch.autograd.grad(compiled(ids, weight), weight)[0], plain)


def test_a_share_of_the_samples_is_refused_under_autograd():
    weight, share = torch.ones(4, 3, requires_grad=True), Samples.packed([1, 1], first=0, of=4)
    with pytest.raises(UnsupportedError, match="samples 0 to 2 of 4, while no share is collected"):
        embedding(torch.tensor([0, 1]), weight, samples=share)


REFUSED = {
    "id too large": lambda i, w: embedding(i + 3, w),
    "id negative": lambda i, w: embedding(i - 1, w),
    "id too large, portable": lambda i, w: embedding(i + 3, w.double()),
    "float ids": lambda i, w: embedding(i.float(), w),
    "a list": lambda i, w: embedding(i.tolist(), w),
    "table": lambda i, w: embedding(i, w[0]),
    "dtype": lambda i, w: embedding(i, w.int()),
    "padding_idx": lambda i, w: embedding(i, w, padding_idx=4),
    "samples": lambda i, w: embedding(i, w, samples=Samples.packed([3])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_expected_received_and_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"(?s)isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](torch.tensor([0, 1]), torch.ones(4, 3))
