"""Theorem: every planted operator is named with its module, axis and kind, and it alone; clean models are silent.

1. Of each planted model exactly the planted operator is guilty; substituting its result gives the variant bit for bit.
2. Nothing is named in the planted model's twin; every clean model is kept on its axes, forward and backward.
3. A model that depends on the batch where no operator is at fault is not reported as invariant.

Wrong auditors are caught by the contract audit-v1, which tests/contracts/test_library.py judges.
"""

import pytest
from torch import nn

import isobit
from isobit.cli import main
from isobit.contracts.language.load import load_contract
from isobit.contracts.store.tree import library
from isobit.library.audit.claims import TRAPS, Trap, axes_of
from isobit.library.audit.clean import MODELS
from isobit.library.audit.plants import PLANTS
from isobit.library.audit.plants.layers import gelu_by_batch
from isobit.library.audit.plants.plant import Layer, hidden
from isobit.library.audit.plants.products import split_k

CONTRACT = load_contract(library() / "audit/contract.yaml")
CLEAN = [(clean, axis, backward) for clean in MODELS for axis, backward in axes_of(clean)]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_exactly_the_planted_operator_is_named(plant):
    model, inputs = plant.build()
    report = isobit.audit(
        model, inputs, vary=(plant.axis,), sample=plant.sample, backward=plant.backward
    )
    found = [
        (g.place.operator, g.place.module, g.axis, g.kind, g.place.backward) for g in report.guilty
    ]
    assert found == [(plant.operator, plant.module, plant.axis, plant.kind, plant.backward)]
    assert report.complete, [axis.why_not for axis in report.axes]
    assert not report.kept
    assert report.exit_code == 1
    (axis,) = report.axes
    assert axis.remaining.differ == 0
    if axis.effect.differ:
        assert sum(one.share for one in report.guilty) == pytest.approx(1)


class TwoPlants(nn.Module):
    """A planted layer after a planted layer."""

    def __init__(self):
        super().__init__()
        self.first = Layer(split_k, (32, 32))
        self.second = Layer(gelu_by_batch)

    def forward(self, x):
        return self.second(self.first(x))


def test_two_plants_are_both_named_and_share_the_effect():
    report = isobit.audit(TwoPlants(), hidden(), vary=("batch",))
    found = {(g.place.operator, g.place.module): g for g in report.guilty}
    assert {key: g.kind for key, g in found.items()} == {
        ("planted::split_k", "first"): "order",
        ("planted::gelu_by_batch", "second"): "error",
    }
    assert report.complete
    assert sum(g.share for g in report.guilty) == pytest.approx(1)
    assert report.guilty[0].place.module == "second"  # the error outweighs the order


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_nothing_is_named_in_its_twin(plant):
    model, inputs = plant.build_twin()
    report = isobit.audit(
        model, inputs, vary=(plant.axis,), sample=plant.sample, backward=plant.backward
    )
    assert [str(g.place) for g in report.guilty] == []
    assert report.kept or report.unjudged, [axis.why_not for axis in report.axes]


@pytest.mark.parametrize(
    ("clean", "axis", "backward"),
    CLEAN,
    ids=[f"{c.name}-{a}{'-backward' * b}" for c, a, b in CLEAN],
)
@pytest.mark.sweep(20)
def test_clean_models_are_silent(clean, axis, backward):
    model, inputs = clean.build()
    report = isobit.audit(model, inputs, vary=(axis,), backward=backward)
    assert [str(g.place) for g in report.guilty] == []
    assert report.kept, [one.why_not for one in report.axes]
    assert report.exit_code == 0


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_traps_are_not_called_invariant(trap):
    report = isobit.audit(Trap(trap), hidden(), vary=("batch",))
    assert not report.kept
    assert report.exit_code != 0
    assert report.guilty or not report.complete


def test_contract_is_well_formed(capsys):
    assert main.main(["contract", "lint", CONTRACT.id]) == 0
    capsys.readouterr()
