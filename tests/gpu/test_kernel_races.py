"""Compiled products and attention with the shipped tiles have no races, over several blocks: the machine refuses them.

Stages that are not shipped for a GPU are refused, so the check can fail.
"""

import pytest
import torch

import isobit
from isobit.certifying import executing
from isobit.certifying.running import backends
from isobit.certifying.running.refusals import RaceError
from isobit.ops.attention import tiles
from tests.sweeps import mostly_full

TARGETS = mostly_full(("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"), ("sm_100",))


@pytest.fixture(autouse=True)
def _races(monkeypatch):
    """Look for races, without names: a branch on values that are not finite would be refused too."""
    machine = backends.Machine

    def watching(program, engine, names, races):
        return machine(program, engine, names=names, races=True)

    monkeypatch.setattr(backends, "Machine", watching)


def train(target, keys, depth):
    """Attention of `keys` queries and keys, two heads on one, and its gradients."""
    tensors = [
        torch.randn(1, keys, heads, depth, dtype=torch.bfloat16, requires_grad=True)
        for heads in (2, 1, 1)
    ]
    with executing("machine", target=target):
        y = isobit.attention(*tensors, is_causal=True)
        return torch.autograd.grad(y, tensors, torch.randn_like(y))


@pytest.mark.parametrize("target", TARGETS)
def test_attention_over_blocks_has_no_races(target):
    grads = train(target, 70, 16)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("depth", [64, 128])
def test_wide_heads_have_no_races(target, depth):
    assert len(train(target, 140, depth)) == 3


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("rows", [5, 130])
def test_products_have_no_races(target, rows):
    x, weight = (torch.randn(n, 520, dtype=torch.bfloat16, requires_grad=True) for n in (rows, 130))
    with executing("machine", target=target):
        y = isobit.linear(x, weight)
        assert len(torch.autograd.grad(y, (x, weight), torch.randn_like(y))) == 2
        scores = isobit.linear_logprob(x[:5], weight, torch.arange(5))
        assert len(torch.autograd.grad(scores.sum(), (x, weight))) == 2


@pytest.mark.parametrize("use", ["many queries", "gradient"])
@pytest.mark.sweep(1)
def test_stages_that_are_not_shipped_are_refused(use, monkeypatch):
    monkeypatch.setitem(tiles.TILES, (use, torch.bfloat16, "sm_100"), tiles.HeadTile(64, 8, 2))
    with pytest.raises(RaceError, match=r"fence\.proxy\.async|waited for"):
        train("sm_100", 140, 16)
