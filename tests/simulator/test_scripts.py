"""Torchrun scripts run unmodified on 8 ranks without a finding; with gloo on two processes, the losses are the same."""

import pytest

from benchmarks import scripts as benchmark
from isobit.simulator.program.script import Script
from isobit.simulator.sweep import Plan, run_seed
from tests.simulator.script_cases import (
    CASES,
    FOLDER,
    ScriptFailed,
    losses_in,
    run_with_gloo,
    words_of,
)
from tests.sweeps import mostly_full

pytestmark = pytest.mark.filterwarnings("ignore")
LIGHT = ("ddp_torchrun", "amp_streams", "spawned", "elastic", "parameter_server")


def simulate(name, ranks, folder):
    done = run_seed(Plan(Script(FOLDER / f"{name}.py", words_of(name, folder)), ranks, [0]), 0)
    assert done.found == (), done.found
    return done.printed


def test_every_script_is_a_case():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(CASES)
    assert len(CASES) >= 10


def test_the_benchmark_goes_on_after_a_script_that_fails_under_gloo(monkeypatch, tmp_path):
    with pytest.raises(ScriptFailed, match="no end within 1 s"):
        run_with_gloo("pipeline", 2, tmp_path, timeout=1)
    real, simulated = "epoch 0: loss 1.5", ([], [1.5])

    def run(*_):
        if not real:
            raise ScriptFailed(
                "W1116 a warning\n[rank1]: RuntimeError: no device\nChildFailedError:"
            )
        return real

    monkeypatch.setattr(benchmark, "run_with_gloo", run)
    monkeypatch.setattr(benchmark, "simulate", lambda *_: simulated)
    assert benchmark.compare_with_gloo("pipeline") == ("1 losses equal", True)
    assert benchmark.compare_with_gloo("spawned") == ("not run: it asks for GPUs", False)
    simulated = ([], [1.25])
    assert benchmark.compare_with_gloo("pipeline") == ("[1.5] against [1.25]", False)
    simulated = (["deadlock"], [1.5])
    assert benchmark.compare_with_gloo("pipeline")[1] is False
    real, simulated = "no number", ([], [])
    assert benchmark.compare_with_gloo("pipeline")[1] is False
    real = ""
    assert benchmark.compare_with_gloo("pipeline") == ("failed: RuntimeError: no device", False)


@pytest.mark.parametrize("name", mostly_full(CASES, LIGHT))
@pytest.mark.sweep(2)
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
