"""A whole model against stock: prefill, decode and a training step of Qwen3-0.6B; ratios are stock time / our time."""

import copy
import statistics
import time
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

import isobit
from benchmarks.ratios import ROUNDS, Ratio
from isobit.foundation.machine import thread_count
from isobit.gates.model.batch_layout_gate import run_gate
from isobit.gates.model.batch_layouts import IsobitScorer, draw_samples
from isobit.gates.model.models import build_model

PREFILL, BATCH, CONTEXT, DECODED, TRAINED = 512, 8, 64, 8, (2, 128)


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    if not is_green(console):
        return 1
    table = Table("threads", "dtype", "case", "stock s", "ours s", "ratio", "quartiles")
    rounds = ROUNDS if quick else 2 * ROUNDS
    with Progress(console=Console(stderr=True, width=118), transient=True) as progress:
        bar = progress.add_task(
            "timing", total=len(threads) * len(dtypes) * len(CASES) * (rounds + 1)
        )
        for count in threads:
            for dtype in dtypes:
                stock = build_model("qwen3-0.6b", getattr(torch, dtype))
                for parameter in stock.parameters():  # freeze takes no weights that a file maps
                    parameter.data = parameter.data.clone()
                # A second model over the very same parameters.
                ours = copy.deepcopy(stock, {id(p): p for p in stock.parameters()})
                isobit.enable(ours)
                stock.is_ours, ours.is_ours = False, True
                for name, case in CASES.items():
                    with thread_count(count):
                        times = take_turns(
                            {"stock": stock, "ours": ours},
                            case,
                            rounds,
                            lambda: progress.advance(bar),
                        )
                    middle = {side: statistics.median(found) for side, found in times.items()}
                    cells = [f"{middle[side]:.3f}" for side in ("stock", "ours")]
                    ratio = Ratio.of(times["stock"], times["ours"])
                    row = (str(count), dtype, name, *cells, *ratio.cells())
                    table.add_row(*row)
                    progress.console.print(
                        "  ".join(row), highlight=False
                    )  # minutes pass between two rows
    console.print(table)
    return 0


def is_green(console):
    """Times nothing that does not pass the gate: a tiny model of the same family goes through it first."""
    model = build_model("qwen3-tiny", torch.float32)
    with isobit.enabled(model):
        report = run_gate(IsobitScorer(model), draw_samples(model.config.vocab_size))
    differ, numbers = (
        sum(row.differ for row in report.rows),
        sum(row.numbers for row in report.rows),
    )
    console.print(f"gate: {differ} of {numbers:,} differ")
    return report.kept


def take_turns(models, case, rounds, advance):
    """Seconds of each model, interleaved; the first round warms up, and is where strict mode watches."""
    times = {side: [] for side in models}
    for turn in range(rounds + 1):
        for side, model in models.items():
            taken = case(model)
            if turn:
                times[side].append(taken)
        advance()
    return times


@torch.no_grad()
def prefill(model):
    ids = draw(1, PREFILL)
    model.eval()
    started = time.perf_counter()
    model(ids, logits_to_keep=1)
    return time.perf_counter() - started


@torch.no_grad()
def decode(model):
    ids, cache = draw(BATCH, CONTEXT), DynamicCache(config=model.config)
    model.eval()
    model(ids, past_key_values=cache, logits_to_keep=1)
    started = time.perf_counter()
    for t in range(DECODED):
        model(ids[:, t : t + 1], past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - started


def decode_frozen(model):
    """Decode with weights that `isobit.freeze` packed; stock packs at every call."""
    with isobit.freeze(model) if model.is_ours else nullcontext():
        return decode(model)


def train(model):
    ids = draw(*TRAINED)
    model.train()
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    taken = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return taken


def draw(*shape):
    return torch.randint(0, 151936, shape, generator=torch.Generator().manual_seed(0))


CASES = {
    f"prefill of {PREFILL} tokens": prefill,
    f"decode, batch {BATCH}, {DECODED} steps after {CONTEXT} tokens": decode,
    "the same, weights frozen": decode_frozen,
    f"training step, {TRAINED[0]} × {TRAINED[1]} tokens": train,
}
