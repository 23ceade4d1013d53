"""No false alarm: preflight and watch are silent on correct programs of many shapes.

A few run by default; all of them with `--full`. docs/results/guards.md says how they are counted.
"""

import pytest
import torch

from isobit.guards import preflight
from isobit.simulator import World
from tests.guards.right import ALONE, NEEDS, TOGETHER
from tests.sweeps import mostly_full

QUICK = ("generator_and_discriminator", "mixture_of_experts", "meta_learning", "wrapped_by_ddp")
pytestmark = [
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings(
        "ignore:FSDP2-wrapped module",
        "default::UserWarning",
        "default:.*LeafSpec:FutureWarning",  # Lightning's
    ),
]


def test_there_are_enough():
    assert len(ALONE) + len(TOGETHER) >= 60
    assert {*QUICK} <= {*ALONE, *TOGETHER}


@pytest.mark.parametrize("name", mostly_full(ALONE, QUICK))
def test_alone(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"pip install -c constraints.txt {NEEDS[name]}")
    torch.manual_seed(0)
    report = preflight(ALONE[name])
    assert report.findings == ()
    assert report.steps >= 3
    assert report.parameters > 0


@pytest.mark.parametrize("name", mostly_full(TOGETHER, QUICK))
def test_together(name):
    findings = World(4).run(TOGETHER[name]).values
    assert [[str(event) for event in events] for events in findings] == [[]] * 4
