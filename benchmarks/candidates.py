"""Kernels that people use, judged as `isobit check` judges: stock PyTorch, transformers, torch.compile, isobit.

A fused kernel that is compiled for the CPU is another kernel for another number of rows, so torch.compile is judged
with dynamic shapes, as it is used.
"""

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isobit.cli.check import chosen
from isobit.cli.options.check import LIKE
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.options import Options

CLAIMS = ("rows", "rows-of-the-gradient", "storage", "accuracy", "gradients", "decode-is-prefill")
COMPILED = ("silu", "softmax", "rms_norm")


def transformers_rms_norm(x, weight):
    norm = LlamaRMSNorm(x.shape[-1], eps=1e-6)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


compiled_silu = torch.compile(F.silu, dynamic=True)
compiled_softmax = torch.compile(lambda x: torch.softmax(x, -1), dynamic=True)
compiled_rms_norm = torch.compile(transformers_rms_norm, dynamic=True)


def candidates(quick):
    """Yield (who, what it is like, subject)."""
    for like in sorted(LIKE):
        yield "isobit", like, ""
        yield "PyTorch", like, "stock"
    yield "transformers' LlamaRMSNorm", "rms_norm", "benchmarks.candidates:transformers_rms_norm"
    for like in () if quick else COMPILED:
        yield "torch.compile", like, f"benchmarks.candidates:compiled_{like}"


def cell(record):
    """Return a verdict in a word, or how many elements differ."""
    if record is None:
        return ""
    if record.verdict == "broken":
        return f"{record.differing:,} of {record.compared:,}"
    return record.verdict


def run(quick, threads, dtypes):
    """Print a row per kernel; return 1 if isobit breaks a claim, or nothing was judged."""
    console = Console(highlight=False, width=200)
    table = Table("operator", "kernel", *(c.replace("-", " ") for c in CLAIMS), "caught")
    kept, count, wrong, examples = 0, 0, 0, []
    for who, like, subject in candidates(quick):
        options = Options(trusted=("benchmarks", "torch"), subject=subject, level=2)
        found = {
            r.claim.replace("samples", "rows"): r
            for r in verify_contract(chosen(like, None), options)
        }
        planted = [p for r in found.values() for p in r.planted]
        caught = f"{sum(p.caught for p in planted)} of {len(planted)}"
        table.add_row(like, who, *(cell(found.get(claim)) for claim in CLAIMS), caught)
        kept += all(r.verdict == "kept" for r in found.values())
        wrong += who == "isobit" and any(r.verdict != "kept" for r in found.values())
        count += 1
        for record in found.values():
            if record.verdict == "broken" and who != "isobit":
                examples.append(f"{who}, {like}, {record.claim}: {record.detail}")
    console.print(table)
    console.print(f"{kept} of {count} kernels keep every claim; isobit's that do not: {wrong}")
    console.print("The smallest counter-example of each broken claim:")
    for example in examples:
        console.print(example, soft_wrap=True, markup=False)
    return int(bool(wrong) or not count)
