"""A preflight finds planted bugs in the first steps of a program, and is silent on correct programs.

1. Programs with a bug each: exactly its rule is found.
2. Correct programs of many shapes: nothing is found.
3. Hyperparameters: a default that hides a configuration is named; groups without decay and schedules are allowed.
4. The program's process is left as it was; a program without a step is refused.
5. The command: exit codes, JSON, arguments, torchrun's variables, scripts that fail.
"""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from isobit import ArgumentError
from isobit.guards import preflight
from isobit.guards.trial_run.hyperparameters import expected_values
from tests.guards.preflight_programs import (
    RIGHT,
    WRONG,
    accumulation_and_clipping,
    adam_with_warm_up_and_groups,
    loop,
    plain,
)
from tests.guards.watched_programs import net


@pytest.mark.parametrize("program", WRONG, ids=lambda p: p.__name__)
def test_a_planted_bug_is_found(program):
    report = preflight(program)
    assert {finding.rule for finding in report.findings} == WRONG[program], report.findings
    assert not report.is_clean


@pytest.mark.parametrize("program", RIGHT, ids=lambda p: p.__name__)
def test_a_correct_program_is_clean(program):
    report = preflight(program)
    assert report.findings == ()
    assert report.steps == 3
    assert report.parameters > 0
    assert len(report.judged) >= 3


def test_what_is_found_is_named():
    (found,) = preflight(
        dropout_in_eval := next(p for p in WRONG if "dropout" in p.__name__)
    ).findings
    assert dropout_in_eval
    assert "first in 1 (AlwaysDropout)" in found.message
    (found,) = preflight(next(p for p in WRONG if p.__name__ == "detached")).findings
    assert "first.weight, first.bias; the graph ends before second" in found.message
    (found,) = preflight(next(p for p in WRONG if "moves" in p.__name__)).findings
    assert "1 of 2 parameters that are not trained have changed: 0.weight" in found.message


# ---- 3. hyperparameters ------------------------------------------------------------------------------------


def from_defaults():
    model = net()
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_defaults_that_hide_a_configuration_are_named():
    """FALSIFY-HYPERPARAMS-001."""
    config = {"optimizer": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    found = [finding.message for finding in preflight(from_defaults, config=config).findings]
    assert found == [
        "beta2 is 0.95 in the configuration and 0.999 (AdamW's default) in 1 of 1 parameter groups",
        "weight_decay is 0.1 in the configuration and 0.01 (AdamW's default) in 1 of 1 parameter groups",
    ]
    report = preflight(adam_with_warm_up_and_groups, config=config)
    assert report.is_clean
    assert (
        report.judged[-1] == "configuration reached the optimizer (beta1, beta2, lr, weight_decay)"
    )


def test_every_optimizer_reads_clipped_gradients():
    """C-EMBED-GRAD-001."""
    report = preflight(plain, config={"max_grad_norm": 0.01})
    assert {finding.rule for finding in report.findings} == {"norm-above-limit"}
    assert report.judged[0] == "losses, gradients and weights, norm up to 0.01"
    assert preflight(accumulation_and_clipping, config={"a": {"gradient_clipping": 0.1}}).is_clean
    assert preflight(plain, config={"max_grad_norm": 0}).is_clean


def test_names_of_configurations():
    arguments = {"learning_rate": "1e-4", "adam_beta2": 0.95, "adam_epsilon": 1e-8, "bf16": True}
    assert expected_values(arguments) == {"lr": 1e-4, "beta2": 0.95, "eps": 1e-8}
    deepspeed = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999]}}}
    assert expected_values(deepspeed) == {"beta1": 0.8, "beta2": 0.999, "lr": 3e-5}
    assert expected_values({"lr": 1, "inner": {"lr": 2}}) == {"lr": 1}
    assert expected_values({"lr": "auto", "betas": [0.9]}) == {}


# ---- 4. the process ----------------------------------------------------------------------------------------


def test_hooks_are_removed_and_finally_blocks_run():
    ran = []
    kept = [dict(hooks) for hooks in every_hook()]  # isobit.parallel has one on optimizers

    def program():
        try:
            plain()
        finally:
            ran.append(True)

    def fails():
        raise KeyError("x")

    preflight(program)
    with pytest.raises(KeyError):
        preflight(fails)
    assert ran == [True]
    assert [dict(hooks) for hooks in every_hook()] == kept


