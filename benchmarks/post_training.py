"""Tools of post-training when only threads, batch or order change: elements whose bits differ, and one of them.

Rows of torch, transformers' tokenizers and isobit run everywhere; those of llm-compressor and torchao where they are
installed (`pip install llmcompressor==0.14.0.1 torchao==0.18.0`, in an environment of their own).
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.utils import prune

from isobit import bits, distillation_loss
from isobit.calibration import ColumnNorms, Hessian, wanda_statistics
from isobit.foundation.machine import thread_count
from isobit.library.post_training.merging import mergekit
from isobit.library.post_training.pruning import wanda_magnitude
from isobit.library.post_training.quantising import quantize, torch_dynamic
from isobit.library.post_training.tokenizing import count_retokenised, tokenizer


def differing(one, other):
    """Return (number of elements whose bits differ, number of all, the first of them)."""
    left, right = (bits.as_integers(t.contiguous()).flatten() for t in (one, other))
    apart = left != right
    if not bool(apart.any()):
        return 0, left.numel(), ""
    at = int(apart.to(torch.uint8).argmax())
    values = (float(t.flatten()[at]) for t in (one, other))
    return int(apart.sum()), left.numel(), "element {}: {:.9g} and {:.9g}".format(at, *values)


def activations():
    make = torch.Generator().manual_seed(0)
    mix = torch.randn(256, 256, generator=make) * torch.logspace(0, 2.5, 256)
    return torch.randn(32, 64, 256, generator=make) @ mix


def stock_hessian(x, batch):
    """Add as llm-compressor does: rescale what there is, then add a batch."""
    total, count = torch.zeros(256, 256), 0
    for part in x.split(batch):
        total *= count / (count + len(part))
        count += len(part)
        rows = part.reshape(-1, 256) * (2 / count) ** 0.5
        total += rows.T @ rows
    return total


def own_hessian(x, batch):
    found = Hessian(256)
    for part in x.split(batch):
        found.add(part)
    return found.value()


def on_threads(call, *threads):
    found = []
    for count in threads:
        with thread_count(count):
            found.append(call())
    return differing(*found)


def calibration():
    x = activations()
    norms = [ColumnNorms(256), ColumnNorms(256)]
    norms[0].add(x)
    for sample in x.flip(0):
        norms[1].add(sample)
    plain = x.reshape(-1, 256)
    yield (
        "torch",
        "Hessian as GPTQ adds it",
        "batch 32, 1",
        differing(stock_hessian(x, 32), stock_hessian(x, 1)),
    )
    yield (
        "isobit",
        "calibration.Hessian",
        "batch 32, 1",
        differing(own_hessian(x, 32), own_hessian(x, 1)),
    )
    yield (
        "isobit",
        "calibration.Hessian",
        "threads 1, 2",
        on_threads(lambda: own_hessian(x, 8), 1, 2),
    )
    yield (
        "torch",
        "norms of columns",
        "samples reversed",
        differing(plain.norm(dim=0), plain.flip(0).norm(dim=0)),
    )
    yield (
        "isobit",
        "calibration.ColumnNorms",
        "samples reversed",
        differing(*(n.value() for n in norms)),
    )


def distillation():
    make = torch.Generator().manual_seed(1)
    teacher, head = torch.randn(2000, 16, generator=make), torch.randn(1000, 16, generator=make)
    student = teacher + 1e-3 * torch.randn(2000, 16, generator=make)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t, s, w = (x.to(dtype) for x in (teacher, student, head))
        p, q = (F.log_softmax(F.linear(x, w), -1) for x in (t, s))
        stock = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        ours = distillation_loss(s, w, (t, w), None, alpha=1.0, reduction="none")
        for tool, name, found in (
            ("torch", "F.kl_div", stock),
            ("isobit", "distillation_loss", ours),
        ):
            count, least = int((found < 0).sum()), int(found.argmin())
            shown = f"token {least}: {float(found[least]):.3g}" if count else ""
            varied = f"negative, {str(dtype)[6:]}"
            yield tool, name, varied, (count, len(found), shown)


def pruning():
    make = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 100, generator=make).bfloat16()
    for tool, name, call in (
        ("torch", "nn.utils.prune.l1_unstructured", by_torch),
        ("Wanda", "prune_magnitude of its repository", wanda_magnitude),
    ):
        zeros = int((call(weight, 0.5) == 0).sum())
        shown = f"{zeros:,} zeros, 3,200 asked" if zeros != 3200 else ""
        yield tool, name, "exact count, bf16 with ties", (abs(zeros - 3200), 6400, shown)


def by_torch(weight, sparsity):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    prune.l1_unstructured(layer, "weight", sparsity)
    return layer.weight.detach()


def quantising():
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    for tool, name, call in (
        ("torch", "dynamic int8, a scale per tensor", torch_dynamic),
        ("isobit", "reference, int8, a scale per row", lambda x: quantize(x, "int8")),
    ):
        whole, alone = call(x), [call(row[None]) for row in x]
        values = [(codes.double() - zero) * scale for codes, scale, zero in (whole, *alone)]
        yield tool, name, "rows alone", differing(values[0], torch.cat(values[1:]))


def merging():
    make = torch.Generator().manual_seed(4)
    base, a, b = (torch.randn(512, 512, generator=make).bfloat16() for _ in range(3))

    def dare():
        torch.manual_seed(0)
        return mergekit(base, base + a / 4, base + b / 4, "dare_linear")

    yield "mergekit", "DARE as 0.1.5 computes it, bf16", "threads 1, 2", on_threads(dare, 1, 2)


def tokenizing():
    made = tokenizer()
    changed, count = count_retokenised(made)
    yield "isobit", "reference BPE", "encode(decode(ids)), information", (changed, count, "")


def torchao():
    from torchao.sparsity import WandaSparsifier

    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(5)).bfloat16()

    def mask(batch):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(1000, 333, bias=False)).bfloat16()
        sparsifier = WandaSparsifier(sparsity_level=0.5)
        sparsifier.prepare(model, config=None)
        for part in x.split(batch):
            model(part)
        sparsifier.step()
        sparsifier.squash_mask()
        return (model[0].weight == 0).float()

    yield "torchao", "WandaSparsifier, bf16", "batch 64, 1", differing(mask(64), mask(1))
    with wanda_statistics():
        yield (
            "isobit",
            "the same in wanda_statistics()",
            "batch 64, 1",
            differing(mask(64), mask(1)),
        )


CASES = (calibration, distillation, pruning, quantising, merging, tokenizing)


def run(quick, threads, dtypes):
    """Print the table; the exit code is 1 if a row of isobit's differs, or nothing of stock's does."""
    console = Console(highlight=False, width=180)
    table = Table("tool", "call", "varied", "differ", "of", "the first")
    cases = [*CASES, *([torchao] if find_spec("torchao") else [])]
    rows = [row for case in cases for row in case()]
    for tool, call, varied, (count, total, first) in rows:
        table.add_row(tool, call, varied, f"{count:,}", f"{total:,}", first)
    console.print(table)
    ours = [row[3][0] for row in rows if row[0] == "isobit" and "information" not in row[2]]
    stock = [row[3][0] for row in rows if row[0] != "isobit"]
    console.print(
        f"isobit: {sum(map(bool, ours))} of {len(ours)} rows differ; others: {sum(map(bool, stock))} of {len(stock)}"
    )
    return int(any(ours) or not any(stock))
