"""Train one rank layout under torchrun and print its curve.

`torchrun --nproc-per-node 4 -m isobit.gates.training --data 2 --tensor 2`
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch.distributed as dist

from isobit.gates.training.launcher import run_rank
from isobit.gates.training.workload import DTYPES, ENGINES, WORKLOADS, RankLayout


def main() -> int:
    """Train, and print the curve as one line of JSON on rank 0."""
    parser = argparse.ArgumentParser(prog="isobit.gates.training", description=__doc__)
    parser.add_argument("--data", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per rank")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts", type=int, default=1, help="ranks that experts are split over")
    parser.add_argument("--context", type=int, default=1, help="ranks that share attention")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="isobit",
        help="the wrapper of the model: none (isobit), DDP or FSDP2",
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--stock", action="store_true", help="train by stock PyTorch instead")
    parser.add_argument("--stop", type=int, metavar="STEP", help="stop before this step")
    parser.add_argument(
        "--load", metavar="FOLDER", help="resume from a checkpoint, saved at any layout"
    )
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint at the end")
    options = parser.parse_args()
    sizes = options.data, options.micro, options.tensor
    layout = RankLayout(*sizes, options.engine, options.experts, options.context)
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    try:
        curve = run_rank(
            layout,
            options.workload,
            options.dtype,
            stock=options.stock,
            stop=options.stop,
            load=options.load,
            save=options.save,
        )
        if curve is not None:
            sys.stdout.write(json.dumps({**asdict(curve), "digest": curve.digest}) + "\n")
            sys.stdout.flush()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
