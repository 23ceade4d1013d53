"""Compiled kernels against the plan, without a GPU: names and bits, planted wrong kernels, mutations, registers."""

import time
from collections import Counter

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from isobit.certifying.running.compile import Compiler, specialise
from isobit.ops.linear import triton_products as linear
from isobit.ops.linear.tiles import tile_of
from isobit.order.plan import ATTENTION_CHUNK
from tests.certifying.attention_cases import attention_case, decode_against_prefill
from tests.certifying.cases import (
    empty,
    judge,
    linear_case,
    rms_norm_case,
    softmax_case,
    weight_grad_case,
)
from tests.certifying.controls import CONTROLS
from tests.certifying.mutations import try_mutations

TARGETS = ("sm_80", "sm_90", "sm_100")
MUTATIONS = 120
SHORT = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
HEADER = (
    "kernel", "dtype", "target", "instruction", "tiles", "segments", "configurations", "instructions executed",
    "seconds", "names differ", "bits differ",
)  # fmt: skip


def cases(quick):
    """Yield (kernel, cases) or (kernel, cases, targets): a row for each dtype, target and instruction."""
    counts = (512, 1024) if quick else (256, 512, 1024, 2048)  # 1, 2, 4 and 8 segments
    for dtype in ("f32", "bf16", "f16"):
        yield "linear, one tile", [linear_case(dtype, 5, 20, k) for k in counts]
        yield "linear, tails in M, N and K", [linear_case(dtype, 19, 23, k) for k in (50, 100)]
        wide = [] if dtype == "f32" else [(70, 40, 1024, (64, 32, 64))]
        small = [(5, 20, k) for k in counts[-2:]]
        for form, shown in (("counter", "counter"), ("segments", "segments on the grid")):
            found = [linear_case(dtype, *size, form=form) for size in (*small, *wide)]
            yield f"linear, {shown}", found
        yield "linear, large tiles", list(large_tiles(dtype, counts))
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
    whole = f"attention over {ATTENTION_CHUNK + 30:,} keys"
    for form, targets in (("fold", ("sm_80", "sm_100")), ("chunks", ("sm_90",))):
        yield whole, [attention_case("bf16", 1, ATTENTION_CHUNK + 30, form=form)], targets
    for dtype in ("f32", "bf16"):
        blocks = [(16, 16, 32)] if dtype == "f32" else [(16, 16, 32), (64, 16, 32)]
        found = [weight_grad_case(dtype, [300, 0, 17, 5], 20, 20, block) for block in blocks]
        yield "weight gradient", found
        found = [weight_grad_case(dtype, [300, 0, 17, 5], 20, 20, blocks[0], parts=4)]
        yield "weight gradient, split over samples", found


def large_tiles(dtype, counts):
    """Yield cases whose products are made by wgmma and tcgen05 where the target has them."""
    if dtype == "f32":
        yield linear_case(dtype, 33, 40, 100, (32, 32, 32))
        yield linear_case(dtype, 33, 40, 48, (64, 64, 16))
        return
    for k in counts:
        yield linear_case(dtype, 70, 40, k, (64, 32, 64))
    yield linear_case(dtype, 70, 40, 512, (64, 32, 32), stages=3)
    yield linear_case(dtype, 130, 40, 512, (128, 32, 64), warps=8)


def run(quick, threads, dtypes):
    """Print the tables; return 1 if a name or a bit differs, or if a wrong kernel or a mutation is not caught."""
    console, begun = Console(highlight=False, width=280), time.process_time()
    good, total = show_kernels(console, quick)
    same = show_decode(console)
    caught = show_controls(console)
    tally = show_mutations(console, 40 if quick else MUTATIONS)
    show_registers(console, quick)
    tile = run_a_tile()
    console.print(total)
    console.print(
        f"a bf16 tile of 128×128×64 at K = 1024 (sm_90, {tile.instruction}): {tile.seconds:.1f} s,"
        f" {tile.executed:,} instructions; {tile.names_differ} of {tile.names:,} names and"
        f" {tile.bits_differ} of {tile.compared:,} outputs differ"
    )
    console.print(f"{time.process_time() - begun:.0f} s of one core in all")
    return int(not (good and same and caught and tile.right and not tally.missed))


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
            "bits": sum(each.compared for each in judged),
            "bits differ": sum(each.bits_differ + (each.cpu_differ or 0) for each in judged),
        }
        sums.update(numbers, configurations=len(found))
        cells = [f"{numbers['executed']:,}", f"{sum(each.seconds for each in judged):.1f}"]
        cells += [f"{numbers[f'{of} differ']:,} of {numbers[of]:,}" for of in ("names", "bits")]
        table.add_row(*key, ", ".join(tiles), ", ".join(counts), str(len(found)), *cells)
    console.print(table)
    text = (
        f"{sums['configurations']} configurations, {sums['executed']:,} instructions executed;"
        f" {sums['names differ']} of {sums['names']:,} names and {sums['bits differ']} of"
        f" {sums['bits']:,} outputs differ"
    )
    return sums["names"] and not (sums["names differ"] or sums["bits differ"]), text


def show_decode(console):
    """Compare the last queries of a sample by a decode tile and by a prefill tile directly."""
    title = "attention, 5 queries at the end of 40, 200 keys in chunks of 128"
    table, same = Table(title, "target", "decode", "prefill", "names differ", "bits differ"), True
    for target in TARGETS:
        for form, shown in (("fold", "one program"), ("chunks", "a program per chunk (split-KV)")):
            used, count, *differ = decode_against_prefill(target, form)
            same = same and count and not any(differ)
            table.add_row(shown, target, *used, *(f"{each} of {count}" for each in differ))
    console.print(table)
    return same


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
    fates = ("names", "refused", "missed")
    table = Table("mutation of PTX text", "drawn", "caught by names", "refused", "missed")
    for kind in sorted({kind for kind, _ in tally.judged}):
        numbers = [tally.judged[kind, fate] for fate in fates]
        table.add_row(kind, str(sum(numbers)), *map(str, numbers))
    table.add_row("all", str(tally.judged.total()), *(str(tally.of(fate)) for fate in fates))
    console.print(table)
    refused = ", ".join(f"{number} by {kind}" for kind, number in tally.refusals.most_common())
    again = "; ".join(f"{number}: {reason}" for reason, number in tally.again.most_common())
    console.print(
        f"of the {tally.of('names')} caught by names, {tally.bits} changed a bit of the output on the case's input"
    )
    console.print(f"refused: {refused or 'none'}")
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
        "spilled bytes per thread",
    )
    for target in ("sm_90", "sm_100"):
        compiler = Compiler(target)
        for k, count, form in ((4096, 1, "tile"), (4096, 2, "tile"), (4096, 4, "tile"), (4096, 8, "tile"),
                               (4096, 4, "counter"), (4096, 8, "counter"), (14336, 8, "counter")):  # fmt: skip
            if quick and form == "tile" and count > 1:
                continue
            x = empty(16, 16, dtype="bf16")
            given = {"x": x, "weight": x, "y": x, "m": 4096, "N": 4096, "K": k, "SEGMENTS": count,
                     "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3,
                     "bias": x, "HAS_BIAS": False, "TRANSPOSED": False, "first_tile": 0,
                     "enable_fp_fusion": False}  # fmt: skip
            kernel = linear.linear_tile
            if form == "counter":
                kernel = linear.linear_counter
                pairs = tile_of("many rows", torch.bfloat16, target).pairs
                levels = count.bit_length() - pairs.bit_length() - 1
                given |= {"scratch": empty(16), "PAIRS": pairs, "LEVELS": levels}
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
