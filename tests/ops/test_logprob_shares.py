"""Shares of log-probabilities, of samples and of the vocabulary: merged by the tree, they have the bits of the whole.

1. Micro-batches: the weight's gradient is fp32 and unrounded; the counter of all shares, rounded once, is the batch's.
2. The loss of a micro-batch over the global count has the gradient of the global mean.
3. Vocabulary shards exchange pairs; values, dhidden and dweight are the unsplit operator's.
4. What is no share is refused.
"""

import operator
from functools import reduce

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isobit import ArgumentError, CutError, UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.logprob import partial, portable
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import linear_logprob
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import round_once
from isobit.ops.share import Share, collecting
from isobit.order import tree
from isobit.order.cut import Cut
from isobit.order.samples import Samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [5, 0, 300, 1, 17, 40, 3, 260, 9, 2, 31, 8]  # of 12 samples: four segments of three
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def wide(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Full mantissas over eight octaves."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(8 * torch.rand(shape, generator=generator) - 6)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def problem(rows, vocabulary, width, dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (wide((n, width), n + vocabulary, dtype) for n in (rows, vocabulary))
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[2::5] = -100
    return hidden, weight, targets


def weight_grads(function, hidden, weight, targets, cotangent, lengths, share):
    """dweight of the whole batch, and of each share of `share` samples by autograd."""
    of, edges = len(lengths), [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    leaf = weight.detach().requires_grad_()
    whole = function(hidden, leaf, targets, samples=Samples.packed(lengths))
    (wanted,) = torch.autograd.grad(whole, leaf, cotangent)
    found = []
    for first in range(0, of, share):
        leaf = weight.detach().clone().requires_grad_()
        leaf.grad_dtype = torch.float32
        rows = slice(edges[first], edges[first + share])
        part = Samples.packed(lengths[first : first + share], first=first, of=of)
        with collecting(Share(first, of, share)):
            values = function(hidden[rows], leaf, targets[rows], samples=part)
        values.backward(cotangent[rows] if cotangent.dim() else cotangent)
        found.append(leaf.grad)
    return wanted, found


def merged(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return round_once(tree.merge(parts, torch.add), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [3, 6])
def test_micro_batches_merge_to_the_batch(dtype, share):
    hidden, weight, targets = problem(sum(LENGTHS), 70, 24, dtype)
    cotangent = wide((len(hidden),), 5)
    whole, parts = weight_grads(linear_logprob, hidden, weight, targets, cotangent, LENGTHS, share)
    assert all(p.dtype == torch.float32 for p in parts)
    assert bits.first_difference(merged(parts, dtype), whole) is None
    if dtype != torch.float32:  # rounded share by share
        early = reduce(operator.add, [p.to(dtype) for p in parts])
        assert not bits.equal(early, whole)
    elif share == 3:
        assert not bits.equal(reduce(operator.add, parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_where_the_cap_binds(dtype):
    """4096 samples are 1024 segments of four; a share that cut by its own number would have segments of one."""
    lengths = [1] * 4096
    hidden, weight, targets = problem(4096, 17, 8, dtype)
    cotangent = wide((4096,), 6)
    whole, parts = weight_grads(linear_logprob, hidden, weight, targets, cotangent, lengths, 1024)
    assert bits.first_difference(merged(parts, dtype), whole) is None
    own = []
    for first in range(0, 4096, 1024):
        rows = slice(first, first + 1024)
        leaf = weight.detach().float().requires_grad_()
        values = linear_logprob(
            hidden[rows].float(), leaf, targets[rows], samples=Samples.packed(lengths[rows])
        )
        own.append(torch.autograd.grad(values, leaf, cotangent[rows])[0])
    assert not bits.equal(torch.stack(own), torch.stack(parts))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_executors_have_one_root_of_a_share(dtype):
    hidden, weight, targets = problem(sum(LENGTHS[:6]), 70, 8, dtype)
    spans, grad = torch.tensor(Samples.packed(LENGTHS[:6]).spans), wide((len(hidden),), 7)
    stats = linear_logprob_stats(hidden, weight, targets, 0.7)[1]
    given = grad, hidden, weight, targets, stats, spans, 0.7, True, True, 12
    for left, right in zip(
        torch.ops.isobit.linear_logprob_backward(*given),
        torch.ops.isobit.portable_linear_logprob_backward(*given),
        strict=True,
    ):
        assert bits.first_difference(left, right) is None


def test_shapes_without_values_have_the_gradients_dtype():
    linear_logprob(*problem(6, 70, 8, torch.bfloat16))
    for name in ("linear_logprob", "portable_linear_logprob")[0 if dispatch.has_native() else 1 :]:
        for of, dtype in ((0, torch.bfloat16), (2, torch.bfloat16), (4, torch.float32)):
            with FakeTensorMode():
                hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16) for n in (6, 70))
                rows = torch.empty(6), torch.empty(6, dtype=torch.int64), torch.empty(6, 2)
                given = (
                    rows[0],
                    hidden,
                    weight,
                    *rows[1:],
                    torch.empty(2, 2, dtype=torch.int64),
                    1.0,
                    True,
                    True,
                    of,
                )
                found = getattr(torch.ops.isobit, f"{name}_backward")(*given)
            assert [t.dtype for t in found] == [torch.bfloat16, dtype]


def test_a_share_that_nobody_collects_is_refused():
    hidden, weight, targets = problem(6, 70, 8, torch.bfloat16)
    part = Samples.packed([6], first=0, of=2)
    leaf = weight.requires_grad_()
    with pytest.raises(UnsupportedError, match="collector"):
        linear_logprob(hidden, leaf, targets, samples=part)
    with collecting(Share(0, 2, 1)), pytest.raises(UnsupportedError, match="grad_dtype"):
        linear_logprob(hidden, leaf, targets, samples=part)
    # A frozen head asks for no parameter's gradient: shares of several subtrees have values and dhidden.
    row = hidden.detach().requires_grad_()
    three = Samples.packed([2, 2, 2], first=0, of=4)
    found = torch.autograd.grad(
        linear_logprob(row, weight.detach(), targets, samples=three), row, torch.ones(6)
    )
    known = torch.autograd.grad(linear_logprob(row, weight.detach(), targets), row, torch.ones(6))
    assert bits.equal(found[0], known[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_micro_batches_has_the_gradient_of_the_global_mean(dtype):
    hidden, weight, targets = problem(sum(LENGTHS), 70, 24, dtype)
    active = int((targets != -100).sum())

    def loss(*given, **options):
        return linear_cross_entropy(*given, num_items=active, **options)

    whole, parts = weight_grads(loss, hidden, weight, targets, torch.tensor(1.0), LENGTHS, 3)
    assert bits.first_difference(merged(parts, dtype), whole) is None
    leaf = hidden.detach().requires_grad_()
    (by_row,) = torch.autograd.grad(linear_cross_entropy(leaf, weight, targets), leaf)
    rows = slice(100, 200)
    (some,) = torch.autograd.grad(loss(leaf[rows], weight, targets[rows]), leaf)
    assert bits.equal(some[rows], by_row[rows])
    (own,) = torch.autograd.grad(linear_cross_entropy(leaf[rows], weight, targets[rows]), leaf)
    assert not bits.equal(own[rows], by_row[rows])  # over its own count


def linear_logprob_stats(hidden, weight, targets, temperature):
    """Values and sums of the unsplit operator."""
    linear_logprob(hidden[:1], weight[:1], torch.tensor([0]))
    prefix = "linear_logprob" if dispatch.is_native(hidden.dtype) else "portable_linear_logprob"
    return getattr(torch.ops.isobit, prefix)(hidden, weight, targets, temperature, None, 0)


def forward_of(hidden, weight, targets, temperature, parts) -> tuple[Tensor, Tensor]:
    """[P, T, 2] pairs and [P, T] logits of all shares."""
    cuts = [Cut(len(weight), parts, index) for index in range(parts)]
    given = [
        partial.forward(hidden, weight[c.start : c.start + c.length], targets, temperature, c)
        for c in cuts
    ]
    return torch.stack([p for p, _ in given]), torch.stack([c for _, c in given])


def backward_of(grad, hidden, weight, targets, stats, spans, temperature, parts, of):
    """Roots of dhidden of all shares, and dweight."""
    cuts = [Cut(len(weight), parts, index) for index in range(parts)]
    given = [
        partial.backward(
            grad,
            hidden,
            weight[c.start : c.start + c.length],
            targets,
            stats,
            spans,
            temperature,
            c,
            of,
        )
        for c in cuts
    ]
    return [h for h, _ in given], torch.cat([w for _, w in given])


def hard_problem(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of hundreds, equal ones, infinities and a NaN; targets at the edges of shares, and none."""
    hidden, weight, targets = problem(13, vocabulary, 16, dtype)
    hidden[3], hidden[4], hidden[5, 2], hidden[6, 1] = hidden[3] * 64, 0.0, torch.inf, torch.nan
    targets[:6] = torch.tensor(
        [0, vocabulary - 1, vocabulary // 2, vocabulary // 2 - 1, vocabulary // 4, -100]
    )
    return hidden, weight, targets


# Several segments in a chunk; one; a segment longer than a chunk would be.
@pytest.mark.parametrize("vocabulary", [4096, 17600, 67200])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 0.7), (torch.float16, 1.0)]
)
def test_vocabulary_shares_merge_to_the_whole(vocabulary, parts, dtype, temperature):
    if not dispatch.has_native():
        pytest.skip("no native kernels: the smaller vocabulary below serves")
    check_vocabulary(hard_problem(vocabulary, dtype), parts, temperature)


def test_vocabulary_shares_in_fp64():
    check_vocabulary(hard_problem(1024, torch.float64), 4, 0.7)


def check_vocabulary(given: tuple[Tensor, Tensor, Tensor], parts: int, temperature: float) -> None:
    hidden, weight, targets = given
    known, sums = linear_logprob_stats(*given, temperature)
    pairs, chosen = forward_of(*given, temperature, parts)
    held = bits.as_integers(chosen).sum(0, dtype=bits.as_integers(chosen).dtype).view(chosen.dtype)
    values, stats = partial.finish(partial.merge(pairs), held, targets)
    assert bits.first_difference(values, known) is None
    assert bits.first_difference(stats, sums) is None

    samples = Samples.packed([4, len(hidden) - 4])
    spans, grad = torch.tensor(samples.spans), wide((len(hidden),), 8).to(stats.dtype)
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    whole = linear_logprob(*leaves, targets, temperature=temperature, samples=samples)
    wanted = torch.autograd.grad(whole, leaves, grad)
    roots, by_word = backward_of(grad, *given, stats, spans, temperature, parts, 0)
    assert roots[0].dtype == stats.dtype
    assert bits.first_difference(merged(roots, hidden.dtype), wanted[0]) is None
    assert bits.first_difference(by_word, wanted[1]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_share_of_both_axes_at_once(dtype):
    hidden, weight, targets = problem(sum(LENGTHS), 1024, 8, dtype)
    stats = linear_logprob_stats(hidden, weight, targets, 1.0)[1]
    grad, at, parts = wide((len(hidden),), 9), 0, []
    whole = weight_grads(linear_logprob, hidden, weight, targets, grad, LENGTHS, 12)[0]
    for first in (0, 6):
        lengths = LENGTHS[first : first + 6]
        rows = slice(at, at + sum(lengths))
        at = rows.stop
        spans = torch.tensor(Samples.packed(lengths).spans)
        given = grad[rows], hidden[rows], weight, targets[rows], stats[rows], spans, 1.0, 4, 12
        parts.append(backward_of(*given)[1])
    assert parts[0].dtype == torch.float32
    assert bits.first_difference(merged(parts, dtype), whole) is None


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_executors_have_one_share_of_the_vocabulary(dtype):
    hidden, weight, targets = hard_problem(2048, dtype)
    stats = linear_logprob_stats(hidden, weight, targets, 0.7)[1]
    spans, grad, cut = torch.tensor([[0, 13]]), wide((13,), 10), Cut(2048, 4, 2)
    local = weight[cut.start : cut.start + cut.length]
    found = (
        *partial.forward(hidden, local, targets, 0.7, cut),
        *partial.backward(grad, hidden, local, targets, stats, spans, 0.7, cut, 4),
    )
    known = (
        *portable.pairs_and_chosen(hidden, local, targets, 0.7, cut),
        *portable.shard_backward(
            grad, hidden, local, targets, stats, whole_samples(hidden, spans, 4), 0.7, cut
        ),
    )
    for left, right in zip(found, known, strict=True):
        assert bits.first_difference(left, right) is None


def test_refusals():
    hidden, weight, targets = problem(6, 1024, 8, torch.float32)
    cut, local = Cut(1024, 4, 1), weight[256:512]
    with pytest.raises(CutError, match="parts"):
        Cut(1024, 3, 0)
    refused = {
        "rows of another share": (hidden, weight, targets, 1.0, cut),
        "temperature": (hidden, local, targets, 0.0, cut),
        "a target beyond the vocabulary": (hidden, local, targets + 1024, 1.0, cut),
        "three axes": (hidden[None], local, targets[None], 1.0, cut),
        "dtypes": (hidden.half(), local, targets, 1.0, cut),
    }
    for given in refused.values():
        with pytest.raises(ArgumentError, match=r"(?s)expected .*\n  received: .*\n  remedy: "):
            partial.forward(*given)
    with pytest.raises(CutError, match="power of two"):
        partial.merge(torch.ones(3, 6, 2))
    stats, spans = torch.ones(6, 2), torch.tensor([[0, 2], [2, 2], [4, 2]])
    for of in (
        2,
        4,
        4096,
    ):  # fewer than there are; three segments of one; a part of a segment of four
        with pytest.raises(UnsupportedError, match="subtree"):
            partial.backward(torch.ones(6), hidden, local, targets, stats, spans, 1.0, cut, of)
    with pytest.raises(ArgumentError, match="float32"):
        partial.backward(torch.ones(6).half(), hidden, local, targets, stats, spans, 1.0, cut)
