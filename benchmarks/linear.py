"""The linear operator against stock F.linear: frozen and not, forward and forward + backward.

r = stock time / our time. Contenders take turns within each round; the median of the rounds is printed, with the
digest of our result, and in the summary the quartiles of means over layers. `strict` is stock under
MKL_CBWR=AVX512,STRICT, in a child process (fp32 only).
"""

import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import isobit
from benchmarks.ratios import ROUNDS, Ratio
from benchmarks.strict import Strict
from isobit import bits
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.tree import library
from isobit.foundation.machine import thread_count

# (K, N) of the linear layers of two models; Q, K and V are one layer, gate and up another.
QWEN3_06B = {
    "0.6B qkv": (1024, 4096),
    "0.6B o": (2048, 1024),
    "0.6B gate/up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "0.6B head": (1024, 151936),
}
QWEN3_8B = {
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate/up": (4096, 24576),
    "8B down": (12288, 4096),
}
ROWS = (1, 8, 64, 512, 2048)
TRAINING_ROWS = (512, 2048)


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=118)
    shapes = {k: v for k, v in (QWEN3_06B | ({} if quick else QWEN3_8B)).items() if "head" not in k}
    if not is_green(console, "linear"):
        return 1
    strict = Strict()
    ratios = {}
    cases = [
        (count, dtype, name, rows)
        for count in threads
        for dtype in dtypes
        for name in shapes
        for rows in ROWS
    ]
    table = Table(
        "threads",
        "dtype",
        "layer",
        "M",
        "stock ms",
        "frozen",
        "not frozen",
        "strict",
        "fwd+bwd",
        "digest of y",
    )
    for count, dtype, name, rows in track(
        cases, "timing", console=Console(stderr=True), transient=True
    ):
        with thread_count(count):
            found = time_case(getattr(torch, dtype), shapes[name], rows, count, strict, quick)
        for what in ("frozen", "plain", "step"):
            ratios.setdefault((dtype, count, what), []).append((rows, found[what]))
        cells = [
            f"{found[w].median:.2f}" if found[w] else ""
            for w in ("frozen", "plain", "strict", "step")
        ]
        table.add_row(
            str(count),
            dtype,
            name,
            str(rows),
            f"{statistics.median(found['stock']) * 1e3:.3f}",
            *cells,
            found["digest"],
        )
    strict.close()
    console.print(table)
    summarise(console, ratios, threads, dtypes)
    return 0


def is_green(console, operator):
    """Times nothing whose claims are not kept."""
    own = library() / operator / "contract.yaml"
    contract = load_contract(own if own.exists() else library() / f"{operator}.contract.yaml")
    for record in verify_contract(contract, Options(level=2)):
        console.print(f"{record.claim}: {record.differing} of {record.compared:,} differ")
        if record.verdict != "kept":
            console.print(f"{record.verdict}, so not timed: {record.detail}")
            return False
    return True


def time_case(dtype, shape, rows, threads, strict, quick):
    k, n = shape
    torch.manual_seed(0)
    layer = isobit.nn.Linear(k, n, bias=False, dtype=dtype)
    # A copy each: a weight that two contenders touch would be warmer for both than a packed one for itself.
    x, weight, stock_weight = (
        torch.randn(rows, k).to(dtype),
        layer.weight.clone(),
        layer.weight.clone(),
    )
    work = rows * k * n
    rounds = max(ROUNDS, min(15 if quick else 31, int(3e10 / (work + 2e8))))
    with torch.inference_mode():
        frozen = isobit.freeze(layer)
        times = take_turns(
            {
                "frozen": lambda: layer(x),
                "plain": lambda: isobit.linear(x, weight),
                "stock": lambda: torch.nn.functional.linear(x, stock_weight),
            },
            rounds,
            (lambda: strict.seconds(threads, rows, k, n, 1)) if dtype == torch.float32 else None,
        )
        digest = bits.digest(isobit.linear(x, weight))[:12]
        assert digest == bits.digest(layer(x))[:12]
    frozen.thaw()
    found = {
        name: Ratio.of(times["stock"], times[name])
        for name in ("frozen", "plain", "strict")
        if name in times
    }
    step = None
    if rows in TRAINING_ROWS:
        steps = take_turns(
            {
                "ours": training_step(isobit.linear, x, weight),
                "stock": training_step(torch.nn.functional.linear, x, weight),
            },
            max(ROUNDS, rounds // 3),
        )
        step = Ratio.of(steps["stock"], steps["ours"])
    return {"stock": times["stock"], "digest": digest, "strict": None, "step": step} | found


def training_step(function, x, weight):
    x = x.detach().requires_grad_()
    grad = torch.randn(x.shape[0], weight.shape[0]).to(x.dtype)

    def step():
        x.grad = weight.grad = None
        function(x, weight).backward(grad)

    return step


def take_turns(contenders, rounds, strict=None):
    """Return the seconds of each; every round times each once."""
    times = {name: [] for name in contenders} | ({"strict": []} if strict else {})
    for contender in contenders.values():
        contender()
    for turn in range(rounds):
        if strict:
            times["strict"].append(strict())
        # Whoever comes first finds the caches as the last left them: the order rotates.
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    return times


def summarise(console, ratios, threads, dtypes):
    """Print geometric means over layers, with their quartiles, and the least; then the last line, over frozen cases."""
    table = Table("dtype", "threads", "case", "ratio", "quartiles", "least")
    for dtype in dtypes:
        for count in threads:
            frozen, plain, step = (
                [(m, r) for m, r in ratios[dtype, count, what] if r]
                for what in ("frozen", "plain", "step")
            )
            cases = {
                "forward, frozen": [r for _, r in frozen],
                "forward of 64 rows and more": [r for m, r in plain if m >= 64],
                "forward of 8 rows": [r for m, r in plain if m == 8],
                "forward of one row": [r for m, r in plain if m == 1],
                "forward and backward of 512 rows and more": [r for _, r in step],
            }
            for name, found in cases.items():
                least = f"{min(r.median for r in found):.2f}"
                table.add_row(dtype, str(count), name, *Ratio.mean(found).cells(), least)
    console.print(table)
    frozen = {d: [r for c in threads for _, r in ratios[d, c, "frozen"]] for d in dtypes}
    short = {"float32": "fp32", "bfloat16": "bf16"}
    means = " ".join(f"{short[d]} {Ratio.mean(frozen[d]).median:.3f}" for d in dtypes)
    print(f"geomean {means} min {min(r.median for v in frozen.values() for r in v):.3f}")
