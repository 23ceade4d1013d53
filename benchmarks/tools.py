"""What the tools cost against the size of their input: `python -m benchmarks.tools [TOOL …] [SIZE …] [--write]`.

Each size runs in a process of its own: CPU seconds and wall seconds of the tool, and by how much resident memory grew.
Checkpoints are compared next to `cmp` of the same two files, which are in the page cache. A slope is the power with
which cost grows, by the last two sizes. With --write, the record and the picture of docs/explanation/scale.md are
written; rows of other tools, and of other sizes where sizes are given, stay as they are. `--table` measures nothing: it
prints the record as the tables of that page.
"""

import dataclasses
import datetime
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/results/tools_scale.json"
PICTURE = ROOT / "docs/pictures/tools_scale.svg"
TOOLS = {  # unit, and sizes
    "compare checkpoints": ("MB", (8, 80, 800, 2400)),
    "compare rollouts": ("tokens", (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)),
    "runlog": ("lines", (10_000, 100_000, 1_000_000)),
    "simulate, a step of DDP": ("ranks", (16, 64, 256, 1024)),
    "simulate, an all-reduce": ("ranks", (16, 64, 256, 1024)),
    "autopsy": ("ranks", (128, 1024, 4096, 16384)),
    "sums of `Levels`": ("ranks", (8, 64, 512)),
}
LENGTH = 512  # tokens of a sequence


# ---- inputs -------------------------------------------------------------------------------------------------


