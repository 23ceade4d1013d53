"""The program of one rank, from its layout to its curve, however it was launched."""

from __future__ import annotations

from typing import Any

from isobit.errors import UnsupportedError
from isobit.gates.training.rank_layouts import RankLayout
from isobit.gates.training.train_isobit import train
from isobit.gates.training.train_stock import train_stock
from isobit.gates.training.training_curve import Curve, digest_of, read_curve
from isobit.gates.training.workload import find_dtype, find_workload, make_model
from isobit.guards.live.agreement import rank_agreement


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
        if layout.data > 1 and layout.engine != "fsdp2":  # under FSDP2 every rank has another shard
            rank_agreement(run.model, run.data_group)
    return read_curve(run, first)
