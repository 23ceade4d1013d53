"""The cost of `isobit.guards.watch` at its default settings, against the same loop without it, step by step in turn.

Steps of a watch differ: every 4th reads all gradients, every 100th also the weights, the others a sample. So each kind
is timed, and the cost is their mean over 100 steps. Two measures: whole steps, in CPU and wall time (ratios of
neighbours, with the noise of the machine), and the CPU time inside of the watch's own hooks, which is exact but misses
what hooks cost torch. Rounds in which the unguarded loop itself moves are repeated.
"""

import os
import statistics
import time
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import isobit.guards.live.blocks as block_samples
import isobit.guards.live.watching as watching
from isobit.gates.training.workload import WORKLOADS, draw_samples, lay_out, make_model
from isobit.guards import watch
from isobit.guards.live.watching import Watch
from isobit.guards.sinks import JsonLines

HOOKS = ("before_forward", "after_forward", "before_backward", "before_step", "after_step")
LIMIT = 0.01  # of a step of the large model
MOVES = 0.15  # a machine on which the unguarded loop moves more than this measures nothing
KINDS = {"a sample": 75, "all gradients": 24, "gradients and weights": 1}  # of 100 steps


class TimedWatch(Watch):
    """A watch that measures the CPU time of its hooks, for one step; those on blocks too."""

    spent = 0.0

    def __init__(self, *args):
        super().__init__(*args)
        read = self.course.read

        def timed_read(*given):
            began = time.process_time()
            read(*given)
            self.spent += time.process_time() - began

        self.course.read = timed_read


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
    # A single batch would be learned by heart: its gradients vanish, then jump, and a watch says so.
    x, y = torch.randn(256, 32, 64), torch.randn(256, 32, 1)

    def take(step):
        optimizer.zero_grad()
        (model(x[step % 256]) - y[step % 256]).square().mean().backward()
        optimizer.step()

    return model, optimizer, take


def blocks_cost(steps):
    """Return what `blocks=True` adds: the share of CPU time inside of its hooks and its judgement, and a step's time.

    The model is small: eight transformer layers of width 256, 512 tokens per step.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    guard = watch(model, optimizer, blocks=True, sinks=[JsonLines(os.devnull)])
    spent = 0.0

    def timed_call(function):
        def run(*args):
            nonlocal spent
            began = time.process_time()
            try:
                return function(*args)
            finally:
                spent += time.process_time() - began

        return run

    for part, name in ((guard.samples, "start"), (guard.samples, "read"), (guard, "check_blocks")):
        setattr(part, name, timed_call(getattr(part, name)))
    whole = 0.0
    with patch.object(block_samples, "keep_sample", timed_call(block_samples.keep_sample)):
        for step in range(steps):
            x = torch.randn(8, 64, 256)
            began = time.process_time()
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            if step >= 2:  # the first two are sampled too
                whole += time.process_time() - began
            else:
                spent = 0.0
    guard.close()
    return spent / whole, whole / (steps - 2)


def measure(make, pairs, rounds, at_step):
    """Take steps in turn without and with a watch, in rounds; return the rounds that are quiet, and how many are not.

    A round is not quiet if the unguarded loop itself is slower or faster by more than MOVES in one half of it than in
    the other. It is then repeated, up to as many times as there are rounds.
    """
    plain, watched = make(), make()
    with patch.object(watching, "Watch", TimedWatch):
        guard = watch(watched[0], watched[1], sinks=[JsonLines(os.devnull)])
    for at in range(3):  # the first steps allocate the optimizer's state, and read everything
        plain[2](at)
        watched[2](at)
    quiet, moved, at = [], [], 3
    while len(quiet) < rounds and len(moved) < rounds:
        guard.steps, guard.step, found = guard.options.patience, at_step, []
        for _ in range(pairs):
            found.append(take_pair(plain[2], watched[2], guard, at))
            at += 1
        (quiet if movement(found) <= MOVES else moved).append(found)
    assert not guard.findings, guard.findings
    guard.close()
    return quiet or moved, len(moved), sum(p.numel() for p in watched[0].parameters())


def take_pair(plain, watched, guard, at):
    """Take one step of each loop, in an order that alternates; return their times."""
    row = {"kind": kind_of(guard.step)}
    sides = {"plain": plain, "watched": watched}
    for side in sides if at % 2 else reversed(sides):
        guard.spent = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        sides[side](at)
        row[side] = time.process_time() - cpu
        row[side + " wall"] = time.perf_counter() - wall
        if side == "watched":
            row["hooks"] = guard.spent
    return row


def movement(found):
    """Return by which share the median of the unguarded steps differs between the halves of a round, by wall time."""
    walls = [row["plain wall"] for row in found]
    one, two = (
        statistics.median(half) for half in (walls[: len(walls) // 2], walls[len(walls) // 2 :])
    )
    return abs(one - two) / min(one, two)


def whole_steps(found, clock):
    """Return by how many percent a watched step is slower, as a mean over 100 steps, from the median of each kind."""
    share = 0.0
    for kind, weight in KINDS.items():
        rows = [row for row in found if row["kind"] == kind]
        ratio = statistics.median(row["watched" + clock] / row["plain" + clock] for row in rows)
        share += weight * (ratio - 1)
    return share


def run(quick, threads, dtypes):
    """Print a table. The exit code is 1 if no round was quiet, or the large model costs more than LIMIT."""
    torch.set_num_threads(1)
    console = Console(width=300, highlight=False)
    table = Table(
        "model", "parameters", "step reads", "steps", "ms without", "ms inside", "inside %"
    )
    lines, is_wrong = [], False
    for name, make, pairs, rounds, at_step in (
        ("curve", curve_step, 10, 1 if quick else 3, 94),
        ("tiny", tiny_step, 200, 2 if quick else 20, 50),
    ):
        kept, moved, size = measure(make, pairs, rounds, at_step)
        found = [row for each in kept for row in each]
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
        is_quiet = moved < rounds
        is_wrong |= not is_quiet or (name == "curve" and mean / without > LIMIT)
        lines.append(
            f"{name}: {100 * mean / without:.2f} % of a step's CPU time inside the watch, mean of 100 steps; whole "
            f"steps: {whole_steps(found, ''):+.1f} % CPU time, {whole_steps(found, ' wall'):+.1f} % wall; {len(kept)} "
            f"rounds of {pairs} pairs, {moved} repeated, unguarded steps moved by up to "
            f"{100 * max(map(movement, kept)):.0f} %{'' if is_quiet else ': NOT QUIET, no result'}"
        )
    share, each = blocks_cost(42 if quick else 202)
    is_wrong |= share > LIMIT
    lines.append(
        f"blocks=True: {100 * share:.2f} % of a step's CPU time inside the samples of 8 blocks, every 20th step of "
        f"{1e3 * each:.1f} ms"
    )
    console.print(table)
    for line in lines:
        console.print(line)
    return int(is_wrong)
