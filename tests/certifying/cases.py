"""The Triton kernels of operators as cases: tensors, launches, and the plan that they must follow."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import isobit
from isobit.certifying.names import names
from isobit.ops.linear import triton_products as linear
from isobit.ops.linear.triton import MERGED, WARPS
from isobit.ops.linear.triton_products import merge_parts, weight_grad
from isobit.ops.rms_norm.triton import normalise_rows
from isobit.ops.softmax.triton import softmax
from isobit.order.plan import FeaturePlan
from tests.certifying.plan import operators
from tests.certifying.plan.domain import Names, Values
from tests.certifying.plan.operators import Arithmetic
from tests.certifying.running import Launch, Session, draw, raw

POISON = float("nan")  # outputs start as NaN, so that what is not written shows


@dataclass(frozen=True)
class Case:
    """One operator, computed by launches; `expected(plan, inputs)` gives its output in either domain."""

    operator: str
    dtype: str
    form: str
    tile: str
    segments: int
    inputs: dict
    output: torch.Tensor
    launches: tuple
    expected: Callable
    cpu: Callable | None = None  # isobit's own operator, where its arithmetic is the same
    scratch: tuple = field(default=())


@dataclass(frozen=True)
class Judgement:
    """What one case gave on one target."""

    names: int
    names_differ: int
    bits_differ: int
    cpu_differ: int | None
    executed: int
    seconds: float  # of one core, without compiling
    opcodes: frozenset

    @property
    def right(self):
        return self.names > 0 and not (self.names_differ or self.bits_differ or self.cpu_differ)

    @property
    def compared(self):
        """How many outputs were compared by bits: with the plan, and with isobit's own operator."""
        return self.names * (1 if self.cpu_differ is None else 2)

    @property
    def instruction(self):
        return matrix_instruction(self.opcodes)


def matrix_instruction(opcodes):
    """Return the instruction that multiplies matrices."""
    stems = ("mma.sync", "wgmma", "tcgen05")
    found = [stem for stem in stems if any(each.startswith(stem) for each in opcodes)]
    return ", ".join(found) or ("fma.f32x2" if "fma.rn.f32x2" in opcodes else "fma")


def judge(case, target, *, engine=None, mutate=None, races=True):
    """Run a case for a target, and compare names and bits with the plan."""
    session, seconds = execute(case, target, engine, mutate=mutate, races=races)
    found, values = session.names_of(case.output), raw(case.output)
    # The plan is always over the target's own engine: another `engine` is a wrong leaf.
    own = Session(target).engine
    want = case.expected(Arithmetic(Names(), case.dtype, own), named_inputs(case))
    bits = case.expected(Arithmetic(Values(), case.dtype, own), values_of(case))
    cpu = None
    if case.cpu is not None:
        cpu = int((patterns(values) != patterns(raw(case.cpu()))).sum())
    return Judgement(
        found.size,
        int((found != want).sum()),
        int((patterns(values) != patterns(bits)).sum()),
        cpu,
        session.executed,
        seconds,
        frozenset(session.opcodes),
    )


def execute(case, target, engine=None, **options):
    """Return the session in which a case was run, and the seconds of one core, without compiling."""
    for tensor in (case.output, *case.scratch):
        tensor.fill_(POISON)
    session = Session(target, engine, **options)
    for launch in case.launches:
        launch.compile(target)
    begun = time.process_time()
    for launch in case.launches:
        session.run(launch)
    return session, time.process_time() - begun


def named_inputs(case):
    found = {}
    for name, tensor in case.inputs.items():
        first = tensor.storage_offset()
        every = names.input_names(name, first + tensor.numel(), 8 * tensor.element_size())
        found[name] = every[first:].reshape(tensor.shape)
    return found


def values_of(case):
    return {name: raw(tensor) for name, tensor in case.inputs.items()}


def patterns(array):
    """Raw bits."""
    return np.ascontiguousarray(array).view({2: np.uint16, 4: np.uint32}[array.itemsize])


def empty(*shape, dtype="f32"):
    return draw(*shape, dtype=dtype, seed=0)


def into(plan, dtype):
    """The plan's rounding to the dtype of the output."""
    return replace(plan, dtype=dtype)


def no_bias(x):
    """The arguments of a kernel without a bias."""
    return {"bias": x, "HAS_BIAS": False}


