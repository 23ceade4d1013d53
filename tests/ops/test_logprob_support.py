"""linear_logprob over a support scores the policy that top-k or top-p sampled from, forward and backward.

1. With all ids kept it is linear_logprob, bit for bit, in values and gradients (bf16 on AMX: gradients to rounding).
2. A value and its gradient depend on which ids are kept, not on their order, filling or form, nor on the batch.
3. It is the definition in fp64; wrong twins are not. Gradients of shares merge to those of the whole.
4. Targets that were not kept, and wrong shapes and ids, raise.
"""

import pytest
import torch

import isobit
from isobit import ArgumentError, bits
from isobit.ops import dispatch
from isobit.parallel import GlobalBatch, Gradients
from isobit.sampling import Truncation, support_ids

VOCABULARY, FEATURES, ROWS = 61, 48, 10


def problem(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, FEATURES, generator=generator).to(dtype)
    weight = (0.2 * torch.randn(VOCABULARY, FEATURES, generator=generator)).to(dtype)
    kept = Truncation(top_k=12, top_p=0.9).keep(isobit.linear(hidden.float(), weight.float()))
    targets = torch.tensor([int(row.nonzero()[i % int(row.sum())]) for i, row in enumerate(kept)])
    return hidden, weight, targets, kept


def run(hidden, weight, targets, **options):
    """Return values, dhidden and dweight."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = isobit.linear_logprob(*leaves, targets, **options)
    scale = torch.sin(targets.float() + 1)
    grads = torch.autograd.grad((found * scale).sum(), leaves)
    return found.detach(), *grads


def same(a, b):
    return [bits.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_every_id_it_is_linear_logprob(dtype, temperature):
    hidden, weight, targets, _ = problem(dtype)
    targets[3] = -100
    plain = run(hidden, weight, targets, temperature=temperature)
    every = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    for support in (every, support_ids(every), support_ids(every).flip(-1).int()):
        found = run(hidden, weight, targets, temperature=temperature, support=support)
        # On AMX linear_logprob multiplies gradients of logits that are rounded to bf16; here they stay fp32.
        exact = 3 if dispatch.engine_of(dtype) == "chain" else 1
        assert same(found, plain)[:exact] == [True] * exact
        for mine, known in zip(found, plain, strict=True):
            assert (mine.float() - known.float()).abs().max() <= 2**-7 * known.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_form_nor_batch_matters(dtype):
    hidden, weight, targets, kept = problem(dtype)
    whole = run(hidden, weight, targets, support=kept)
    ids = support_ids(kept)
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(3))]
    wider = torch.nn.functional.pad(shuffled, (4, 9), value=-1)
    for form in (ids, shuffled, wider, torch.cat([ids, ids], 1)):
        assert same(run(hidden, weight, targets, support=form), whole) == [True] * 3
    for at in range(ROWS):
        one = slice(at, at + 1)
        alone = isobit.linear_logprob(hidden[one], weight, targets[one], support=ids[one])
        assert bits.equal(alone, whole[0][one])
    two = hidden.reshape(2, 5, -1), targets.reshape(2, 5), ids.reshape(2, 5, -1)
    padded = [torch.nn.functional.pad(two[0], (0, 0, 3, 0), value=9.0)]
    padded += [torch.nn.functional.pad(two[1], (3, 0), value=-100)]
    padded += [torch.nn.functional.pad(two[2], (0, 0, 3, 0), value=-1)]
    samples = isobit.Samples.padded([5, 5], width=8, side="left")
    base = run(two[0], weight, two[1], support=two[2])
    found = run(padded[0], weight, padded[1], support=padded[2], samples=samples)
    assert bits.equal(found[0][:, 3:], base[0])
    assert bits.equal(found[1][:, 3:], base[1])
    assert bits.equal(found[2], base[2])
    assert not found[0][:, :3].any()


def define(hidden, weight, targets, kept, temperature):
    logits = hidden.double() @ weight.double().T / temperature
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def test_it_is_the_definition_and_wrong_twins_are_not():
    hidden, weight, targets, kept = problem(torch.float32)
    expected = define(hidden, weight, targets, kept, 0.8)
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    scale = torch.sin(targets.float() + 1).double()
    grads = torch.autograd.grad((define(*leaves, targets, kept, 0.8) * scale).sum(), leaves)
    found = run(hidden, weight, targets, temperature=0.8, support=kept)
    # 48 products and a few roundings more of fp32, of the largest sum of magnitudes; twice: chosen and normaliser
    largest = float((hidden.double().abs() @ weight.double().abs().T).max()) / 0.8
    limit = 2 * (FEATURES + 8) * 2.0**-24 * largest
    assert limit < 5e-4  # well below what the wrong twins show
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=limit)
    for mine, theirs in zip(found[1:], grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=10 * limit)
    twins = {
        "unscored": run(hidden, weight, targets, temperature=0.8),
        "temperature": run(hidden, weight, targets, support=kept),
        "filler is a token": run(
            hidden, weight, targets, temperature=0.8, support=support_ids(kept).clamp(min=0)
        ),
        "one id more": run(
            hidden, weight, targets, temperature=0.8, support=kept | (kept.cumsum(-1) == 0)
        ),
    }
    for name, twin in twins.items():
        assert (twin[0] - expected).abs().max() > 1e-2, name


def test_gradients_of_shares_are_those_of_the_whole():
    hidden, weight, targets, kept = problem(torch.bfloat16)
    rows = hidden[:8].reshape(4, 2, -1), targets[:8].reshape(4, 2), kept[:8].reshape(4, 2, -1)
    digests = set()
    for micro_batches in (1, 2, 4):
        head = torch.nn.Linear(FEATURES, VOCABULARY, bias=False, dtype=torch.bfloat16)
        head.weight.data.copy_(weight)
        batch = GlobalBatch(total=4, micro_batches=micro_batches)
        gradients = Gradients(head, batch)
        for micro in range(micro_batches):
            part = [one[batch.samples(0, micro)].flatten(0, 1) for one in rows]
            with gradients.micro_batch(micro) as share:
                samples = isobit.Samples.packed(
                    [2] * share.size, first=share.first, total=share.total
                )
                found = isobit.linear_logprob(
                    part[0], head.weight, part[1], support=part[2], samples=samples
                )
                (found.sum() / 8).backward()
        digests.add(bits.digest(head.weight.grad))
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[:, :0], "targets that are in their support"),
        (lambda ids: ids[:-1], "expected support"),
        (lambda ids: ids[0], "expected support"),
        (lambda ids: ids.float(), "int64 or int32"),
        (lambda ids: ids.masked_fill(ids == -1, VOCABULARY), "ids from 0"),
        (lambda ids: ids - 5, "ids from 0"),
        (lambda ids: ids.roll(1, 0), "targets that are in their support"),
        (lambda ids: ids > 3, "support"),
    ],
)
def test_wrong_supports_are_refused(change, words):
    hidden, weight, targets, kept = problem(torch.float32)
    with pytest.raises(ArgumentError, match=words):
        isobit.linear_logprob(hidden, weight, targets, support=change(support_ids(kept)))
