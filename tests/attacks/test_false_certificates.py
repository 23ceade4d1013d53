"""A certificate is right or there is none: sums made to look like plain trees are refused, plain trees are not.

Every sum of WRONG has probes like those of a tree of additions. The compensated ones were once certified as one exact
addition, "equal bits for all inputs", while two directions of them differ on ordinary vectors.
"""

import math

import numpy
import pytest
import torch

import isobit
from isobit import RevealError
from isobit.order.addition import steps_of
from isobit.reveal import targets
from isobit.reveal.certificate import PlainSum
from isobit.reveal.replays import replay
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import reveal
from tests.attacks.plain_sums import RIGHT, fold, in_pairs, stripes
from tests.attacks.planted_sums import WRONG, neumaier, sum2

N = 64


def vectors(n, seeds=12):
    """Drawn otherwise than the replays are."""
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(n, generator=generator)
        wide = torch.ldexp(normal, torch.randint(-40, 40, (n,), generator=generator))
        halves = wide.clone()
        halves[n // 2 :] = -halves[: n // 2]
        halves[0] *= 1.5
        whole = torch.ldexp(normal, torch.randint(-140, 120, (n,), generator=generator))
        for values in (
            normal,
            wide,
            halves,
            wide.abs(),
            whole,
            normal * 1e-40,
            normal * 1e35,
            torch.full((n,), 0.1),
        ):
            yield values.tolist()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plain_tree_is_refused(name):
    with pytest.raises(RevealError):
        reveal(PlainSum(name, N, WRONG[name]))


@pytest.mark.parametrize("name", RIGHT)
def test_plain_trees_and_exact_sums_are_predicted(name):
    tree = reveal(PlainSum(name, N, RIGHT[name]))
    assert tree.replayed >= 150
    steps = steps_of(tree.branch)
    for values in vectors(N):
        want = RIGHT[name](values)
        assert replay(steps, tree.arithmetic, values, [], 24) == pytest.approx(
            want, rel=0, abs=0, nan_ok=True
        )


@pytest.mark.parametrize("n", [8, 90])
@pytest.mark.parametrize("function", [sum2, neumaier])
def test_two_directions_of_a_compensated_sum_are_not_one_order(function, n):
    def directed(step):
        return lambda x: function(x.tolist()[::step])

    found = isobit.reveal.compare_orders(directed, [1, -1], n=n)
    assert not found.kept
    assert len(found.refused) == 2
    assert found.claim == "no claim"
    x = torch.zeros(n)
    x[:5] = torch.tensor([1, 2.0**60, 2.0**30, -(2.0**30), -(2.0**60)])
    assert directed(1)(x) != directed(-1)(x)  # what a certificate would have denied


def test_a_compensated_product_is_refused():
    """Its probes are those of one fused addition of all products; such a claim is replayed too."""
    terms, factors = torch.zeros(1, 32), torch.ones(32)

    def dot2():
        return torch.tensor([sum2((terms[0] * factors).tolist())])

    with pytest.raises(RevealError, match="not a tree of additions"):
        reveal(TensorTarget("dot2", terms, dot2, "product", factors))


# ---- storage -------------------------------------------------------------------------------------------------


def peeled(x, to):
    """Terms before a boundary of `to` bytes one by one, then in lanes, as vectorised loops do."""
    values, ahead = x.tolist(), -x.data_ptr() % to // x.element_size()
    lanes = fold([0.0, *values[:ahead]]), stripes([*values[ahead:], *[0.0] * 4])
    return lanes[0] + lanes[1]


@pytest.mark.parametrize("to", [16, 32, 64, 128])
def test_an_order_that_follows_the_pointer_is_refused(to):
    def kernel(x):
        return torch.tensor(peeled(x, to))

    with pytest.raises(RevealError, match="alignment of its storage"):
        isobit.reveal.order(kernel, N)
    assert not isobit.reveal.compare_orders(lambda _: kernel, [0, 1], n=N).kept


def test_an_order_that_follows_the_stride_is_two_classes():
    def kernel(x):
        return in_pairs(x.tolist()) if x.is_contiguous() else fold(x.tolist())

    found = isobit.reveal.compare_orders(
        lambda stride: targets.of(kernel, N, stride=stride), [1, 2, 3]
    )
    assert [c.configurations for c in found.classes] == [("1",), ("2", "3")]
    assert "3 elements apart" in str(isobit.reveal.order(targets.of(kernel, N, stride=3)).replays)


def test_what_stands_beside_the_vector_is_not_a_number():
    def greedy(x):
        return x.as_strided((len(x) + 1,), (1,)).sum()

    with pytest.raises(RevealError):
        isobit.reveal.order(greedy, N)


# ---- what it says --------------------------------------------------------------------------------------------


def test_a_certificate_says_what_it_covers():
    found = isobit.reveal.compare_orders(lambda _: torch.sum, [1, 2], n=N)
    tree = found.classes[0].tree
    assert f"{tree.replayed} vectors of {len(tree.replays.kinds)} kinds" in found.claim
    assert "branch" in found.claim
    assert "exponents -149 to 127" in str(tree.replays)
    assert "at element offsets 0, 1, 2, 3" in str(tree.replays)
    summary = found.summary()["classes"][0]
    assert "cancelling at every scale" in summary["replayed_kinds"]
    assert summary["replays"] == str(tree.replays)


@pytest.mark.parametrize(
    "result", [numpy.float32, numpy.float64, numpy.asarray, float, torch.tensor]
)
def test_numbers_of_numpy_are_results(result):
    tree = isobit.reveal.order(lambda x: result(fold(x.tolist())), 16)
    assert str(tree) == "chain of 16"
    assert tree.replayed


def test_what_is_no_number_is_still_refused():
    for wrong in ("1.0", [1.0], None, numpy.array([1.0, 2.0]), numpy.complex64(1)):
        with pytest.raises(RevealError, match="return their sum"):
            isobit.reveal.order(lambda x, wrong=wrong: wrong, 4)


def test_overflow_and_nan_are_compared():
    """Sums that overflow on the way are infinite or NaN by the order, too: one that saturates is refused."""

    def saturating(values):
        return max(min(fold(values), 3e38), -3e38)

    with pytest.raises(RevealError):
        reveal(PlainSum("saturating", N, saturating))
    assert math.isinf(fold([3e38, 3e38, -3e38]))
