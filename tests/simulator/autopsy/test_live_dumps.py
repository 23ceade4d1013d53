"""Dumps that torch itself writes: three processes hang over gloo, and the rank that does not join is named."""

import subprocess
import sys

import pytest

from isobit.simulator.autopsy.examine import examine

SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
import torch._C._distributed_c10d as recorder
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
def dump():
    time.sleep(5)
    folder = sys.argv[1]
    with open(f"{folder}/trace_{rank}", "wb") as file:
        file.write(recorder._dump_fr_trace(True, True, False))
    with open(f"{folder}/trace_{rank}.json", "wb") as file:
        file.write(recorder._dump_fr_trace_json(True, False))
    while len(os.listdir(folder)) < 6:  # gloo retires a call whose peer has gone
        time.sleep(0.2)
    os._exit(0)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
threading.Thread(target=dump).start()
if rank != 2:
    dist.all_reduce(torch.ones(4))
time.sleep(200)
"""


@pytest.mark.full
def test_a_hang_over_gloo(tmp_path):
    script, folder = tmp_path / "hangs.py", tmp_path / "dumps"
    script.write_text(SCRIPT)
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    run = [sys.executable, *command, str(script), str(folder)]
    subprocess.run(run, capture_output=True, timeout=300, check=False)
    found = examine(folder).finding
    assert found.ranks == (2,)
    assert "all_reduce number 4 of group '0' (ranks 0–2), waiting for rank 2" in found.received
    assert found.stacks[0][0].startswith(f"{script}:")
    for path in folder.glob("trace_?"):
        path.unlink()
    assert examine(folder).finding.ranks == (2,)  # the JSON of the same hang, without stacks
