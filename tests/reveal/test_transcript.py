"""Theorem: asking the probes of an earlier configuration again finds what a search of its own finds.

1. A configuration that adds alike has the tree of a search of its own, in fewer calls.
2. Another order, another arithmetic or another sign of zero is found as by itself.
3. What only looks alike to probes is rejected by replays, which are never skipped.
"""

from random import Random

import pytest
import torch

from isobit.errors import RevealError
from isobit.order.addition import chain
from isobit.reveal import certificate, targets
from isobit.reveal.certificate import draw_branch, plant_compensated, plant_corrected, plant_tree
from isobit.reveal.targets.tensor_target import TensorTarget
from isobit.reveal.tree import Transcripts, reveal

N = 33


def after(first, second):
    """Reveal a target after another that it may resemble."""
    earlier = Transcripts()
    reveal(first, earlier=earlier)
    return reveal(second, earlier=earlier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_configuration_that_adds_alike_takes_fewer_calls(dtype):
    first, second = (targets.linear(520, m=m, n=64, dtype=dtype) for m in (1, 1))
    alone, found = reveal(first), after(targets.linear(520, m=1, n=64, dtype=dtype), second)
    assert found == alone
    assert (found.branch, found.replays, found.probes) == (
        alone.branch,
        alone.replays,
        alone.probes,
    )
    assert second.calls < first.calls


@pytest.mark.parametrize("seed", range(4))
def test_another_order_is_found_as_by_itself(seed):
    mine, other = (draw_branch(Random(at), N) for at in (seed, seed + 100))
    assert after(plant_tree(mine, N), plant_tree(other, N)) == reveal(plant_tree(other, N))


def summing(function):
    terms = torch.zeros(8, N)
    return TensorTarget("planted", terms, lambda: function(terms))


def left_to_right(terms, dtype=torch.float32, start=0.0):
    total = terms[:, 0].to(dtype) + start
    for at in range(1, N):
        total = total + terms[:, at].to(dtype)
    return total.float()


def test_another_arithmetic_and_another_zero_are_found_as_by_themselves():
    plain = lambda terms: left_to_right(terms, start=-0.0)  # noqa: E731
    for other in (lambda terms: left_to_right(terms, torch.float64, -0.0), left_to_right):
        found, alone = after(summing(plain), summing(other)), reveal(summing(other))
        assert found == alone
        assert found.arithmetic == alone.arithmetic != reveal(summing(plain)).arithmetic
        assert found.branch == chain(range(N))


@pytest.mark.parametrize("plant", [plant_compensated, plant_corrected])
def test_what_only_looks_alike_to_probes_is_rejected(plant):
    with pytest.raises(RevealError):
        after(plant_tree(chain(range(N)), N), plant(N))


def test_replays_are_made_in_every_configuration(monkeypatch):
    made = []
    replayed = TensorTarget.replay_batch
    monkeypatch.setattr(
        TensorTarget, "replay_batch", lambda self, *a: made.append(self) or replayed(self, *a)
    )
    found = certificate.compare_orders(
        lambda m: targets.linear(24, m=m, n=8, function=torch.nn.functional.linear), [1, 1, 1]
    )
    assert found.kept
    assert len({id(target) for target in made}) == 3


def test_a_search_that_fails_is_not_kept():
    earlier = Transcripts()
    with pytest.raises(RevealError):
        reveal(plant_compensated(N), earlier=earlier)
    assert reveal(plant_tree(chain(range(N)), N), earlier=earlier).replayed