def make_checkpoints(folder, size):
    import torch
    from safetensors.torch import save_file

    tensors = {f"t{k}": torch.full((2_000_000,), float(k)) for k in range(max(1, size // 8))}
    for name in "ab":
        save_file(tensors, folder / f"{name}.safetensors")


def make_rollouts(folder, size):
    """Write sequences that differ in their ids; their values repeat after a million tokens."""
    import numpy as np

    draw = np.random.default_rng(0)
    ends = []
    for _ in range(min(max(1, size // LENGTH), 2000)):
        values = (-draw.random(LENGTH)).astype(np.float32)
        both = [(values + np.float32(spoil) * values**2).astype(float) for spoil in (0.0, 1e-3)]
        ids = list(range(LENGTH))
        ends.append([json.dumps({"token_ids": ids, "logprobs": one.tolist()})[1:] for one in both])
    with (folder / "a.jsonl").open("w") as a, (folder / "b.jsonl").open("w") as b:
        for at in range(max(1, size // LENGTH)):
            for side, end in zip((a, b), ends[at % len(ends)], strict=True):
                side.write(f'{{"id": {at}, {end}\n')


def make_log(folder, size):
    import random

    draw = random.Random(0)
    with (folder / "log.jsonl").open("w") as file:
        for step in range(size):
            loss = 2 + 4 * math.exp(-step / size) + draw.gauss(0, 0.05)
            entry = {"step": step, "loss": loss, "grad_norm": math.exp(draw.gauss(-1, 0.2))}
            file.write(json.dumps(entry | {"lr": 1e-3}) + "\n")


def make_dumps(folder, size):
    """Write dumps of a hang that was recorded with 4 ranks as if of more: further ranks have the calls of a right one.

    As torch writes them, each dump lists the ranks of its group, so that all dumps together grow with the square.
    """
    import pickle

    from tests.simulator.autopsy.hangs import HANGS, record

    case = HANGS["fewer-batches"]
    record(case, folder / "recorded")
    dumps = [pickle.loads(path.read_bytes()) for path in sorted((folder / "recorded").iterdir())]
    (folder / "dumps").mkdir()
    right = next(rank for rank in range(len(dumps)) if rank not in case.ranks)
    for dump in dumps:
        for group in dump["pg_config"].values():
            group["ranks"] = str(list(range(size)))
    texts = [pickle.dumps(dump) for dump in dumps]
    for rank in range(size):
        text = texts[rank if rank < len(texts) else right]
        (folder / "dumps" / f"nccl_trace_rank_{rank}").write_bytes(text)


MAKE = {
    "compare checkpoints": make_checkpoints,
    "compare rollouts": make_rollouts,
    "runlog": make_log,
    "autopsy": make_dumps,
}


# ---- tools --------------------------------------------------------------------------------------------------


def train_step(rank):
    """Train a small model for one step under DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))).mean().backward()
    optimizer.step()
    return next(model.parameters()).sum().item()


def sum_gradients(rank):
    """Train the same model with one all-reduce of its gradients."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))).mean().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    for p, grad in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad.copy_(grad.view_as(p))
    optimizer.step()
    return next(model.parameters()).sum().item()


def simulate(ranks, step):
    from isobit.simulator import World

    return len(set(World(ranks).run(step).values)) == 1


def exchange(ranks):
    from functools import partial

    from benchmarks.levels import SHAPES, one_rank
    from isobit.simulator import World

    found = World(ranks).run(partial(one_rank, SHAPES[ranks][-1], [])).values
    return len({one["digest"] for one in found}) == 1


def tool_of(tool, folder, size):
    """Import the tool, and return what runs it."""
    if tool == "compare checkpoints":
        from isobit.comparing.checkpoints.compare import compare_checkpoints

        paths = [folder / f"{name}.safetensors" for name in "ab"]
        return lambda: compare_checkpoints(*paths, digests=False).equal
    if tool == "compare rollouts":
        from isobit.comparing.rollouts.comparing import compare

        paths = [folder / f"{name}.jsonl" for name in "ab"]
        return lambda: compare(*paths).exit_code in (0, 1)
    if tool == "runlog":
        from isobit.guards.run_log.readers import read_log
        from isobit.guards.run_log.rules import judge_log

        return lambda: judge_log(read_log(folder / "log.jsonl")).judged
    if tool == "autopsy":
        from isobit.simulator.autopsy.examine import examine

        return lambda: examine(folder / "dumps").finding.ranks == (1,)
    if tool.startswith("simulate"):
        step = train_step if "DDP" in tool else sum_gradients
        simulate(2, step)
        return lambda: simulate(size, step)
    exchange(8)
    return lambda: exchange(size)


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if key in line) / 1024


def measure(tool, folder, size):
    """Run a tool in this process and print CPU seconds, wall seconds, and by how many MB memory grew at its peak."""
    call = tool_of(tool, Path(folder), size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, cpu, began = resident("VmRSS"), time.process_time(), time.monotonic()
    assert call()
    cpu, began = time.process_time() - cpu, time.monotonic() - began
    print(json.dumps([round(cpu, 2), round(began, 2), round(resident("VmHWM") - before, 1)]))


def seconds_of_cmp(paths):
    before = os.times()
    subprocess.run(["cmp", *paths], check=True)
    after = os.times()
    return round(after.children_user + after.children_system - before[2] - before[3], 2)


def child(*words):
    """Run this module in a process of its own, whose memory is its own, and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.tools", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def rows_of(tool, sizes):
    """Yield size, CPU seconds, wall seconds, MB, and CPU seconds of `cmp` for checkpoints."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            if tool in MAKE:
                child("make", tool, folder, size)
            row = [size, *json.loads(child("measure", tool, folder, size))]
            if tool == "compare checkpoints":
                row.append(seconds_of_cmp(sorted(Path(folder).iterdir())))
        yield row


def slope(rows, column, first=-2):
    """Return the power with which a cost grows to the last size, from the size before it or from another row."""
    (a, *before), (b, *after) = rows[first], rows[-1]
    low, high = (max(each[column], 0.01) for each in (before, after))
    return math.log(high / low) / math.log(b / a)


def commit_of_now():
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


# ---- record and picture -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 150, 50, 66, 62
LOW, HIGH = -2, 4  # powers of ten of the vertical axis: seconds, and MB


def write(found):
    """Write the record and the picture of it."""
    from isobit.foundation.machine import fingerprint
    from isobit.order.plan import VERSION

    record = {
        "command": "python -m benchmarks.tools TOOL --write",
        "machine": dataclasses.asdict(fingerprint(VERSION)),
        "columns": ["size", "CPU seconds", "wall seconds", "MB of growth", "CPU seconds of cmp"],
        "tools": {tool: found[tool] for tool in TOOLS if tool in found},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PICTURE.write_text(draw(record))


def draw(record):
    """Return a panel per tool: CPU seconds in blue and MB in orange against size, both axes logarithmic."""
    from isobit.report.markup import Canvas

    canvas = Canvas()
    canvas.text(LEFT, 22, "What the tools cost against the size of their input", "title")
    machine = f"{record['machine']['cores']} cores shared with other work"
    canvas.text(LEFT, 40, f"blue: CPU seconds; orange: growth of memory in MB; {machine}", "quiet")
    for at, (tool, one) in enumerate(record["tools"].items()):
        place = LEFT + at % 2 * (WIDTH + 60), TOP + at // 2 * (HEIGHT + GAP) + 20
        canvas.place(draw_tool(Canvas(), tool, one), *place)
    rows = (len(record["tools"]) + 1) // 2
    return canvas.document(2 * WIDTH + LEFT + 84, TOP + rows * (HEIGHT + GAP), is_page=True)


def draw_tool(canvas, tool, one):
    rows = one["rows"]
    powers = f"powers {slope(rows, 0):.2f} and {slope(rows, 2):.2f}"
    canvas.text(0, -8, f"{tool} — {powers}")
    canvas.panel(0, 0, WIDTH, HEIGHT)
    ends = math.log10(rows[0][0]), math.log10(rows[-1][0])

    def across(size):
        return 16 + (math.log10(size) - ends[0]) / (ends[1] - ends[0]) * (WIDTH - 60)

    def height(value):
        return HEIGHT * (1 - (math.log10(max(value, 10.0**LOW)) - LOW) / (HIGH - LOW))

    for power in range(LOW, HIGH + 1, 2):
        canvas.line(0, height(10.0**power), WIDTH, height(10.0**power), "axis hair")
        canvas.text(-6, height(10.0**power) + 4, f"{10.0**power:g}", "quiet", "end")
    for row in rows:
        canvas.text(across(row[0]), HEIGHT + 15, f"{row[0]:,}", "quiet", "middle")
    canvas.text(WIDTH, HEIGHT + 29, one["unit"], "quiet", "end")
    for column, kind in ((1, "same"), (3, "differs")):
        points = [(across(row[0]), height(row[column])) for row in rows]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            canvas.line(x0, y0, x1, y1, kind)
        for (x, y), row in zip(points, rows, strict=True):
            canvas.dot(x, y, 3, kind, f"{row[0]:,} {one['unit']}: {row[column]:g}")
        canvas.text(points[-1][0] + 7, points[-1][1] + 4, f"{rows[-1][column]:g}", "quiet")
    return canvas


def tables(record):
    """Yield the lines of two tables in Markdown: how costs grow, and the costs themselves."""
    yield "| tool, at commit | decades of size | power of CPU time: last two sizes, all | of memory |"
    yield "| --- | --- | --- | --- |"
    for tool, one in record["tools"].items():
        rows = one["rows"]
        cpu, memory = ([slope(rows, column, first) for first in (-2, 0)] for column in (0, 2))
        yield (
            f"| {tool}, {one['commit']} | {math.log10(rows[-1][0] / rows[0][0]):.1f} | "
            f"{cpu[0]:.2f}, {cpu[1]:.2f} | {memory[0]:.2f}, {memory[1]:.2f} |"
        )
    yield ""
    yield "| tool | size | CPU s | wall s | growth of memory, MB |"
    yield "| --- | --- | --- | --- | --- |"
    for tool, one in record["tools"].items():
        for size, cpu, wall, memory, *beside in one["rows"]:
            more = f" (`cmp` {beside[0]:.2f})" if beside else ""
            yield f"| {tool} | {size:,} {one['unit']} | {cpu:.2f}{more} | {wall:.2f} | {memory:.1f} |"


def main():
    if sys.argv[1:] == ["--table"]:
        print("\n".join(tables(json.loads(RECORD.read_text()))))
        return
    words = [word for word in sys.argv[1:] if word != "--write"]
    if words[:1] in (["make"], ["measure"]):
        what, tool, folder, size = words
        (MAKE[tool] if what == "make" else lambda *rest: measure(tool, *rest))(
            Path(folder), int(size)
        )
        return
    found = json.loads(RECORD.read_text())["tools"] if RECORD.exists() else {}
    sizes = [int(word) for word in words if word.isdigit()]
    for tool in [word for word in words if not word.isdigit()] or TOOLS:
        rows, commit, date = [], commit_of_now(), datetime.date.today().isoformat()
        for row in rows_of(tool, sizes or TOOLS[tool][1]):
            rows.append(row)
            size, cpu, wall, memory, *beside = row
            more = f"; cmp {beside[0]:.2f} s CPU" if beside else ""
            print(
                f"{tool}, {size:,} {TOOLS[tool][0]}: {cpu:.2f} s CPU, {wall:.2f} s, {memory:+.0f} MB{more}",
                flush=True,
            )
        others = [
            row for row in found.get(tool, {}).get("rows", ()) if sizes and row[0] not in sizes
        ]
        if others and found[tool]["commit"].split()[0] != commit:
            commit = f"{found[tool]['commit'].split()[0]} to {commit}"
        rows = sorted(others + rows)
        powers = slope(rows, 0), slope(rows, 2)
        print(
            f"{tool}: grows with the power {powers[0]:.2f} in CPU time, {powers[1]:.2f} in memory"
        )
        found[tool] = {"commit": commit, "date": date, "unit": TOOLS[tool][0], "rows": rows}
    if "--write" in sys.argv:
        write(found)


if __name__ == "__main__":
    main()
