"""Run a rank layout: in the simulator, or as processes under torchrun with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from isobit.errors import UnsupportedError
from isobit.gates.training.train_isobit import train
from isobit.gates.training.train_stock import train_stock
from isobit.gates.training.training_curve import Curve, digest_of, read_curve
from isobit.gates.training.workload import RankLayout, find_dtype, find_workload, make_model
from isobit.guards.live.agreement import rank_agreement
from isobit.simulator import World

# The program of one rank, from its layout to its curve, however it was launched.


def run_rank(
    layout: RankLayout,
    workload_name: str,
    dtype_name: str,
    *,
    stock: bool = False,
    stop: int | None = None,
    load: str | None = None,
    save: str | None = None,
) -> Curve | None:
    """Train this rank's part, and return the curve on rank 0, None elsewhere.

    Raises:
        AgreementError: Data-parallel replicas differ.
        UnsupportedError: A checkpoint was requested for stock.
    """
    workload, dtype = find_workload(workload_name), find_dtype(dtype_name)
    first = digest_of(make_model(workload, dtype)).hex
    run: Any
    if stock:
        if load is not None or save is not None:
            raise UnsupportedError(
                expected="stock from its first step",
                received="a checkpoint to load or save",
                remedy="leave out stock, or the checkpoint",
            )
        run = train_stock(workload, layout, dtype, stop)
    else:
        run = train(workload, layout, dtype, stop=stop, load=load, save=save)
        # Under FSDP2 every rank has another shard; ranks that split experts have different ones.
        if layout.data > layout.experts and layout.engine != "fsdp2":
            rank_agreement(run.model, run.replica_group)
    return read_curve(run, first)


TRANSPORTS = ("simulator", "gloo")


@dataclass(frozen=True)
class Job:
    """One layout to train, and how."""

    layout: RankLayout
    workload: str
    dtype: str
    stock: bool = False
    transport: str = "simulator"
    stop: int | None = None  # the step before which to stop; None trains all steps
    load: str | None = None
    save: str | None = None


def run_job(job: Job, seed: int = 0) -> tuple[Curve, float]:
    """Return the curve, and the seconds it took."""
    began = time.monotonic()
    curve = under_torchrun(job) if job.transport == "gloo" else in_simulator(job, seed)
    return curve, time.monotonic() - began


def in_simulator(job: Job, seed: int) -> Curve:
    """Run all ranks in this process; a single rank needs no simulated world."""
    options: dict[str, Any] = {
        "stock": job.stock,
        "stop": job.stop,
        "load": job.load,
        "save": job.save,
    }
    if job.layout.ranks == 1:
        curve = run_rank(job.layout, job.workload, job.dtype, **options)
    else:
        world = World(job.layout.ranks, seed=seed)
        result = world.run(lambda rank: run_rank(job.layout, job.workload, job.dtype, **options))
        curve = result.values[0]
    assert curve is not None
    return curve


def under_torchrun(job: Job) -> Curve:
    """Run one process per rank over gloo.

    Raises:
        UnsupportedError: The processes failed.
    """
    layout = job.layout
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={layout.ranks}",
    ]
    command += [
        "-m",
        "isobit.gates.training",
        f"--data={layout.data}",
        f"--micro={layout.micro}",
        f"--tensor={layout.tensor}",
        f"--experts={layout.experts}",
        f"--context={layout.context}",
    ]
    command += [f"--engine={layout.engine}", f"--workload={job.workload}", f"--dtype={job.dtype}"]
    command += ["--stock"] if job.stock else []
    command += [f"--stop={job.stop}"] if job.stop is not None else []
    command += [f"--load={job.load}"] if job.load is not None else []
    command += [f"--save={job.save}"] if job.save is not None else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        raise UnsupportedError(
            expected=f"a curve from {layout.ranks} processes",
            received=f"exit code {done.returncode}: {done.stderr[-2000:]}",
            remedy=f"run it by itself: {' '.join(command)}",
        )
    record = json.loads(lines[0])
    record.pop("digest")
    return Curve.read(record)
