"""Functions of rows and of elements against stock: forward, and forward + backward. r = stock time / our time.

Nothing is timed before its results and gradients have the bits of the portable executor. Contenders take turns, and a
short call is repeated within its turn. At the first shape a call costs what its dispatch costs. A ratio is of one
round; shown are the median and the quartiles of the rounds, of CPU time, to which other programs on the machine do not
add; medians of wall time are beside them.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional

import isobit
from benchmarks.adamw import alternate
from benchmarks.ratios import Ratio
from isobit import bits
from isobit.foundation.machine import thread_count

SHAPES = ((8, 128), (4096, 64), (1024, 1024))
WIDE = {"softmax": (8, 151936), "log_softmax": (8, 151936)}  # a vocabulary
EPS = 1e-6
TURN = 3e-4  # seconds, at least
WALL, CPU = 0, 1
definitions = torch.ops.isobit
# Per operator: ours, torch's, the definition, and its inputs: of the shape of x, or of a row.
OPERATORS = {
    "softmax": (
        isobit.softmax,
        lambda x: torch.softmax(x, -1),
        lambda x: definitions.portable_softmax(x),
        ("x",),
    ),
    "log_softmax": (
        isobit.log_softmax,
        lambda x: torch.log_softmax(x, -1),
        lambda x: definitions.portable_log_softmax(x),
        ("x",),
    ),
    "rms_norm": (
        lambda x, w: isobit.rms_norm(x, w, EPS),
        lambda x, w: functional.rms_norm(x, w.shape, w, EPS),
        lambda x, w: definitions.portable_rms_norm(x, w, EPS, None, False)[0],
        ("x", "row"),
    ),
    "layer_norm": (
        lambda x, w, b: isobit.layer_norm(x, w, b, EPS),
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: definitions.portable_layer_norm(x, w, b, EPS, None)[0],
        ("x", "row", "row"),
    ),
    "silu": (
        isobit.silu,
        functional.silu,
        lambda x: definitions.portable_silu(x),
        ("x",),
    ),
    "gelu": (
        isobit.gelu,
        functional.gelu,
        lambda x: definitions.portable_gelu(x, False),
        ("x",),
    ),
    "swiglu": (
        isobit.swiglu,
        lambda gate, up: functional.silu(gate) * up,
        lambda gate, up: definitions.portable_swiglu(gate, up),
        ("x", "x"),
    ),
}


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=180)
    columns = ("threads", "dtype", "operator", "rows × n", "stock µs")
    ratio_columns = ("forward", "quartiles", "fwd+bwd", "quartiles")
    table = Table(*columns, *ratio_columns, "wall: forward", "wall: fwd+bwd", "digest of y")
    ratios, compared = {}, 0
    cases = [
        (count, dtype, name, shape)
        for count in threads
        for dtype in dtypes
        for name in OPERATORS
        for shape in (*SHAPES, WIDE.get(name, (256, 4096)))
    ]
    for count, dtype, name, shape in track(
        cases, "timing", console=Console(stderr=True), transient=True
    ):
        given = draw(name, shape, getattr(torch, dtype))
        with thread_count(count):
            values = compare_with_definition(name, given)
            if values is None:
                console.print(f"{name}, {dtype}, {shape} differs from its definition: not timed")
                return 1
            compared += values
            found = time_case(name, given, 15 if quick else 41)
        ratios.setdefault(name, []).append(found["ratios"])
        forward, step, *wall = found["ratios"]
        cells = [f"{found['stock'] * 1e6:.0f}", *forward.cells(), *step.cells()]
        cells += [each.cells()[0] for each in wall]
        digest = bits.digest(OPERATORS[name][0](*given))[:8]
        table.add_row(str(count), dtype, name, f"{shape[0]} × {shape[1]}", *cells, digest)
    console.print(table)
    console.print(f"0 of {compared:,} values and gradients differ from the definition")
    summarise(console, ratios)
    return 0


def draw(name, shape, dtype):
    """Return the inputs of an operator, which require gradients."""
    torch.manual_seed(0)
    sizes = [shape if kind == "x" else shape[-1:] for kind in OPERATORS[name][3]]
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def compare_with_definition(name, given):
    """Return how many values were compared; None if one differs."""
    ours, _, definition, _ = OPERATORS[name]
    grad = torch.randn(given[0].shape).to(given[0].dtype)
    found, expected = (
        (y.detach(), *torch.autograd.grad(y, given, grad))
        for y in (ours(*given), definition(*given))
    )
    if not all(map(bits.equal, found, expected)):
        return None
    return sum(value.numel() for value in found)


def time_case(name, given, rounds):
    """Return stock's seconds of a forward, and ratios of CPU and of wall time: forward, forward + backward."""
    ours, stock, _, _ = OPERATORS[name]
    grad = torch.randn(given[0].shape).to(given[0].dtype)

    def forward(function):
        with torch.inference_mode():
            function(*given)

    def step(function):
        torch.autograd.grad(function(*given), given, grad)

    timed = {}
    for what in (forward, step):
        calls = repeats(lambda what=what: what(stock))
        contenders = {
            who: lambda what=what, f=function, calls=calls: [what(f) for _ in range(calls)]
            for who, function in (("ours", ours), ("stock", stock))
        }
        for who, turns in alternate(contenders, rounds).items():
            for clock in (WALL, CPU):
                timed[what.__name__, who, clock] = [turn[clock] / calls for turn in turns]
    found = [
        Ratio.of(timed[what, "stock", clock], timed[what, "ours", clock])
        for clock in (CPU, WALL)
        for what in ("forward", "step")
    ]
    return {"stock": statistics.median(timed["forward", "stock", CPU]), "ratios": found}


def repeats(call):
    """Return how many calls fill a turn."""
    call()
    start = time.perf_counter()
    call()
    return max(1, round(TURN / (time.perf_counter() - start)))


def summarise(console, ratios):
    """Print, per operator and for all, the geometric mean and the least ratio."""
    columns = ("operator", "forward", "quartiles", "least", "fwd+bwd", "quartiles", "least")
    table = Table(*columns, "wall: forward", "wall: fwd+bwd")
    whole = {"all": [values for each in ratios.values() for values in each]}
    for name, values in (ratios | whole).items():
        *cpu, wall, wall_step = zip(*values, strict=True)
        cells = []
        for column in cpu:
            cells += [*Ratio.mean(column).cells(), f"{min(each.median for each in column):.2f}"]
        table.add_row(name, *cells, *(Ratio.mean(each).cells()[0] for each in (wall, wall_step)))
    console.print(table)
