"""Peak memory of a training step, optimizer included, against stock's: each in a process of its own."""

import json
import subprocess
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

LAYERS, SAMPLES, TOKENS = 4, 4, 256

# The second step is measured: the first one makes the optimizer's state.
PROBE = """
import json, sys
import torch, isobit
from transformers import Qwen3Config, Qwen3ForCausalLM
from isobit.gates.model.models import MODELS

side, dtype, layers, samples, tokens = *sys.argv[1:3], *map(int, sys.argv[3:])
torch.manual_seed(0)
config = Qwen3Config(**MODELS["qwen3-0.6b"][1] | {"num_hidden_layers": layers})
model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, dtype)).train()
if side == "ours":
    isobit.enable(model)
    optimizer = isobit.optim.AdamW(model.parameters(), lr=1e-4)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
ids = torch.randint(0, config.vocab_size, (samples, tokens))

def step():
    optimizer.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()

def memory(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

step()
optimizer.zero_grad()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
before = memory("VmRSS")
step()
held = sum(p.nbytes for p in model.parameters())
print(json.dumps({"weights": held, "before": before, "peak": memory("VmHWM")}))
"""


def run(quick, threads, dtypes):
    """Print a table; the exit code is 1 where isobit's peak is above stock's."""
    console, is_over = Console(highlight=False, width=118), False
    table = Table(
        "dtype",
        "weights MiB",
        "stock: between steps",
        "peak",
        "isobit: between steps",
        "peak",
        "share",
    )
    for dtype in track(dtypes, "measuring", console=Console(stderr=True), transient=True):
        found = {}
        for side in ("stock", "ours"):
            words = [sys.executable, "-c", PROBE, side, dtype, LAYERS, SAMPLES, TOKENS]
            done = subprocess.run(
                [str(word) for word in words], stdout=subprocess.PIPE, text=True, check=True
            )
            found[side] = json.loads(done.stdout)
        stock, ours = found["stock"], found["ours"]
        is_over |= ours["peak"] > stock["peak"]
        numbers = (stock["weights"], stock["before"], stock["peak"], ours["before"], ours["peak"])
        table.add_row(
            dtype, *(f"{n / 2**20:,.0f}" for n in numbers), f"{ours['peak'] / stock['peak']:.2f}"
        )
    console.print(
        f"Qwen3-0.6B with {LAYERS} layers, {SAMPLES} × {TOKENS} tokens, AdamW; resident memory in MiB"
    )
    console.print(table)
    return int(is_over)
