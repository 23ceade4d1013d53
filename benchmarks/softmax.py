"""Softmax against stock: forward, and forward + backward. r = stock time / our time; contenders take turns."""

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import isobit
from benchmarks.linear import geomean, is_green, take_turns
from isobit import bits
from isobit.machine import thread_count

SHAPES = ((4096, 64), (1024, 1024), (64, 4096), (1, 151936), (64, 151936))


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    if not is_green(console, "softmax"):
        return 1
    table = Table("threads", "dtype", "rows × n", "stock ms", "forward", "fwd+bwd", "digest of y")
    ratios = {"forward": [], "step": []}
    cases = [(count, dtype, shape) for count in threads for dtype in dtypes for shape in SHAPES]
    for count, dtype, shape in track(cases, "timing", console=Console(stderr=True), transient=True):
        with thread_count(count):
            torch.manual_seed(0)
            x = torch.randn(shape).to(getattr(torch, dtype))
            rounds = 15 if quick else 41
            with torch.inference_mode():
                times = take_turns(
                    {
                        "ours": lambda x=x: isobit.softmax(x),
                        "stock": lambda x=x: torch.softmax(x, -1),
                    },
                    rounds,
                )
            steps = take_turns(
                {"ours": step(isobit.softmax, x), "stock": step(lambda t: torch.softmax(t, -1), x)},
                rounds,
            )
        found = times["stock"] / times["ours"], steps["stock"] / steps["ours"]
        for name, ratio in zip(ratios, found, strict=True):
            ratios[name].append(ratio)
        cells = [
            f"{times['stock'] * 1e3:.3f}",
            *(f"{ratio:.2f}" for ratio in found),
            bits.digest(isobit.softmax(x))[:8],
        ]
        table.add_row(str(count), dtype, f"{shape[0]} × {shape[1]}", *cells)
    console.print(table)
    for name, values in ratios.items():
        console.print(
            f"{name}: geomean {geomean(values):.3f} min {min(values):.2f} max {max(values):.2f}"
        )
    return 0


def step(function, x):
    """Forward and backward."""
    x = x.clone().requires_grad_()
    grad = torch.ones_like(x)
    return lambda: torch.autograd.grad(function(x), x, grad)
