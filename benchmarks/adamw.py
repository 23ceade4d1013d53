"""AdamW's step, alone and after clipping, against torch's fused and foreach forms: stock time / our time.

Parameters are those of Qwen3-0.6B with fewer layers and a smaller vocabulary, so that they fit beside three optimizers
and are far larger than a cache. Nothing is timed before our step has the bits of the definition. A step moves 7
elements per parameter: it reads four and writes three. The bandwidth beside it is that of torch's `mul_`, which reads
one and writes one.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ratios import Ratio
from isobit import bits
from isobit.foundation.machine import thread_count
from isobit.ops.adamw import portable
from isobit.optim import AdamW, get_total_norm

HIDDEN, HEADS, FEEDFORWARD, HEAD_SIZE = 1024, 2048, 3072, 128
MOVED = 7  # elements per parameter
OPTIONS = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def shapes(layers, vocabulary):
    layer = [
        (HEADS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HEADS),
        (FEEDFORWARD, HIDDEN), (FEEDFORWARD, HIDDEN), (HIDDEN, FEEDFORWARD),
        (HIDDEN,), (HIDDEN,), (HEAD_SIZE,), (HEAD_SIZE,),
    ]  # fmt: skip
    return [(vocabulary, HIDDEN), (HIDDEN,), *layer * layers]


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=200)
    given = shapes(*((1, 4096) if quick else (2, 8192)))
    count = sum(torch.Size(shape).numel() for shape in given)
    columns = ("threads", "dtype", "what", "fused ms", "foreach ms", "ours ms", "fused / ours")
    more = (
        "quartiles",
        "foreach / ours",
        "quartiles",
        "fused spread",
        "ours GB/s",
        "mul_ GB/s",
        "CPU s: fused",
        "CPU s: ours",
    )
    table, ratios = Table(*columns, *more), {}
    for dtype in dtypes:
        parameters = draw(given, getattr(torch, dtype))
        compared = compare_with_definition(parameters)
        if compared is None:
            console.print(f"{dtype}: the step differs from its definition, so it is not timed")
            return 1
        console.print(f"{dtype}: 0 of {compared:,} values differ from the definition")
        for number in threads:
            with thread_count(number):
                for what, found in time_all(parameters, 9 if quick else 15).items():
                    ratios.setdefault((dtype, what), []).append(
                        add_row(table, number, dtype, what, found)
                    )
    console.print(table)
    console.print(f"{len(given)} parameters with {count:,} elements; medians of alternating rounds")
    for (dtype, what), values in ratios.items():
        wall, cpu = zip(*values, strict=True)
        told = " and of CPU time ".join(
            "{} ({}), least {:.2f}".format(*Ratio.mean(each).cells(), min(r.median for r in each))
            for each in (wall, cpu)
        )
        console.print(f"{dtype}, {what}: fused / ours {told}", soft_wrap=True)
    return 0


def draw(given, dtype):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in given]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


def compare_with_definition(parameters):
    """Return how many values of two steps were compared; None if one differs."""
    compared = 0
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = AdamW(copies, **OPTIONS)
    known = [(p.detach(), torch.zeros_like(p), torch.zeros_like(p)) for p in copies]
    for copy, p in zip(copies, parameters, strict=True):
        copy.grad = p.grad
    known = [tuple(t.clone() for t in each) for each in known]
    numbers = [portable.numbers_of(*OPTIONS.values(), step) for step in (1.0, 2.0)]
    for each in numbers:
        optimizer.step()
        known = [
            portable.adamw(p, copy.grad, first, second, each)
            for (p, first, second), copy in zip(known, copies, strict=True)
        ]
    for copy, expected in zip(copies, known, strict=True):
        state = optimizer.state[copy]
        found = (copy.detach(), state["exp_avg"], state["exp_avg_sq"])
        if not all(map(bits.equal, found, expected)):
            return None
        compared += 3 * copy.numel()
    return compared


def time_all(parameters, rounds):
    """Return, by what is timed, the seconds of each contender, wall and CPU, and the bytes that a step moves."""
    ours = AdamW(parameters, **OPTIONS)
    stock = {
        form: torch.optim.AdamW(parameters, **OPTIONS, **{form: True})
        for form in ("fused", "foreach")
    }
    steps = {"ours": ours.step, **{form: optimizer.step for form, optimizer in stock.items()}}

    def clip_and_step(name, limit):
        """Return the norm before a step that is clipped to a limit."""
        if name == "ours":
            return ours.clip_and_step(limit)
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        steps[name]()
        return norm

    def with_clipping(name, share, limit):
        """Clip to a share of the norm, which torch's contenders lower, or to more than it."""

        def call():
            limit[0] = share * min(float(clip_and_step(name, limit[0])), limit[0])

        return call

    whole = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype).fill_(1.0)
    steps["mul_"] = lambda: whole.mul_(1.0)
    size = whole.numel() * whole.element_size()
    found = {"step": alternate(steps, rounds)}
    del steps["mul_"]
    for what, share in (("clip + step", 0.9), ("norm + step", 2.0)):
        limit = [share * float(get_total_norm([p.grad for p in parameters]))]
        calls = {name: with_clipping(name, share, limit) for name in steps}
        found[what] = alternate(calls, rounds)
    found["step"]["bytes"] = size
    return found


def alternate(contenders, rounds):
    """Return lists of (wall, CPU) seconds; every round times each once, and the order rotates."""
    times = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    for turn in range(rounds):
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def add_row(table, number, dtype, what, found):
    """Add a row; return the ratios fused / ours of wall and of CPU time."""
    size = found.pop("bytes", None)
    wall = {name: statistics.median(w for w, _ in each) for name, each in found.items()}
    cpu = {name: statistics.median(c for _, c in each) for name, each in found.items()}
    fused = sorted(w for w, _ in found["fused"])
    quarter = len(fused) // 4
    of_wall, of_cpu, foreach = (
        Ratio.of(*([times[clock] for times in found[name]] for name in (stock, "ours")))
        for clock, stock in ((0, "fused"), (1, "fused"), (0, "foreach"))
    )
    rates = ["", ""]
    if size:
        rates = [f"{MOVED * size / wall['ours'] / 1e9:.1f}", f"{2 * size / wall['mul_'] / 1e9:.1f}"]
    table.add_row(
        *(str(number), dtype, what),
        *(f"{wall[name] * 1e3:.1f}" for name in ("fused", "foreach", "ours")),
        *of_wall.cells(),
        *foreach.cells(),
        f"{fused[-1 - quarter] / fused[quarter] - 1:.0%}",
        *rates,
        *(f"{cpu[name]:.3f}" for name in ("fused", "ours")),
    )
    return of_wall, of_cpu
