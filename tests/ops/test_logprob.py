"""Log-probabilities and the loss from hidden states: one order for each sum, and never the logits.

1. Native equals portable, bit for bit, with gradients: one leaf, one segment, several; temperature; −100; all dtypes.
2. It is log_softmax of linear_fp32: a rollout that holds logits has the bits of training that does not.
3. The loss is an exact sum, so no permutation changes it; stock's changes.
4. Errors are near stock's; gradcheck passes in fp64; memory is a tenth of stock's.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit import ArgumentError, UnsupportedError, bits
from isobit.machine import thread_count
from isobit.ops import dispatch
from isobit.ops.linear.op import linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob import portable
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import linear_logprob
from isobit.order.samples import Samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def problem(
    rows: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """(hidden, weight, targets), some of them without."""
    generator = torch.Generator().manual_seed(vocabulary + rows)
    hidden, weight = (
        torch.randn(n, width, generator=generator).to(dtype) for n in (rows, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[0], targets[2::5] = vocabulary - 1, -100
    return hidden, weight, targets


def gradients(
    function, hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, **options
) -> tuple[Tensor, ...]:
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(function(*leaves, targets, **options), leaves, grad)


# ---- 1. one executor's bits are the other's --------------------------------------------------------------


# One leaf with a tail; four segments; folded leaves of one segment; one segment in two runs.
@needs_native
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"),
    [(5, 1, 3), (7, 67, 8), (70, 300, 16), (9, 1100, 8), (6, 1101, 8), (3, 5003, 4)],
)
def test_native_and_portable_agree(rows, vocabulary, width, temperature):
    hidden, weight, targets = problem(rows, vocabulary, width)
    samples = Samples.packed([2, rows - 2])
    known, stats = portable.linear_logprob(hidden, weight, targets, temperature)
    assert (
        bits.first_difference(
            linear_logprob(hidden, weight, targets, temperature=temperature), known
        )
        is None
    )
    grad = torch.randn(rows)
    found = gradients(
        linear_logprob, hidden, weight, targets, grad, temperature=temperature, samples=samples
    )
    wanted = portable.linear_logprob_backward(
        grad, hidden, weight, targets, stats, samples, temperature
    )
    for left, right in zip(found, wanted, strict=True):
        assert bits.first_difference(left, right) is None


@needs_native
def test_native_and_portable_agree_over_sixteen_segments():
    hidden, weight, targets = problem(3, 8192, 4)
    known, stats = portable.linear_logprob(hidden, weight, targets, 1.0)
    assert bits.equal(linear_logprob(hidden, weight, targets), known)
    grad, samples = torch.randn(3), Samples.packed([3])
    found = gradients(linear_logprob, hidden, weight, targets, grad, samples=samples)
    wanted = portable.linear_logprob_backward(grad, hidden, weight, targets, stats, samples, 1.0)
    assert all(bits.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_row_without_a_target_is_zero_and_has_no_gradient():
    hidden, weight, targets = problem(12, 300, 16)
    none = targets == -100
    found = linear_logprob(hidden, weight, targets)
    assert bits.equal(found[none], torch.zeros(int(none.sum())))
    by_row, by_word = gradients(linear_logprob, hidden, weight, targets, torch.ones(12))
    assert (by_row[none] == 0).all()
    other = torch.where(none.unsqueeze(1), torch.full_like(hidden, 7.0), hidden)
    assert bits.equal(gradients(linear_logprob, other, weight, targets, torch.ones(12))[1], by_word)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(70, 67), (33, 5003)])
def test_rows_alone_stored_otherwise_and_by_threads(rows, vocabulary, dtype):
    hidden, weight, targets = problem(rows, vocabulary, 24, dtype)
    grad = torch.randn(rows)
    whole, (by_row, by_word) = (
        linear_logprob(hidden, weight, targets),
        gradients(linear_logprob, hidden, weight, targets, grad),
    )
    for part in (slice(0, 1), slice(5, 8), slice(3, rows)):
        assert bits.equal(linear_logprob(hidden[part], weight, targets[part]), whole[part])
        assert bits.equal(
            gradients(linear_logprob, hidden[part], weight, targets[part], grad[part])[0],
            by_row[part],
        )
    stored = hidden.t().contiguous().t(), weight.t().contiguous().t(), targets
    for threads in (1, 2):
        with thread_count(threads):
            assert bits.equal(linear_logprob(*stored), whole)
            found = gradients(linear_logprob, *stored, grad)
            assert bits.equal(found[0], by_row)
            assert bits.equal(found[1], by_word)


# ---- 2. rollout is training ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [67, 1100, 5003, 8192])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_it_is_log_softmax_of_fp32_logits(vocabulary, dtype, temperature):
    hidden, weight, targets = problem(33, vocabulary, 48, dtype)
    logits = linear_fp32(hidden, weight)
    assert logits.dtype == torch.float32
    if temperature != 1.0:
        logits = logits * (1 / torch.tensor(temperature))
    rolled = log_softmax(logits).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    trained = linear_logprob(hidden, weight, targets, temperature=temperature)
    assert bits.equal(torch.where(targets < 0, 0.0, rolled), trained)


# ---- 3. the loss -----------------------------------------------------------------------------------------


def test_no_permutation_changes_the_loss_and_stocks_changes():
    hidden, weight, targets = problem(200, 130, 16)
    ours, stock = set(), set()
    for seed in range(20):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
        ours.add(linear_cross_entropy(hidden[order], weight, targets[order]).item())
        stock.add(F.cross_entropy(hidden[order] @ weight.t(), targets[order]).item())
    assert len(ours) == 1
    assert len(stock) > 1


def test_the_loss_is_over_active_targets_or_the_count_given():
    hidden, weight, targets = problem(50, 130, 16)
    whole, active = linear_cross_entropy(hidden, weight, targets), targets != -100
    assert bits.equal(linear_cross_entropy(hidden[active], weight, targets[active]), whole)
    assert bits.equal(
        linear_cross_entropy(hidden, weight, targets, num_items=int(active.sum())), whole
    )
    other = torch.where(active, targets, 3)
    found = linear_cross_entropy(hidden, weight, other, ignore_index=3)
    masked = torch.where(other == 3, -100, other)
    assert bits.equal(found, linear_cross_entropy(hidden, weight, masked))
    torch.testing.assert_close(whole, F.cross_entropy(hidden @ weight.t(), targets))
    with pytest.raises(ArgumentError, match="num_items"):
        linear_cross_entropy(hidden, weight, torch.full((50,), -100))


# ---- 4. accuracy and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [300, 5003])
def test_errors_are_near_stocks(vocabulary):
    hidden, weight, targets = problem(256, vocabulary, 64)
    targets, grad = targets.clamp(min=0), torch.randn(256)

    def stock(h, w, t):
        return F.linear(h, w).log_softmax(1).gather(1, t.unsqueeze(1)).squeeze(1)

    true = (
        stock(hidden.double(), weight.double(), targets),
        *gradients(stock, hidden.double(), weight.double(), targets, grad.double()),
    )
    ours, theirs = (
        (f(hidden, weight, targets), *gradients(f, hidden, weight, targets, grad))
        for f in (linear_logprob, stock)
    )
    for exact, mine, other in zip(true, ours, theirs, strict=True):
        error, limit = ((t.double() - exact).square().mean().sqrt().item() for t in (mine, other))
        assert error <= 1.25 * limit


def test_gradcheck_in_fp64():
    hidden, weight, targets = problem(4, 7, 3, torch.float64)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    samples = Samples.packed([4])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, targets, temperature=0.7, samples=samples), leaves
    )
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, samples=samples), leaves
    )


MEASURED = """
import torch
import torch.nn.functional as F
from isobit.ops.logprob.loss import linear_cross_entropy
torch.set_num_threads(1)
def peak():
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmHWM:") + 1])
def stock(h, w, t):
    return F.cross_entropy(F.linear(h, w), t)
