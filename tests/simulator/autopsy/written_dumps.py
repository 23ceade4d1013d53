"""Dumps written by hand, for what the simulator does not do: batches of NCCL, two streams, other versions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

PAIR = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}


def call(record: int, name: str, number: int, state: str = "completed", **fields: Any) -> dict:
    """Return one entry as torch 2.13 writes it."""
    p2p = fields.pop("p2p", False)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "op_id": record,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1000 * record,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/env/site-packages/torch/distributed/c.py",
                "line": 9,
            },
            {"name": "step", "filename": "/job/train.py", "line": 10 + record},
        ],
    } | fields


def write(
    folder: Path, dumps: dict[int, list[dict]], groups: Any = None, text: bool = False, **top: Any
) -> Path:
    """Write a dump per rank, as a pickle or as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, entries in dumps.items():
        raw = {"version": "2.10", "pg_config": groups or PAIR, "entries": entries} | top
        if text:
            (folder / f"trace_{rank}.json").write_text(json.dumps(raw))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(raw, 2))
    return folder


def grouped(ranks: int) -> dict:
    """Return the record of a default group of this many ranks."""
    return {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}


GLOO = {"": {"name": "", "desc": "", "ranks": "[]"}}  # gloo does not record the members of a group


def gloo(record: int, number: int, retired: bool, **fields: Any) -> dict:
    """Return an all-reduce as gloo records it."""
    name = {"profiling_name": "gloo:all_reduce", "retired": retired}
    return call(record, "", number, "scheduled", **name, **fields)