def every_hook():
    of_modules = [getattr(modules, name) for name in vars(modules) if name.startswith("_global_")]
    of_optimizers = [
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]
    return [hooks for hooks in (*of_modules, *of_optimizers) if isinstance(hooks, dict)]


def test_a_program_without_a_step_is_refused():
    with pytest.raises(ArgumentError, match="nothing was checked"):
        preflight(lambda: net()(torch.zeros(1, 8)))
    with pytest.raises(ArgumentError):
        preflight(plain, steps=0)


def test_a_program_that_catches_everything_is_ended_at_every_step():
    reached = []

    def stubborn():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            try:
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                reached.append(step)
            except BaseException:
                pass

    report = preflight(stubborn)
    assert (report.steps, report.findings, reached) == (3, (), [0, 1])


# ---- 5. the command ----------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist
if "--ranks" in sys.argv:
    dist.init_process_group("gloo")
    dist.barrier()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(0 if "--none" in sys.argv else 1000):
    if "--wrong" not in sys.argv:
        optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    print(step)
    if step == 1 and "--fails" in sys.argv:
        sys.exit("out of data")
sys.exit(3 if "--none" in sys.argv else "not reached")
"""


def command(folder, *words):
    run = [sys.executable, "-m", "isobit", "preflight", "train.py", *words]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.yaml").write_text("lr: 1e-2\nbeta2: 0.95\n")
    return tmp_path


def test_the_command(folder):
    done = command(folder, "--config", "train.yaml", "--json", "--", "--wrong")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    assert [found["rule"] for found in record["findings"]] == ["not-zeroed", "hyperparameter"]
    assert record["steps"] == 3
    assert record["provenance"]["command"].endswith("-- --wrong")


RESTLESS = """
import multiprocessing, os, sys, threading, time, torch
over = threading.Event()

def train():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    os.mkdir("out")
    os.chdir("out")
    threading.Thread(target=over.wait).start()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    if sys.argv[1:] == ["thread"]:
        worker = threading.Thread(target=train)
        worker.start()
        worker.join()
    else:
        train()
    over.set()
    sys.exit(0)
"""


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.full), ("thread",)])
def test_a_script_that_is_ended_early_is_not_waited_for(folder, words):
    """It starts a thread and a process that it would end itself, changes its folder, and trains in a thread."""
    (folder / "train.py").write_text(RESTLESS)
    run = [sys.executable, "-m", "isobit", "preflight", "train.py", "--json", "--", *words]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["steps"], record["findings"]) == (3, [])


@pytest.mark.full
def test_the_command_in_other_ways(folder):
    done = command(folder)
    assert (done.returncode, "train.py: nothing found by 10 of 24 checks" in done.stdout) == (
        0,
        True,
    )
    done = command(folder, "--", "--none")
    assert (done.returncode, "exit code 3" in done.stderr) == (2, True)
    done = command(folder, "--", "--fails")  # after two of three steps
    assert (done.returncode, "exit code 1" in done.stderr) == (2, True)
    done = command(folder, "--", "--ranks")
    assert (done.returncode, "--torchrun" in done.stderr) == (2, True)
    assert command(folder, "--torchrun", "--", "--ranks").returncode == 0
    page = folder / "page.html"
    done = command(folder, "--ranks", "2", "--html", "page.html", "--", "--ranks", "--wrong")
    assert (done.returncode, "on 2 ranks, 3 steps" in done.stdout) == (1, True), done.stderr
    assert "<code>not-zeroed</code>" in page.read_text()
    assert command(folder, "--ranks", "2").returncode == 2  # its ranks do not communicate
    (folder / "declare.yaml").write_text("frozen: ['0.*']\n")
    assert command(folder, "--declare", "declare.yaml").returncode == 1
    (folder / "declare.yaml").write_text("freeze: ['0.*']\n")
    assert command(folder, "--declare", "declare.yaml").returncode == 2
    (folder / "train.yaml").write_text("- a\n")
    assert command(folder, "--config", "train.yaml").returncode == 2


def test_an_optimizer_that_chooses_its_own_rate_is_judged():
    from transformers import Adafactor

    def adafactor():
        torch.manual_seed(0)
        model = net()
        loop(model, Adafactor(model.parameters(), relative_step=True, scale_parameter=False))

    assert preflight(adafactor).is_clean
