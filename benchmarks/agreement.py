"""The cost of rank_agreement on two gloo ranks: its share of a training step, and one flipped bit in 100 million."""

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit.guards import rank_agreement
from isobit.library.rank_agreement import flip_bit

RANKS, EVERY, ROUNDS = 2, 10, 3
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
BATCH = (8, 128)  # a rank's half of 16 samples
COUNT, PARAMETERS = 100_000_000, 10
PLACE, BIT = 87_654_321, 9


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, quick, dtypes), nprocs=RANKS)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    found = ranks[0]
    if not quick:
        table = Table(
            "dtype",
            "parameters",
            "step s",
            "check s",
            f"share of a step, every {EVERY}",
            "bytes sent",
            "each round",
        )
        for dtype, times in found["steps"].items():
            step, check = statistics.median(times["step"]), statistics.median(times["check"])
            each = " ".join(
                f"{c / s / EVERY:.2%}" for s, c in zip(times["step"], times["check"], strict=True)
            )
            share, count = f"{check / step / EVERY:.2%}", f"{times['elements']:,}"
            table.add_row(
                dtype, count, f"{step:.2f}", f"{check:.3f}", share, str(times["sent"]), each
            )
        console.print(table)
    console.print(
        f"{COUNT:,} fp32 parameters agree: {found['agree']:.2f} s, {found['agree sent']} bytes a rank"
    )
    console.print(
        f"one bit flipped, found: {found['found']}, in {found['search']:.2f} s, {found['sent']} bytes from rank 0"
    )
    wanted = f"rank 1, {PLACE // (COUNT // PARAMETERS)}, bits at [{PLACE % (COUNT // PARAMETERS)}]"
    return 0 if all(rank["found"].startswith(wanted) for rank in ranks) else 1


def work(rank, folder, quick, dtypes):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    found = search(rank)
    if not quick:
        found["steps"] = {dtype: steps(rank, getattr(torch, dtype)) for dtype in dtypes}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def search(rank):
    generator = torch.Generator().manual_seed(0)
    held = {
        str(i): torch.randn(COUNT // PARAMETERS, generator=generator) for i in range(PARAMETERS)
    }
    agreed, seconds = timed(lambda: rank_agreement(held))
    if rank == 1:
        flip_bit(held[str(PLACE // (COUNT // PARAMETERS))], PLACE % (COUNT // PARAMETERS), BIT)
    found, searching = timed(lambda: rank_agreement(held, on_difference="report"))
    (difference,) = found.differences
    return {
        "agree": seconds,
        "agree sent": agreed.sent,
        "search": searching,
        "sent": found.sent,
        "found": str(difference),
    }


def steps(rank, dtype):
    """Forward, backward, clipping and AdamW of an enabled model, in turn with a check of all its parameters."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, eos_token_id=None)).to(dtype)
    isobit.enable(model)
    model.train()
    optimizer = isobit.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, SIZES["vocab_size"], BATCH, generator=torch.Generator().manual_seed(1))

    def step():
        model(ids, labels=ids, use_cache=False).loss.backward()
        isobit.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times, last = {"step": [], "check": []}, None
    for turn in range(ROUNDS + 1):
        _, stepping = timed(step)
        last, checking = timed(partial(rank_agreement, model, since=last))
        assert last.kept, "the check must be of ranks that agree"
        if turn:
            times["step"].append(stepping)
            times["check"].append(checking)
    return {**times, "elements": last.elements, "sent": last.sent}


def timed(call):
    dist.barrier()
    started = time.perf_counter()
    found = call()
    return found, time.perf_counter() - started
