"""Log-probabilities from hidden states against stock's logits: time, and the peak of memory beside the inputs."""

import json
import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.linear import is_green
from benchmarks.ratios import ROUNDS, Ratio

TOKENS, WIDTH, VOCABULARY = 2048, 1024, 151936

# One contender in a process of its own: the peak of resident memory is the process's.
PROBE = """
import json, sys, time
import torch, isobit
side, dtype, what, threads, tokens, width, words = sys.argv[1:4] + [int(a) for a in sys.argv[4:]]
torch.set_num_threads(threads)
torch.manual_seed(0)
hidden = torch.randn(tokens, width).to(getattr(torch, dtype)).requires_grad_()
weight = (torch.randn(words, width) * 0.02).to(getattr(torch, dtype)).requires_grad_()
targets = torch.randint(0, words, (tokens,))

def stock(hidden, targets):
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]

def ours(hidden, targets):
    return isobit.linear_logprob(hidden, weight, targets)

def memory(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

run = {"stock": stock, "ours": ours}[side]
with torch.set_grad_enabled(what == "step"):
    run(hidden[:8], targets[:8])  # loads, attests
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
before = memory("VmRSS")
started = time.perf_counter()
with torch.set_grad_enabled(what == "step"):
    found = run(hidden, targets)
    if what == "step":
        found.sum().backward()
taken = time.perf_counter() - started
results = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
peak = memory("VmHWM") - results
print(json.dumps({"seconds": taken, "extra": peak - before}))
"""


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    if not is_green(console, "logprob"):
        return 1
    columns = ("threads", "dtype", "what", "stock s", "ours s", "ratio", "quartiles")
    table = Table(*columns, "stock MiB", "ours MiB", "share")
    cases = [(t, d, what) for t in threads for d in dtypes for what in ("forward", "step")]
    for count, dtype, what in track(cases, "timing", console=Console(stderr=True), transient=True):
        found = {"stock": [], "ours": []}
        for _ in range(ROUNDS if quick else 2 * ROUNDS):
            for side in found:
                words = [
                    sys.executable,
                    "-c",
                    PROBE,
                    side,
                    dtype,
                    what,
                    count,
                    TOKENS,
                    WIDTH,
                    VOCABULARY,
                ]
                done = subprocess.run(
                    [str(w) for w in words], capture_output=True, text=True, check=True
                )
                found[side].append(json.loads(done.stdout))
        seconds, extra = (
            {side: statistics.median(f[key] for f in found[side]) for side in found}
            for key in ("seconds", "extra")
        )
        table.add_row(
            str(count),
            dtype,
            what,
            *(f"{seconds[side]:.2f}" for side in found),
            *Ratio.of(*([f["seconds"] for f in found[side]] for side in ("stock", "ours"))).cells(),
            *(f"{extra[side] / 2**20:,.0f}" for side in found),
            f"{extra['ours'] / extra['stock']:.3f}",
        )
    console.print(
        f"{TOKENS} tokens, hidden {WIDTH}, vocabulary {VOCABULARY:,}; memory beside inputs and results"
    )
    console.print(table)
    return 0
