"""What the check of modules, forwards and hooks costs, which every call of an enabled model makes: share of a step."""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import isobit
from benchmarks.model import CONTEXT, draw, is_green
from isobit.foundation.machine import flushes_subnormals, thread_count
from isobit.gates.model.models import build_model
from isobit.integrations.transformers.state import require_state

LIMIT = 0.005  # of a decode step


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    if not is_green(console):
        return 1
    table = Table(
        "threads",
        "dtype",
        "batch",
        "modules",
        "check µs of CPU",
        "step ms of CPU",
        "share",
        "each round %",
    )
    kept = True
    for dtype in dtypes:
        model = build_model("qwen3-0.6b", getattr(torch, dtype))
        isobit.enable(model)
        for count in threads:
            for batch in (1, 8):
                with thread_count(count):
                    rounds = [measure(model, batch) for _ in range(4 if quick else 8)][1:]
                shares = [check / step for check, step in rounds]
                share = statistics.median(shares)
                kept &= share <= LIMIT
                check, step = (statistics.median(found) for found in zip(*rounds, strict=True))
                each = " ".join(f"{100 * found:.2f}" for found in shares)
                cells = [f"{check * 1e6:.0f}", f"{step * 1e3:.1f}", f"{100 * share:.2f} %", each]
                table.add_row(
                    str(count), dtype, str(batch), str(len(list(model.modules()))), *cells
                )
        del model
    console.print(table)
    console.print(f"share of a decode step at most {100 * LIMIT} %: {'kept' if kept else 'missed'}")
    return 0 if kept else 1


@torch.no_grad()
def measure(model, batch):
    """CPU seconds of one check, and of one decode step by thread: taken in turn."""
    state, cache = require_state(model), DynamicCache(config=model.config)
    ids = draw(batch, CONTEXT)
    model(ids, past_key_values=cache, logits_to_keep=1)
    checks, steps = [], []
    for place in range(4):
        steps.append(
            seconds(
                lambda at=place: model(ids[:, at : at + 1], past_key_values=cache, logits_to_keep=1)
            )
        )
        checks.append(
            seconds(lambda: check(state))
        )  # right after a step, with caches as cold as they are in one
    return statistics.median(checks), statistics.median(steps) / torch.get_num_threads()


def check(state):
    """As causal.run_checked does before a call."""
    return flushes_subnormals() or state.structure.check(strict=True, calls_head=True)


def seconds(call):
    """Of this process, over all its threads: other programs on the machine do not count."""
    started = time.process_time()
    call()
    return time.process_time() - started
