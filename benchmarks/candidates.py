"""Kernels that people use, judged as `isobit check` judges: stock PyTorch, transformers, torch.compile, Liger, isobit.

A fused kernel that is compiled for the CPU is another kernel for another number of rows, so torch.compile is judged
with dynamic shapes, as it is used. Liger's kernels run in Triton's interpreter, in a process of their own.
"""

import json
import os
import subprocess
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers.activations import GELUActivation, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.judged_kernels import records_of
from isobit.contracts.options import Options
from isobit.foundation.records import ClaimRecord, Planted
from isobit.library.any_kernel.kernel_judging import chosen
from isobit.library.any_kernel.signatures import LIKE

CLAIMS = (
    "call", "rows", "rows-of-the-gradient", "storage", "accuracy", "overflow", "gradients", "decode-is-prefill",
)  # fmt: skip
COMPILED = ("silu", "softmax", "rms_norm")


def transformers_rms_norm(x, weight):
    norm = LlamaRMSNorm(x.shape[-1], eps=1e-6)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def transformers_rope(x, cos, sin):
    return apply_rotary_pos_emb(x, x, cos, sin)[0]


transformers_silu, transformers_gelu = SiLUActivation(), GELUActivation()
compiled_silu = torch.compile(F.silu, dynamic=True)
compiled_softmax = torch.compile(lambda x: torch.softmax(x, -1), dynamic=True)
compiled_rms_norm = torch.compile(transformers_rms_norm, dynamic=True)


def candidates(quick):
    """Yield (who, what it is like, subject)."""
    for like in sorted(LIKE):
        yield "isobit", like, ""
        yield "PyTorch", like, "stock"
    for name, like in (
        ("LlamaRMSNorm", "rms_norm"),
        ("apply_rotary_pos_emb", "rope"),
        ("SiLUActivation", "silu"),
        ("GELUActivation", "gelu"),
    ):
        yield f"transformers' {name}", like, f"benchmarks.candidates:transformers_{like}"
    for like in () if quick else COMPILED:
        yield "torch.compile", like, f"benchmarks.candidates:compiled_{like}"


def judged(like, subject):
    """Return the records of a kernel's claims."""
    options = Options(trusted=("benchmarks", "torch"), subject=subject, level=2)
    return records_of(chosen(like, None), options, like)


def liger():
    """Yield (who, what it is like, records) of Liger's kernels, judged in a process that interprets Triton."""
    words = [sys.executable, "-m", "benchmarks.liger_kernels"]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True
    )
    for name, like, records in json.loads(done.stdout):
        found = [
            ClaimRecord(**{**r, "planted": tuple(Planted(**p) for p in r["planted"])})
            for r in records
        ]
        yield f"Liger's {name}", like, found


def everyone(quick):
    """Yield (who, what it is like, records) of every kernel."""
    for who, like, subject in candidates(quick):
        yield who, like, judged(like, subject)
    if not quick:
        yield from liger()


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
    kept, count, wrong, examples, planted = 0, 0, 0, [], {}
    for who, like, records in everyone(quick):
        found = {r.claim.replace("samples", "rows"): r for r in records}
        each = [p for r in records for p in r.planted]
        caught = f"{sum(p.caught for p in each)} of {len(each)}"
        table.add_row(like, who, *(cell(found.get(claim)) for claim in CLAIMS), caught)
        kept += all(r.verdict == "kept" for r in records)
        wrong += who == "isobit" and any(r.verdict != "kept" for r in records)
        count += 1
        if who == "isobit":
            planted |= {
                (like, r.claim, p.name): p.caught
                for r in records
                for p in r.planted
                if ".any_kernel." in p.name
            }
        examples += [
            f"{who}, {like}, {r.claim}: {r.detail}" for r in records if r.verdict != "kept"
        ]
    console.print(table)
    console.print(f"{kept} of {count} kernels keep every claim; isobit's that do not: {wrong}")
    console.print(f"{sum(planted.values())} of {len(planted)} wrong kernels rejected")
    console.print("The smallest counter-example of each claim that is not kept:")
    for example in examples:
        console.print(example, soft_wrap=True, markup=False)
    return int(bool(wrong) or not count or not all(planted.values()))
