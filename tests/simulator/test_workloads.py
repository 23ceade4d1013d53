"""Unmodified DDP, FSDP1, FSDP2, FSDP2 × TP, TP, checkpoints, a 1F1B pipeline and torch.compile run in the simulator.

The values are one for all seeds, nothing is found amiss, and torchrun with gloo prints them too: equal but for the last
bits of sums, which gloo adds in an order of its own.
"""

import json
import subprocess
import sys

import pytest
import torch

from isobit.simulator import World
from tests.simulator import workloads

pytestmark = pytest.mark.filterwarnings("ignore")
EVERYTHING = ("bits", "finite", "reads", "training")


@pytest.fixture(autouse=True)
def _one_thread():
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.mark.parametrize("work", workloads.WORKLOADS, ids=lambda work: work.__name__)
@pytest.mark.sweep(3)
def test_values_do_not_depend_on_the_schedule(work, tmp_path):
    watch = EVERYTHING if work is not workloads.compiled else ()
    runs = [World(4, seed, watch=watch).run(work, str(tmp_path / str(seed))) for seed in range(2)]
    assert not any(run.findings for run in runs)
    assert runs[0].values == runs[1].values
    assert runs[0].digest != runs[1].digest


@pytest.mark.full
def test_torchrun_with_gloo_prints_the_same_values(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    script = [workloads.__file__, str(tmp_path / "gloo")]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    gloo = json.loads(done.stdout.splitlines()[-1])
    ours = World(4).run(workloads.run_all, str(tmp_path / "simulated")).values[0]
    assert list(ours) == list(gloo) == [work.__name__ for work in workloads.WORKLOADS]
    for name, values in ours.items():
        torch.testing.assert_close(
            torch.tensor(values), torch.tensor(gloo[name]), rtol=1e-4, atol=1e-5, msg=name
        )
    assert ours["saved_and_loaded"] == gloo["saved_and_loaded"]
    assert ours["pipeline"] == gloo["pipeline"]