def step(loss, rows, vocabulary):
    h, w = (torch.randn(n, 64).requires_grad_() for n in (rows, vocabulary))
    w.grad = torch.zeros_like(w)
    t = torch.randint(0, vocabulary, (rows,))
    before = peak()
    loss(h, w, t).backward()
    return peak() - before - 64 * vocabulary * 4 // 1024  # beside the gradient of the weight itself
step(linear_cross_entropy, 8, 64)
print(step(linear_cross_entropy, 512, 65536), step(stock, 512, 65536))
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_a_tenth_of_stocks():
    """The peak only grows, so stock, which comes second, is charged too little rather than too much."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True
    )
    ours, stock = map(int, done.stdout.split())
    assert ours * 10 <= stock


# ---- in torch's world ------------------------------------------------------------------------------------


@needs_native
def test_opcheck():
    hidden, weight, targets = problem(6, 70, 8)
    linear_logprob(hidden, weight, targets)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    for name in ("linear_logprob", "portable_linear_logprob"):
        operator = getattr(torch.ops.isobit, name)
        torch.library.opcheck(operator, (*leaves, targets, 0.7, torch.tensor([[0, 6]])))


def test_second_order_and_shares_are_refused():
    hidden, weight, targets = problem(6, 70, 8)
    leaf = hidden.requires_grad_()
    (first,) = torch.autograd.grad(
        linear_logprob(leaf, weight, targets).square().sum(), leaf, create_graph=True
    )
    with pytest.raises(UnsupportedError, match="first-order"):
        first.sum().backward()
    with pytest.raises(UnsupportedError, match="global batch"):
        linear_logprob(
            hidden, weight.requires_grad_(), targets, samples=Samples.packed([6], first=0, of=2)
        )


REFUSED = {
    "a target beyond the vocabulary": lambda h, w, t: linear_logprob(h, w, t + 70),
    "a negative target": lambda h, w, t: linear_logprob(h, w, torch.full_like(t, -1)),
    "targets that are numbers": lambda h, w, t: linear_logprob(h, w, t.float()),
    "fewer targets": lambda h, w, t: linear_logprob(h, w, t[1:]),
    "widths": lambda h, w, t: linear_logprob(h[:, 1:], w, t),
    "dtypes": lambda h, w, t: linear_logprob(h.bfloat16(), w, t),
    "temperature": lambda h, w, t: linear_logprob(h, w, t, temperature=0.0),
    "samples": lambda h, w, t: linear_logprob(h, w, t, samples=Samples.packed([9])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_a_remedy(case):
    with pytest.raises(
        ArgumentError, match=r"isobit\.\w+: expected .*\n  received: .*\n  remedy: "
    ):
        REFUSED[case](*problem(6, 70, 8))
