"""Compiled kernels against the plan, without a GPU: names and bits, planted wrong kernels, mutations, registers."""

import time
from collections import Counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from isobit.compiled.compile import Compiler, specialise
from isobit.ops.gpu import linear
from isobit.order.plan import ATTENTION_CHUNK
from tests.compiled.attention_cases import attention_case
from tests.compiled.cases import (
    empty,
    judge,
    linear_case,
    rms_norm_case,
    softmax_case,
    weight_grad_case,
)
from tests.compiled.controls import CONTROLS
from tests.compiled.mutations import try_mutations

TARGETS = ("sm_80", "sm_90", "sm_100")
MUTATIONS = 120
SHORT = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
HEADER = (
    "kernel", "dtype", "target", "instruction", "tiles", "segments", "configurations", "instructions executed",
    "seconds of one core", "names compared", "names differ", "bits differ",
)  # fmt: skip


def cases(quick):
    """Yield (kernel, cases) or (kernel, cases, targets): a row for each dtype, target and instruction."""
    counts = (512, 1024) if quick else (256, 512, 1024, 2048)  # 1, 2, 4 and 8 segments
    for dtype in ("f32", "bf16", "f16"):
        yield "linear, one tile", [linear_case(dtype, 5, 20, k) for k in counts]
        yield "linear, tails in M, N and K", [linear_case(dtype, 19, 23, k) for k in (50, 100)]
        yield "linear, counter", [linear_case(dtype, 5, 20, k, form="counter") for k in counts[-2:]]
        yield (
            "linear, segments on the grid",
            [linear_case(dtype, 5, 20, k, form="segments") for k in counts[-2:]],
        )
        if dtype == "f32":
            sizes = ((100, (32, 32, 32)), (48, (64, 64, 16)))
            yield (
                "linear, large tiles",
                [linear_case(dtype, 33, 40, k, block) for k, block in sizes],
            )
        else:
            yield (
                "linear, large tiles",
                [
                    linear_case(dtype, 70, 40, 512, (64, 32, 64)),
                    linear_case(dtype, 70, 40, 512, (64, 32, 32), stages=3),
                    linear_case(dtype, 130, 40, 512, (128, 32, 64), warps=8),
                    linear_case(dtype, 70, 40, 1024, (64, 32, 64), form="counter"),
                ],
            )
    for dtype in ("f32", "bf16"):
        yield "rms_norm", [rms_norm_case(dtype, 3, n, rows) for n, rows in ((1024, 2), (1050, 1))]
        yield "softmax", [softmax_case(dtype, 3, n, rows) for n, rows in ((1024, 2), (1050, 1))]
    yield (
        "attention, decode and prefill",
        [
            attention_case("bf16", 5, 300, chunk=128),
            attention_case("bf16", 5, 300, chunk=128, form="chunks"),
            attention_case("bf16", 40, 300, chunk=128, tile=64),
        ],
    )
    yield "attention, decode and prefill", [attention_case("f32", 3, 150, chunk=128)]
    whole = f"attention over {ATTENTION_CHUNK:,} keys"
    for form, targets in (("fold", ("sm_80", "sm_100")), ("chunks", ("sm_90",))):
        yield whole, [attention_case("bf16", 1, ATTENTION_CHUNK + 30, form=form)], targets
    for dtype in ("f32", "bf16"):
        blocks = [(16, 16, 32)] if dtype == "f32" else [(16, 16, 32), (64, 16, 32)]
        yield (
            "weight gradient",
            [weight_grad_case(dtype, [300, 0, 17, 5], 20, 20, block) for block in blocks],
        )


def run(quick, threads, dtypes):
    """Print the tables; return 1 if a name or a bit differs, or if a wrong kernel or a mutation is not caught."""
    console, begun = Console(highlight=False, width=280), time.process_time()
    good, total = show_kernels(console, quick)
    caught = show_controls(console)
    tally = show_mutations(console, 40 if quick else MUTATIONS)
    show_registers(console, quick)
    tile = run_a_tile()
    console.print(
        f"a bf16 tile of 128×128×64 at K = 1024 (sm_90, {tile.instruction}): {tile.seconds:.1f} s of one core, "
        f"{tile.executed:,} instructions; {tile.names_differ} of {tile.names:,} names differ, {tile.bits_differ} bits"
    )
    console.print(f"{total}; {time.process_time() - begun:.0f} s of one core in all")
    return int(not (good and caught and tile.right and not tally.missed))


