"""Ranks of unmodified torch.distributed code in one process, deterministic, with the culprit named.

World(ranks, seed=0, faults=(), *, delays, watch, poison, sends, strict).run(fn, *args, init=True) -> Result
spawn(fn, args, nprocs, …, seed=0)    torch.multiprocessing.spawn's signature; fn calls init_process_group itself
run_script(path, argv, ranks, seed)   every rank executes the file as __main__, as under torchrun
replay(trace, fn, *args)              the same schedule again, or ReplayError where it departs
Result                                values, trace, digest, findings, clocks
Trace                                 save(path), load(path), digest
Die Stall Straggle Drop Flip PlantNaN faults: (rank, call, …); draw_faults(seed, ranks, calls) picks some
compare_with_one(world, fn, *args)    the same on one rank: the first step and tensor that part, and whose share
probe.same, probe.distinct            what a script says of its tensors; outside a world they do nothing
same_on_all_ranks(named)              called on every rank: DivergenceError names tensor, ranks and first index

Errors (isobit.errors): SimulationError and its children, each with `ranks` at the root, `stacks`, and `result`.
"""

from isobit.simulator import probe
from isobit.simulator.checkers.collective_calls import same_on_all_ranks
from isobit.simulator.checkers.single_rank import compare_with_one
from isobit.simulator.checkers.verdict import Result
from isobit.simulator.faults import Die, Drop, Fault, Flip, PlantNaN, Stall, Straggle, draw_faults
from isobit.simulator.launch import replay, run_script, spawn
from isobit.simulator.trace import Trace
from isobit.simulator.world import World

__all__ = [
    "Die",
    "Drop",
    "Fault",
    "Flip",
    "PlantNaN",
    "Result",
    "Stall",
    "Straggle",
    "Trace",
    "World",
    "compare_with_one",
    "draw_faults",
    "probe",
    "replay",
    "run_script",
    "same_on_all_ranks",
    "spawn",
]
