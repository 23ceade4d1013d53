"""What the tools cost against the size of their input: `python -m benchmarks.tools [checkpoints|rollouts]`.

Each size runs in a process of its own: CPU seconds and wall seconds of the comparison, and by how much resident memory
grew. Checkpoints are compared next to `cmp` of the same two files, which are in the page cache.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {"checkpoints": (8, 80, 800), "rollouts": (10_000, 100_000, 1_000_000)}  # MB; tokens
LENGTH = 512  # tokens of a sequence


def make(kind, folder, size):
    import numpy as np

    if kind == "checkpoints":
        import torch
        from safetensors.torch import save_file

        count = max(1, size // 8)
        tensors = {f"t{k}": torch.full((2_000_000,), float(k)) for k in range(count)}
        for name in "ab":
            save_file(tensors, folder / f"{name}.safetensors")
        return [folder / f"{name}.safetensors" for name in "ab"]
    draw = np.random.default_rng(0)
    sides = [(folder / f"{name}.jsonl").open("w") for name in "ab"]
    for at in range(max(1, size // LENGTH)):
        values = (-draw.random(LENGTH)).astype(np.float32)
        for side, spoil in zip(sides, (0.0, 1e-3), strict=True):
            ids = list(range(LENGTH))
            spoiled = (values + np.float32(spoil) * values**2).astype(float).tolist()
            side.write(json.dumps({"id": at, "token_ids": ids, "logprobs": spoiled}) + "\n")
    for side in sides:
        side.close()
    return [Path(side.name) for side in sides]


def compare(kind, paths):
    """Compare in this process and print CPU seconds, wall seconds, and by how many MB memory grew at its peak."""
    from isobit.comparing.checkpoints.compare import compare_checkpoints
    from isobit.comparing.rollouts.comparing import compare as compare_rollouts

    status = Path("/proc/self/status")
    call = {
        "checkpoints": lambda: compare_checkpoints(*paths, digests=False).exit_code,
        "rollouts": lambda: compare_rollouts(*paths).exit_code,
    }[kind]

    def resident(key):
        return next(int(x.split()[1]) for x in status.read_text().splitlines() if key in x) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, cpu, began = resident("VmRSS"), time.process_time(), time.monotonic()
    assert call() in (0, 1)
    cpu, began = time.process_time() - cpu, time.monotonic() - began
    print(json.dumps([cpu, began, resident("VmHWM") - before]))


def child(*words):
    """Run this module in a process of its own, whose memory is its own, and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.tools", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def seconds_of_cmp(paths):
    before = os.times()
    subprocess.run(["cmp", *paths], check=True)
    after = os.times()
    return after.children_user + after.children_system - before[2] - before[3]


def main():
    if sys.argv[1:2] == ["make"]:
        print(json.dumps([str(p) for p in make(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))]))
        return
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2], sys.argv[3:])
        return
    for kind in sys.argv[1:] or SIZES:
        rows = []
        for size in SIZES[kind]:
            with tempfile.TemporaryDirectory() as folder:
                paths = json.loads(child("make", kind, folder, size))
                cpu, wall, memory = json.loads(child("compare", kind, *paths))
                beside = f"; cmp {seconds_of_cmp(paths):.2f} s CPU" if kind == "checkpoints" else ""
            rows.append((cpu, memory))
            unit = {"checkpoints": "MB", "rollouts": "tokens"}[kind]
            print(
                f"{kind}, {size:,} {unit}: {cpu:.2f} s CPU, {wall:.2f} s, +{memory:.0f} MB{beside}"
            )
        slope = math.log10(rows[-1][0] / rows[0][0]) / 2
        grown = rows[-1][1] - rows[-2][1]
        print(
            f"{kind}: CPU time grows with the power {slope:.2f}; memory {grown:+.0f} MB in the last decade"
        )


if __name__ == "__main__":
    main()
