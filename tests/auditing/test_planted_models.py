"""Theorem: every plant changes bits along its axis, its twin does not, and its operator is dispatched as one call.

This needs no audit: a plant that did not show, or a twin that did, would make the tests of the audit worthless.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from two_runs import both_runs

from isobit import bits
from isobit.auditing.records import AXES, ERROR, ORDER
from isobit.library.audit.claims import TRAPS, Trap
from isobit.library.audit.clean import MODELS
from isobit.library.audit.plants import PLANTS
from isobit.library.audit.plants.plant import hidden

by_name = pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_enough_plants_on_enough_axes():
    assert len(PLANTS) >= 32
    assert len({plant.name for plant in PLANTS}) == len(PLANTS)
    axes = {plant.axis for plant in PLANTS}
    assert axes == {"batch", "padding", "decode", "chunks", "threads", "repeat"} <= set(AXES)
    for axis in axes:
        assert {ORDER, ERROR} <= {plant.kind for plant in PLANTS if plant.axis == axis}, axis


@by_name
def test_plant_changes_bits_and_its_twin_does_not(plant):
    left, right = both_runs(*plant.build(), plant.axis, plant.sample, plant.backward)
    assert left.shape == right.shape
    assert not bits.equal(left, right)
    left, right = both_runs(*plant.build_twin(), plant.axis, plant.sample, plant.backward)
    assert bits.equal(left, right), bits.first_difference(left, right)


@by_name
def test_operator_is_dispatched_once_by_its_name(plant):
    model, inputs = plant.build()
    with Dispatched() as seen:
        both_runs(model, inputs, "repeat", backward=plant.backward)
    assert seen.names.count(plant.operator) == 2
    assert plant.module in dict(model.named_modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("clean", MODELS, ids=lambda clean: clean.name)
def test_clean_models_change_no_bit_along_their_axes(clean):
    model, inputs = clean.build()
    samples = len(next(iter(inputs.values())))
    for axis in clean.axes:
        for sample in (0, 2, samples - 1):
            left, right = both_runs(model, inputs, axis, sample)
            assert bits.equal(left, right), (axis, sample, bits.first_difference(left, right))


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_traps_depend_on_the_batch(trap):
    model, x = Trap(trap), hidden()["x"]
    with torch.no_grad():
        together, alone = model(x), model(x[:1])
    pairs = [(together, alone)]
    if isinstance(together, tuple):
        pairs = zip(together, alone, strict=True)
    assert not all(bits.equal(left[:1], right) for left, right in pairs)
