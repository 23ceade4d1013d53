"""Torchrun scripts run unmodified on 8 ranks without a finding; with gloo on two processes, the losses are the same."""

import pytest

from isobit.simulator.program.script import Script
from isobit.simulator.sweep import Plan, run_seed
from tests.simulator.script_cases import CASES, FOLDER, losses_in, run_with_gloo, words_of

pytestmark = pytest.mark.filterwarnings("ignore")
LIGHT = ("ddp_torchrun", "amp_streams", "spawned", "elastic", "parameter_server")


def simulate(name, ranks, folder):
    done = run_seed(Plan(Script(FOLDER / f"{name}.py", words_of(name, folder)), ranks, [0]), 0)
    assert done.found == (), done.found
    return done.printed


def test_every_script_is_a_case():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(CASES)
    assert len(CASES) >= 10


@pytest.mark.parametrize(
    "name", [n if n in LIGHT else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_scripts_run_unmodified_on_eight_ranks(name, tmp_path):
    printed = simulate(name, 8, tmp_path)
    assert printed[0]


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_scripts_run_unmodified_on_sixty_four_ranks(name, tmp_path):
    assert simulate(name, 64, tmp_path)[0]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gloo is not None])
def test_gloo_prints_the_same_losses(name, tmp_path):
    for folder in ("real", "simulated"):
        (tmp_path / folder).mkdir()
    real = losses_in(run_with_gloo(name, 2, tmp_path / "real"))
    assert real
    assert losses_in(simulate(name, 2, tmp_path / "simulated")[0]) == real
