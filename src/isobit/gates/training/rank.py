"""What one rank does, from its layout to its curve; whoever launched it."""

from __future__ import annotations

from typing import Any

from isobit.errors import UnsupportedError
from isobit.gates.training.digest import Curve, digest_of, read_curve
from isobit.gates.training.layouts import Layout
from isobit.gates.training.stock import train_stock
from isobit.gates.training.train import train
from isobit.gates.training.workload import find_dtype, find_workload, make_model
from isobit.guards.agreement import rank_agreement


def run_rank(
    layout: Layout,
    workload_name: str,
    dtype_name: str,
    *,
    stock: bool = False,
    stop: int | None = None,
    load: str | None = None,
    save: str | None = None,
) -> Curve | None:
    """Trains this rank's part; rank 0 has the curve of the whole. Replicas that part are an error."""
    workload, dtype = find_workload(workload_name), find_dtype(dtype_name)
    first = digest_of(make_model(workload, dtype)).hex
    run: Any
    if stock:
        if load is not None or save is not None:
            raise UnsupportedError(
                expected="the control from its first step",
                received="a checkpoint to load or save",
                remedy="leave out stock, or the checkpoint",
            )
        run = train_stock(workload, layout, dtype, stop)
    else:
        run = train(workload, layout, dtype, stop=stop, load=load, save=save)
        if layout.data > 1 and layout.engine != "fsdp2":  # there every rank holds its own part
            rank_agreement(run.model, run.data_group)
    return read_curve(run, first)
