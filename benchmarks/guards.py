"""The cost of `isobit.guards.watch` at its default settings, against the same loop without it, step by step in turn.

Steps of a watch differ: every 4th reads all gradients, every 100th also the weights, the others a sample. So each kind
is timed, and the cost is their mean over 100 steps. Two clocks: the CPU time of whole steps (medians, with the noise of
the machine), and the CPU time inside of the watch's own hooks, which is exact but misses what hooks cost torch.
"""

import statistics
import time
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import isobit.guards.watching as watching
from isobit.gates.training.workload import WORKLOADS, draw_samples, lay_out, make_model
from isobit.guards import watch
from isobit.guards.watch_hooks import Watch

HOOKS = ("before_forward", "after_forward", "before_backward", "before_step", "after_step")
KINDS = {"a sample": 75, "all gradients": 24, "gradients and weights": 1}  # of 100 steps


class TimedWatch(Watch):
    """A watch that measures the CPU time of its hooks, for one step."""

    spent = 0.0


def timed(name):
    """Return a hook that adds its CPU time."""
    hook = getattr(Watch, name)

    def run(self, *args):
        began = time.process_time()
        try:
            return hook(self, *args)
        finally:
            self.spent += time.process_time() - began

    return run


for hook_name in HOOKS:
    setattr(TimedWatch, hook_name, timed(hook_name))


def kind_of(step):
    if step % 100 == 0:
        return "gradients and weights"
    return "all gradients" if step % 4 == 0 else "a sample"


def curve_step():
    """The 80-million-parameter model of the rank-layout gate, one step as its stock run takes it."""
    workload = WORKLOADS["whole"]
    model = make_model(workload, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.rate)

    def take(step):
        rows = lay_out(draw_samples(workload, step))
        optimizer.zero_grad()
        model(input_ids=rows.ids, attention_mask=rows.mask, labels=rows.targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()

    return model, optimizer, take


def tiny_step():
    """Three layers of 64: a step of a fraction of a millisecond, where every call of Python counts."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU()] * 2
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64)

    def take(step):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, take


def measure(make, steps, before):
    """Take steps in turn without and with a watch; return times by side and kind of step."""
    plain, watched = make(), make()
    with patch.object(watching, "Watch", TimedWatch):
        guard = watch(watched[0], watched[1], sinks=[])
    # Past the first steps, in which a watch reads everything; step 100 follows soon.
    guard.steps, guard.step = guard.options.patience, 100 - before
    found = []
    for at in range(steps):
        kind = kind_of(guard.step)
        row = {"kind": kind}
        for side in ("plain", "watched") if at % 2 else ("watched", "plain"):
            guard.spent = 0.0
            wall, cpu = time.perf_counter(), time.process_time()
            (plain if side == "plain" else watched)[2](at)
            row[side] = time.process_time() - cpu
            row[side + " wall"] = time.perf_counter() - wall
            if side == "watched":
                row["hooks"] = guard.spent
        found.append(row)
    assert not guard.findings, guard.findings
    guard.close()
    return found, sum(p.numel() for p in watched[0].parameters())


def run(quick, threads, dtypes):
    """Print a table per model."""
    torch.set_num_threads(1)
    console = Console(width=150, highlight=False)
    table = Table(
        "model", "parameters", "step reads", "steps", "ms without", "ms inside", "inside %"
    )
    lines = []
    for name, make, steps, before in (
        ("curve", curve_step, 9 if quick else 28, 4 if quick else 7),
        ("tiny", tiny_step, 800 if quick else 8000, 50),
    ):
        found, size = measure(make, steps, before)
        found = found[3:]  # the first allocate the optimizer's state
        without = statistics.median(row["plain"] for row in found)
        mean = 0.0
        for kind, weight in KINDS.items():
            inside = [row["hooks"] for row in found if row["kind"] == kind]
            each = statistics.median(inside)
            mean += weight * each / 100
            table.add_row(
                name,
                f"{size:,}",
                kind,
                str(len(inside)),
                f"{1e3 * without:.3f}",
                f"{1e3 * each:.3f}",
                f"{100 * each / without:.2f}",
            )
        common = [row for row in found if row["kind"] == "a sample"]
        ratios = [
            statistics.median(row["watched" + clock] for row in common)
            / statistics.median(row["plain" + clock] for row in common)
            for clock in ("", " wall")
        ]
        lines.append(
            f"{name}: {100 * mean / without:.2f} % of a step inside the watch, mean of 100 steps; whole steps that "
            f"read a sample: {100 * (ratios[0] - 1):+.1f} % CPU time, {100 * (ratios[1] - 1):+.1f} % wall, medians of "
            f"{len(common)}"
        )
    console.print(table)
    for line in lines:
        console.print(line)
    return 0