# ---- linear -------------------------------------------------------------------------------------
def linear_case(
    dtype, m, n, k, block=(16, 16, 32), form="tile", out="f32", segments=None, warps=4, stages=2
):
    """y = x · weightᵀ by one of three kernels; `segments` other than the plan's is a wrong kernel.

    The form "two pairs" is the counter with sums of two pairs in registers.
    """
    x, weight, y = (
        draw(m, k, dtype=dtype, seed=1),
        draw(n, k, dtype=dtype, seed=2),
        empty(m, n, dtype=out),
    )
    count = segments or FeaturePlan(k).count
    tiles = math.ceil(m / block[0]) * math.ceil(n / block[1])
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))
    common = {"x": x, "weight": weight, "m": m, "N": n, "K": k, "SEGMENTS": count, **sizes}
    common |= {"TRANSPOSED": False}
    whole = {**common, "y": y, "first_tile": 0, **no_bias(x)}
    options, scratch = {"num_warps": warps, "num_stages": stages}, ()
    if form == "tile":
        launches = (Launch(linear.linear_tile, (tiles,), whole, options),)
    elif form in ("counter", "two pairs"):
        pairs = 2 if form == "two pairs" else 1
        levels = count.bit_length() - pairs - 1
        scratch = (empty(tiles, max(levels, 1), *block[:2]),)
        given = {**whole, "scratch": scratch[0], "PAIRS": pairs, "LEVELS": levels}
        launches = (Launch(linear.linear_counter, (tiles,), given, options),)
    else:
        scratch = (empty(count, m, n),)
        merge = {"partial": scratch[0], "y": y, "m": m, "N": n, "SEGMENTS": count, "BLOCK": 64}
        merge |= no_bias(x)
        launches = (
            Launch(
                linear.linear_segments, (tiles, count), {**common, "partial": scratch[0]}, options
            ),
            Launch(linear.merge_segments, (math.ceil(m * n / 64),), merge, {"num_warps": 2}),
        )
    same = dtype == "f32" and out == "f32"
    return Case(
        "linear", dtype, form, "×".join(map(str, block)), count, {"x": x, "weight": weight}, y, launches,
        lambda plan, given: into(plan, out).result(operators.linear(plan, given["x"], given["weight"])),
        (lambda: isobit.linear(x, weight)) if same else None, scratch,
    )  # fmt: skip


# ---- rows ---------------------------------------------------------------------------------------
def count_rows(number):
    return f"{number} row" if number == 1 else f"{number} rows"


def rms_norm_case(dtype, m, n, rows_per_program=2, warps=4):
    x, weight, y = (
        draw(m, n, dtype=dtype, seed=3),
        draw(n, dtype=dtype, seed=4),
        empty(m, n, dtype=dtype),
    )
    count, scales = FeaturePlan(n).count, empty(m)
    given = {
        "x": x,
        "weight": weight,
        "y": y,
        "scales": scales,
        "m": m,
        "eps": 1e-6,
        "N": n,
        "SEGMENTS": count,
        "ROWS": rows_per_program,
    }
    grid = (math.ceil(m / rows_per_program),)
    return Case(
        "rms_norm", dtype, "rows", count_rows(rows_per_program), count, {"x": x, "weight": weight}, y,
        (Launch(normalise_rows, grid, given, {"num_warps": warps}),),
        lambda plan, given: operators.rms_norm(plan, given["x"], given["weight"], 1e-6),
        lambda: isobit.rms_norm(x, weight, 1e-6), (scales,),
    )  # fmt: skip


def softmax_case(dtype, m, n, rows_per_program=2, warps=4):
    x, y = draw(m, n, dtype=dtype, seed=5), empty(m, n, dtype=dtype)
    count = FeaturePlan(n).count
    given = {"x": x, "y": y, "m": m, "N": n, "SEGMENTS": count, "ROWS": rows_per_program}
    grid = (math.ceil(m / rows_per_program),)
    return Case(
        "softmax", dtype, "rows", count_rows(rows_per_program), count, {"x": x}, y,
        (Launch(softmax, grid, given, {"num_warps": warps}),),
        lambda plan, given: operators.softmax(plan, given["x"]),
        lambda: isobit.softmax(x),
    )  # fmt: skip


# ---- weight gradient ----------------------------------------------------------------------------
def weight_grad_case(dtype, lengths, n, k, block=(16, 16, 32), warps=4, stages=2, parts=0):
    """Return the case of a weight gradient; with `parts`, segments are divided over that many programs of a tile."""
    samples = isobit.Samples.packed(lengths)
    grad, x = (
        draw(samples.rows, n, dtype=dtype, seed=9),
        draw(samples.rows, k, dtype=dtype, seed=10),
    )
    dw, spans = empty(n, k), torch.tensor(samples.spans, dtype=torch.int64)
    count, tiles = len(samples.segments), math.ceil(n / block[0]) * math.ceil(k / block[1])
    own = count // max(parts, 1)  # segments of a program
    levels = own.bit_length() - 1
    sums = empty(parts, n, k) if parts else dw
    scratch = empty(max(parts, 1) * tiles, max(levels, 1), *block[:2])
    sizes = dict(zip(("BLOCK_N", "BLOCK_K", "BLOCK_T"), block, strict=True))
    given = {"grad": grad, "x": x, "spans": spans, "dw": sums, "scratch": scratch, "N": n, "K": k,
             "first_tile": 0, "size": len(lengths) // count, "segments": own, "levels": levels,
             "SPLIT": bool(parts), **sizes}  # fmt: skip
    grid, options = (tiles, max(parts, 1)), {"num_warps": warps, "num_stages": stages}
    launches = [Launch(weight_grad, grid, given, options)]
    if parts:
        given = {"sums": sums, "dw": dw, "parts": parts, "SIZE": n * k, "BLOCK": MERGED}
        launches += [Launch(merge_parts, (math.ceil(n * k / MERGED),), given, {"num_warps": WARPS})]

    def cpu():
        from isobit.ops.linear import portable

        return portable.weight_grad(grad, x, samples)

    return Case(
        "weight gradient", dtype, f"{parts} parts" if parts else "counter", "×".join(map(str, block)), count,
        {"grad": grad, "x": x}, dw, tuple(launches),
        lambda plan, given: into(plan, "f32").result(
            operators.weight_grad(plan, given["grad"], given["x"], samples)
        ),
        cpu if dtype == "f32" else None, (scratch, sums) if parts else (scratch,),
    )  # fmt: skip
