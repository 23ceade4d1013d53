"""Theorem: training scripts as users have them, with `.cuda()`, run clean on two ranks; a planted fault is named once.

The scripts are those that preflight is tested with (tests/guards/usual_scripts).
"""

from pathlib import Path

import pytest

from isobit.simulator.program.script import Script
from isobit.simulator.sweep import Plan, run_seed
from tests.sweeps import mostly_full

pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = Path(__file__).parents[1] / "guards" / "usual_scripts"
RIGHT = {  # with the package that the development tools do not install
    "ddp_loop": "",
    "fsdp2_loop": "",
    "accelerate_loop": "",
    "hf_trainer": "",
    "lightning_trainer": "lightning",
    "trl_sft": "trl",
}
LIGHT = ("ddp_loop", "fsdp2_loop")
STEP = "                optimizer.step()\n"
PLANTED = {  # name: (script, text, what replaces it, kind)
    "no set_epoch": ("ddp_loop", "sampler.set_epoch(epoch)", "pass", "order repeated"),
    "no zero_grad": (
        "ddp_loop",
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        "gradients kept",
    ),
    "a sampler without ranks": (
        "ddp_loop",
        "DistributedSampler(dataset, shuffle=True)",
        "DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)",
        "data alike",
    ),
    "a rate per rank": ("ddp_loop", "lr=1e-2", "lr=1e-2 * (1 + rank)", "update differs"),
    "the module inside the wrapper": (
        "ddp_loop",
        "model(x)",
        "model.module(x)",
        "gradients differ",
    ),
    "one seed for dropout": ("ddp_loop", "torch.manual_seed(1 + rank)", "", "random numbers alike"),
    "a tensor on the first device": (
        "ddp_loop",
        "torch.cuda.set_device(rank)",
        "torch.cuda.set_device(rank)\n    torch.ones(2).to('cuda:0')",
        "device shared",
    ),
    "a layer without optimizer": (
        "ddp_loop",
        "AdamW(model.parameters(),",
        "AdamW(list(model.parameters())[:-2],",
        "not updated",
    ),
    "a loss reduced on rank 0": (
        "ddp_loop",
        STEP,
        f"                if rank == 0:\n                    dist.all_reduce(loss.detach())\n{STEP}",
        "mismatch",
    ),
    "a file of all ranks": (
        "ddp_loop",
        "    dist.destroy_process_group()",
        "    torch.save(model.state_dict(), '/dev/null')\n    dist.destroy_process_group()",
        "file shared",
    ),
    "a model before the device is chosen": (
        "hf_trainer",
        "    set_seed(0)\n",
        "    set_seed(0)\n    torch.nn.Linear(2, 2).cuda()\n",
        "device shared",
    ),
    "shards on one stream": (
        "fsdp2_loop",
        "DistributedSampler(dataset, size, rank, shuffle=True)",
        "DistributedSampler(dataset, 1, 0, shuffle=True)",
        "data alike",
    ),
    "shards without zero_grad": (
        "fsdp2_loop",
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        "gradients kept",
    ),
}


def kinds(script):
    run = run_seed(Plan(Script(script, []), 2, [0]), 0)
    assert run.calls
    assert run.not_judged
    return [found.kind for found in run.found]


@pytest.mark.parametrize("name", mostly_full(RIGHT, LIGHT))
@pytest.mark.sweep(1)
def test_right_scripts_are_clean(name):
    if RIGHT[name]:
        pytest.importorskip(RIGHT[name])
    assert kinds(FOLDER / f"{name}.py") == []


@pytest.mark.parametrize(
    "name", mostly_full(PLANTED, [name for name in PLANTED if PLANTED[name][0] in LIGHT])
)
@pytest.mark.sweep(4)
def test_a_planted_fault_is_named_once(name, tmp_path):
    script, text, planted, kind = PLANTED[name]
    right = (FOLDER / f"{script}.py").read_text()
    assert right.count(text) == 1, (script, text)
    path = tmp_path / f"{script}.py"
    path.write_text(right.replace(text, planted))
    assert kinds(path) == [kind]