def show_kernels(console, quick):
    table, rows, sums = Table(*HEADER), {}, Counter()
    todo = [
        (kernel, case, target)
        for kernel, found, *targets in cases(quick)
        for case in found
        for target in (targets[0] if targets else TARGETS)
    ]
    for kernel, case, target in track(
        todo, "running", console=Console(stderr=True), transient=True
    ):
        found = judge(case, target)
        key = (
            kernel,
            SHORT[case.dtype],
            target,
            found.instruction if case.operator not in ("rms_norm", "softmax") else "rows",
        )
        rows.setdefault(key, []).append((case, found))
    for key, found in rows.items():
        judged = [each for _, each in found]
        tiles = dict.fromkeys(case.tile for case, _ in found)
        counts = dict.fromkeys(str(case.segments) for case, _ in found)
        numbers = {
            "executed": sum(each.executed for each in judged),
            "names": sum(each.names for each in judged),
            "names differ": sum(each.names_differ for each in judged),
            "bits differ": sum(each.bits_differ + (each.cpu_differ or 0) for each in judged),
        }
        sums.update(numbers, configurations=len(found))
        cells = [f"{numbers['executed']:,}", f"{sum(each.seconds for each in judged):.1f}"]
        cells += [f"{numbers[name]:,}" for name in ("names", "names differ", "bits differ")]
        table.add_row(*key, ", ".join(tiles), ", ".join(counts), str(len(found)), *cells)
    console.print(table)
    text = (
        f"{sums['configurations']} configurations, {sums['executed']:,} instructions executed, "
        f"{sums['names']:,} names compared, {sums['names differ']} differ; {sums['bits differ']} bits differ"
    )
    return sums["names"] and not (sums["names differ"] or sums["bits differ"]), text


def show_controls(console):
    table, every = Table("planted wrong kernel", "caught", "how"), True
    for name, control in CONTROLS.items():
        caught, how = control()
        every = every and caught
        table.add_row(name, "yes" if caught else "NO", how)
    console.print(table)
    return every


def show_mutations(console, count):
    tally = try_mutations(count, seed=16)
    table = Table("mutation of PTX text", "caught")
    for kind, number in sorted(tally.caught.items()):
        table.add_row(kind, str(number))
    console.print(table)
    caught, names = sum(tally.caught.values()), tally.how["names"]
    how = ", ".join(f"{number} by {kind}" for kind, number in tally.how.most_common())
    again = "; ".join(f"{number}: {reason}" for reason, number in tally.again.most_common())
    console.print(f"{caught} of {caught + len(tally.missed)} mutations caught: {how}")
    console.print(
        f"of the {names} caught by names, {tally.bits} changed a bit of the output on the input of the case"
    )
    console.print(f"drawn again, because they change nothing: {again or 'none'}")
    for missed in tally.missed:
        console.print(f"missed: {missed}")
    return tally


def show_registers(console, quick):
    """Registers and spills of the tile and the counter, by ptxas."""
    table = Table(
        "bf16, 128×128×64, 8 warps, 3 stages",
        "target",
        "K",
        "segments",
        "registers",
        "spilled bytes a thread",
    )
    for target in ("sm_90", "sm_100"):
        compiler = Compiler(target)
        for k, count, form in ((4096, 1, "tile"), (4096, 2, "tile"), (4096, 4, "tile"), (4096, 8, "tile"),
                               (4096, 4, "counter"), (4096, 8, "counter"), (14336, 8, "counter")):  # fmt: skip
            if quick and form == "tile" and count > 1:
                continue
            x = empty(16, 16, dtype="bf16")
            given = {"x": x, "weight": x, "y": x, "M": 4096, "N": 4096, "K": k, "SEGMENTS": count,
                     "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3,
                     "enable_fp_fusion": False}  # fmt: skip
            kernel = linear.linear_tile
            if form == "counter":
                kernel = linear.linear_counter
                given |= {"scratch": empty(16), "LEVELS": count.bit_length() - 2}
            facts = compiler.compile(kernel, specialise(kernel, target, (), given)).facts
            table.add_row(
                kernel.__name__,
                target,
                f"{k:,}",
                str(count),
                str(facts.registers),
                f"{facts.spill_bytes:,}",
            )
    console.print(table)


def run_a_tile():
    """Run one tile of 128×128×64 at K = 1024, with names and bits, after it is compiled."""
    return judge(linear_case("bf16", 128, 128, 1024, (128, 128, 64), warps=8, stages=3), "sm_90")
