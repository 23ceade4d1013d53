"""The torchrun scripts of tests/simulator/scripts: what each does, and how it runs with gloo on the CPU, if it can."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        title: What it does.
        gloo: Its arguments on the CPU; None if it asks for GPUs without a choice.
        simulated: Its arguments in the simulator.
        folder: Whether its first argument is a folder for files.
    """

    title: str
    gloo: tuple[str, ...] | None = ()
    simulated: tuple[str, ...] = ()
    folder: bool = False


CASES = {
    "ddp_torchrun": Case("DDP, `.cuda()`, DistributedSampler", None),
    "amp_streams": Case("DDP, autocast, GradScaler, streams, events", None),
    "spawned": Case("mp.spawn, checkpoint, map_location", None, folder=True),
    "ring_and_logging": Case("gradients by hand, batch_isend_irecv", None),
    "imagenet_style": Case("DDP, BatchNorm, meters, schedule, checkpoint", folder=True),
    "language_model": Case("DDP, accumulation, clipping, tied weights"),
    "fsdp2_accelerator": Case("FSDP2, torch.accelerator"),
    "fsdp2_checkpoint": Case("FSDP2, distributed checkpoints", folder=True),
    "tensor_parallel": Case("DTensor, column and row parallel"),
    "pipeline": Case("1F1B pipeline, a stage per rank"),
    "parameter_server": Case("a parameter server by messages"),
    "elastic": Case("elastic torchrun, snapshots, signals", folder=True),
    "accelerate_loop": Case("Accelerate, accumulation, metrics", ("--cpu",)),
    "hf_trainer": Case("transformers' Trainer", ("--use_cpu",)),
    "trl_sft": Case("TRL's SFTTrainer", ("--use_cpu",), ("--use_cpu",)),
}


def losses_in(text):
    """Return every number after the word "loss"."""
    return [float(found) for found in re.findall(r"\bloss:? (-?\d+\.\d+)", text)]


class ScriptFailed(Exception):
    """A script that failed or did not end under torchrun, with the last lines of its error stream."""


def run_with_gloo(name, processes, folder, timeout=300):
    """Run a script under torchrun on the CPU and return what it printed, or raise `ScriptFailed`."""
    case = CASES[name]
    words = [*([str(folder)] if case.folder else []), *(case.gloo or ())]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(FOLDER / f"{name}.py"), *words]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its processes can be ended together
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    try:
        printed, errors = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        printed, errors = run.communicate()
        raise ScriptFailed(f"no end within {timeout} s\n{errors[-2000:]}") from None
    if run.returncode:
        raise ScriptFailed(errors[-4000:])
    return printed


def words_of(name, folder):
    """Return the arguments of a script in the simulator."""
    case = CASES[name]
    return [*([str(folder)] if case.folder else []), *case.simulated]
